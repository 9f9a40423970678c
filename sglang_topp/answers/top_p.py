"""Candidate sets in the `meta_info` of the patched SGLang.

Base64 form::

    {output,input}_top_p_logprobs_val_base64   every candidate's log-prob, position after position
    {output,input}_top_p_logprobs_idx_base64   their token ids
    {output,input}_top_p_logprobs_lengths      one set size per position, -1 where there is no distribution

List form::

    {output,input}_top_p_logprobs[t] = [[logprob, token_id, text or null], ...], or null
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp._csr import offsets_of
from sglang_topp.answers.fields import (
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
from sglang_topp.errors import MissingCandidateSetsError, WireError

__all__ = ["NO_DISTRIBUTION", "Side", "decode", "decode_output", "encode_sets", "has_output_sets"]

Side: TypeAlias = Literal["output", "input"]

NO_DISTRIBUTION = -1
"""The set size that stands for "SGLang has no distribution at this position"."""


def has_output_sets(meta_info: Mapping[str, Any]) -> bool:
    """Whether the response carries candidate sets of generated tokens, in either form."""
    return any(key.startswith("output_top_p_logprobs") for key in meta_info)


def encode_sets(
    side: Side, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], lengths: Sequence[int]
) -> dict[str, Any]:
    """The base64 form's three `meta_info` fields.

    Args:
        side: `"output"` for generated positions, `"input"` for prompt positions.
        token_ids: int32 [n], position after position.
        logprobs: float32 [n].
        lengths: one set size per position, `NO_DISTRIBUTION` where there is none.
    """
    name = f"{side}_top_p_logprobs"
    return {
        f"{name}_val_base64": b64text(logprobs, FLOAT32),
        f"{name}_idx_base64": b64text(token_ids, INT32),
        f"{name}_lengths": list(lengths),
    }


def decode_output(meta_info: Mapping[str, Any], output_ids: ArrayLike, vocab_size: int | None) -> Decoded:
    """The sets of the generated tokens; see `CandidateSets.from_meta_info`."""
    decoded = decode("output", meta_info, output_ids, vocab_size)
    missing = np.flatnonzero(np.diff(decoded.offsets) == 0)
    if len(missing):
        raise MissingCandidateSetsError(
            "output_top_p_logprobs_lengths",
            f"no candidate set at {len(missing)} of {len(decoded.sampled_ids)} positions, the first at"
            f" {missing[0]}; every generated token needs one",
        )
    return decoded


def decode(
    side: Side, meta_info: Mapping[str, Any], sampled_ids: ArrayLike, vocab_size: int | None
) -> Decoded:
    """The sets of one side; the span is empty where SGLang has no distribution."""
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
                " run the sglang-topp patch set (`sglang-topp doctor`)?",
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
