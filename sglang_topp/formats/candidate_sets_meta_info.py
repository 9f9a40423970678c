"""Encode and decode candidate sets in the `meta_info` of the patched SGLang, and encode its top-k log-probs.

Base64 form::

    {output,input}_top_p_logprobs_val_base64   log-probs of all candidates, position after position
    {output,input}_top_p_logprobs_idx_base64   token ids of all candidates
    {output,input}_top_p_logprobs_lengths      one set size per position; -1 if SGLang has no distribution

List form::

    {output,input}_top_p_logprobs[t] = [[logprob, token_id, text or null], ...], or null
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import pybase64
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import MissingCandidateSetsError
from sglang_topp.formats import field_parsing as parsing
from sglang_topp.formats.field_parsing import FLOAT32, INT32, CandidateRows

Side: TypeAlias = Literal["output", "input"]

NO_DISTRIBUTION = -1
"""The number in `lengths` for a position without a distribution, such as the prompt's first token."""

_SETS, _TOP_K = "output_top_p_logprobs", "output_top_logprobs"


def has_top_p(meta_info: Mapping[str, Any]) -> bool:
    """Return whether the response has candidate sets of generated tokens, as base64 or as lists."""
    return any(key.startswith(_SETS) for key in meta_info)


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
        f"{name}_val_base64": parsing.b64text(logprobs, FLOAT32),
        f"{name}_idx_base64": parsing.b64text(token_ids, INT32),
        f"{name}_lengths": list(lengths),
    }


def encode_top_k(
    side: Side, logprobs: Sequence[Sequence[float] | None], token_ids: Sequence[Sequence[int] | None]
) -> dict[str, Any]:
    """Encode top-k log-probs as the `meta_info` fields of the plugin's base64 form.

    The base64 fields encode an array of log-probs [R, k] and an array of token ids [R, k]. A position without
    a distribution has no row in the arrays. `{side}_top_logprobs_shape` is `[R, k]`.
    `{side}_top_logprobs_none_positions` lists the positions without a row, in ascending order.

    Args:
        logprobs: one list for each of T positions. The list holds k log-probs. A position without a
            distribution has None or an empty list.
        token_ids: one list for each of T positions. The list holds k token ids in the order of `logprobs`.
    """
    name = f"{side}_top_logprobs"
    there = [t for t, row in enumerate(logprobs) if row and token_ids[t]]
    values = np.array([logprobs[t] for t in there], FLOAT32)
    ids = np.array([token_ids[t] for t in there], INT32)
    return {
        f"{name}_val_base64": parsing.b64text(values, FLOAT32),
        f"{name}_idx_base64": parsing.b64text(ids, INT32),
        f"{name}_shape": list(values.shape) if there else [0, 0],
        f"{name}_none_positions": sorted(set(range(len(logprobs))).difference(there)),
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
    return _decode("output", meta_info, output_ids, vocab_size)


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
    return _decode("input", meta_info, prompt_ids, vocab_size)


def _decode(
    side: Side, meta_info: Mapping[str, Any], sampled_ids: ArrayLike, vocab_size: int | None
) -> CandidateSets:
    """Decode the sets of generated or prompt tokens. A position without a distribution gets an empty set."""
    name, sampled = f"{side}_top_p_logprobs", parsing.token_ids_of(f"{side}_ids", sampled_ids)
    if name in meta_info:
        rows = CandidateRows.of_lists(name, meta_info[name])
    else:
        keys = values, ids, counts = [f"{name}_{kind}" for kind in ("val_base64", "idx_base64", "lengths")]
        if not meta_info.keys() & set(keys):
            raise MissingCandidateSetsError(
                name,
                "the response holds no candidate sets; is top_logprobs_p in the request, and does the server"
                " run the sglang-topp plugin (`sglang-topp doctor`)?",
            )
        parsing.check_together(meta_info, keys)
        logprobs = parsing.b64array(values, meta_info[values], FLOAT32)
        token_ids = parsing.b64array(ids, meta_info[ids], INT32)
        lengths = parsing.integers(counts, meta_info[counts])
        parsing.check_range(counts, lengths, NO_DISTRIBUTION, "set sizes, or -1 for none")
        rows = CandidateRows(token_ids, logprobs, lengths, parsing.fields_of(ids, values, counts))
    rows.check(len(sampled), vocab_size, "candidate set" if side == "output" else "")
    with parsing.renaming_errors(rows.fields):
        return CandidateSets(rows.token_ids, rows.logprobs, offsets_of(np.maximum(rows.lengths, 0)), sampled)


def merge_stream_chunks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the output fields of consecutive stream chunks into the fields of one chunk.

    Args:
        parts: the `meta_info` of each chunk, in stream order. Each chunk's `meta_info` holds only the
            positions since the previous chunk.

    Returns:
        The joined `meta_info` fields: candidate sets in base64 or list form, and top-k log-probs as
        `encode_top_k` writes them. If any chunk lacks a field, the result lacks that field too, and the
        decoder then reports an incomplete answer.
    """
    shared = {key for key in parts[0] if all(key in part for part in parts)}
    merged: dict[str, Any] = {}
    for key in shared.intersection((_SETS, f"{_SETS}_lengths")):
        merged[key] = list(chain.from_iterable(part[key] for part in parts))
    for key in shared.intersection(
        f"{name}_{kind}_base64" for name in (_SETS, _TOP_K) for kind in ("val", "idx")
    ):
        merged[key] = pybase64.b64encode(b"".join(parsing.b64bytes(key, part[key]) for part in parts)).decode(
            "ascii"
        )
    if (none := f"{_TOP_K}_none_positions") in shared:
        shapes = [part[f"{_TOP_K}_shape"] for part in parts]
        sizes = [rows + len(part[none]) for (rows, _), part in zip(shapes, parts, strict=True)]
        starts = offsets_of(sizes).tolist()
        merged[f"{_TOP_K}_shape"] = [sum(rows for rows, _ in shapes), max(width for _, width in shapes)]
        merged[none] = [start + t for start, part in zip(starts, parts, strict=False) for t in part[none]]
    return merged
