"""Encode and decode candidate sets in the `meta_info` of the patched SGLang.

Base64 form::

    {output,input}_top_p_logprobs_val_base64   log-probs of all candidates, position after position
    {output,input}_top_p_logprobs_idx_base64   token ids of all candidates
    {output,input}_top_p_logprobs_lengths      one set size per position; -1 if SGLang has no distribution

List form::

    {output,input}_top_p_logprobs[t] = [[logprob, token_id, text or null], ...], or null
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import MissingCandidateSetsError, WireError
from sglang_topp.formats.field_parsing import (
    FLOAT32,
    INT32,
    Decoded,
    b64array,
    b64text,
    check_range,
    check_vocab,
    entry_rows,
    integers,
    token_ids_of,
)

__all__ = ["NO_DISTRIBUTION", "Side", "decode_prompt_top_p", "decode_top_p", "encode_top_p", "has_top_p"]

Side: TypeAlias = Literal["output", "input"]

NO_DISTRIBUTION = -1
"""The number in `lengths` for a position without a distribution, such as the prompt's first token."""


def has_top_p(meta_info: Mapping[str, Any]) -> bool:
    """Return whether the response has candidate sets of generated tokens, as base64 or as lists."""
    return any(key.startswith("output_top_p_logprobs") for key in meta_info)


def encode_top_p(
    side: Side, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], lengths: Sequence[int]
) -> dict[str, Any]:
    """Encode candidate sets as the three `meta_info` fields of the base64 form.

    Args:
        side: `"output"` for generated positions, `"input"` for prompt positions.
        token_ids: int32 [n], the candidates' token ids, position after position.
        logprobs: float32 [n], the candidates' log-probs, in the order of `token_ids`.
        lengths: for each position, the set size, or `NO_DISTRIBUTION`.
    """
    name = f"{side}_top_p_logprobs"
    return {
        f"{name}_val_base64": b64text(logprobs, FLOAT32),
        f"{name}_idx_base64": b64text(token_ids, INT32),
        f"{name}_lengths": list(lengths),
    }


def decode_top_p(
    meta_info: Mapping[str, Any], output_ids: ArrayLike, *, vocab_size: int | None = None
) -> CandidateSets:
    """Decode the candidate sets of the generated tokens in a `/generate` response, from base64 or lists.

    Args:
        meta_info: the response's `meta_info`.
        output_ids: integers [T], the response's `output_ids`.
        vocab_size: if given, ids of `vocab_size` or more are errors.

    Raises:
        MissingCandidateSetsError: the response has no sets, or no set for a position.
        SampledTokenMissingError: the set of a position lacks the sampled token of that position.
        WireError: a field is malformed in any other way. The message names the invalid field.
    """
    decoded = _decode("output", meta_info, output_ids, vocab_size)
    missing = np.flatnonzero(np.diff(decoded.offsets) == 0)
    if len(missing):
        raise MissingCandidateSetsError(
            "output_top_p_logprobs_lengths",
            f"no candidate set at {len(missing)} of {len(decoded.sampled_ids)} positions, the first at"
            f" {missing[0]}; every generated token needs one",
        )
    return decoded.to_sets()


def decode_prompt_top_p(
    meta_info: Mapping[str, Any], prompt_ids: ArrayLike, *, vocab_size: int | None = None
) -> CandidateSets:
    """Decode the candidate sets of the prompt tokens in a `/generate` response.

    The response has sets only for the prompt tokens from `logprob_start_len` on.

    Args:
        meta_info: the response's `meta_info`.
        prompt_ids: integers [T], the request's prompt tokens from `logprob_start_len` on. Each prompt token
            counts as the sampled token of its position. Do not take the ids from `input_token_logprobs`,
            where SGLang 0.5.23 reports the vocabulary's last id as 0.
        vocab_size: if given, ids of `vocab_size` or more are errors.

    Returns:
        One candidate set for each of the T prompt tokens. The prompt's first token has an empty set, because
        SGLang has no distribution for that token.

    Raises:
        MissingCandidateSetsError: the response has no sets.
        SampledTokenMissingError, WireError: for the same reasons as in `decode_top_p`.
    """
    return _decode("input", meta_info, prompt_ids, vocab_size).to_sets()


def _decode(
    side: Side, meta_info: Mapping[str, Any], sampled_ids: ArrayLike, vocab_size: int | None
) -> Decoded:
    """Decode the sets of generated or prompt tokens. A position without a distribution gets an empty set."""
    name = f"{side}_top_p_logprobs"
    values, ids, counts = f"{name}_val_base64", f"{name}_idx_base64", f"{name}_lengths"
    sampled = token_ids_of(f"{side}_ids", sampled_ids)
    if name in meta_info:
        values = ids = counts = name
        token_ids, logprobs, lengths = entry_rows(name, meta_info[name])
    else:
        present = [key for key in (values, ids, counts) if key in meta_info]
        if not present:
            raise MissingCandidateSetsError(
                name,
                "the response holds no candidate sets; is top_logprobs_p in the request, and does the server"
                " run the sglang-topp plugin (`sglang-topp doctor`)?",
            )
        if len(present) < 3:
            absent = next(key for key in (values, ids, counts) if key not in present)
            raise WireError(absent, f"missing beside {', '.join(present)}")
        logprobs = b64array(values, meta_info[values], FLOAT32)
        token_ids = b64array(ids, meta_info[ids], INT32)
        lengths = integers(counts, meta_info[counts])
        check_range(counts, lengths, NO_DISTRIBUTION, "set sizes, or -1 for none")

    if len(lengths) != len(sampled):
        raise WireError(counts, f"got {len(lengths)} positions for {len(sampled)} tokens")
    if len(logprobs) != len(token_ids):
        raise WireError(values, f"got {len(logprobs)} log-probs for {len(token_ids)} token ids")
    sizes = np.maximum(lengths, 0)
    if (total := int(sizes.sum())) != len(token_ids):
        raise WireError(counts, f"add up to {total}, but there are {len(token_ids)} token ids")
    check_vocab(ids, token_ids, vocab_size)
    fields = {"token_ids": ids, "logprobs": values, "offsets": counts, "sampled_ids": ids}
    return Decoded(token_ids, logprobs, offsets_of(sizes), sampled, fields)
