"""Encode and decode SGLang's top log-probs: the k most likely tokens of each position (`top_logprobs_num`).

The response's `meta_info` holds the top log-probs in one of four forms. `decode_top_k` reads all four forms.
`encode_top_k` writes only the plugin's form. In the field names below, `{side}` is `input` for the prompt
and `output` for generated tokens::

    SGLang, lists         {side}_top_logprobs[t] = [[logprob, token_id, text or null], ...], or null
    SGLang, flat arrays   {side}_top_logprobs_{val_flat,idx_flat,shape,null_prefix}
    SGLang, base64        {side}_top_logprobs_{val_flat_b64,idx_flat_b64,shape,null_prefix}
                          {side}_top_logprobs_{val_flat_b64,idx_flat_b64}_dtype
    plugin, base64     {side}_top_logprobs_{val_base64,idx_base64,shape,none_positions}

The field `shape` is `[R, k]`: the log-probs and the token ids are two arrays of R rows of k numbers. A
position without a distribution, such as the prompt's first token, has no row in these arrays. SGLang's field
`null_prefix` is the number of leading positions without a row. The plugin's field `none_positions` lists
the positions without a row.

Shape legend: T positions, R positions with a distribution, n listed tokens over all positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import index
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import first_true, offsets_of, rows_of, sorted_by_logprob
from sglang_topp.candidates.validation import LOWEST, as_float32, check_distinct
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError, WireError, describe
from sglang_topp.formats import output_token_logprobs
from sglang_topp.formats.candidate_sets_meta_info import Side
from sglang_topp.formats.field_parsing import (
    FLOAT32,
    INT32,
    Decoded,
    b64array,
    b64text,
    check_count,
    check_range,
    check_vocab,
    entry_rows,
    integers,
    numbers,
    renaming_errors,
    token_ids_of,
)

__all__ = ["decode_top_k", "encode_top_k", "merge_top_k"]

_LISTS = "output_top_logprobs"
_SHAPE, _PREFIX, _NONE = f"{_LISTS}_shape", f"{_LISTS}_null_prefix", f"{_LISTS}_none_positions"


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
        f"{name}_val_base64": b64text(values, FLOAT32),
        f"{name}_idx_base64": b64text(ids, INT32),
        f"{name}_shape": list(values.shape) if there else [0, 0],
        f"{name}_none_positions": sorted(set(range(len(logprobs))).difference(there)),
    }


def merge_top_k(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the `encode_top_k` fields of consecutive stream chunks.

    The `meta_info` of every chunk must have all four fields.
    """
    shapes = [part[_SHAPE] for part in parts]
    sizes = [shape[0] + len(part[_NONE]) for shape, part in zip(shapes, parts, strict=True)]
    merged: dict[str, Any] = {
        _SHAPE: [sum(rows for rows, _ in shapes), max(width for _, width in shapes)],
        _NONE: [
            start + t
            for start, part in zip(accumulate(sizes, initial=0), parts, strict=False)
            for t in part[_NONE]
        ],
    }
    for key, dtype in ((f"{_LISTS}_val_base64", FLOAT32), (f"{_LISTS}_idx_base64", INT32)):
        merged[key] = b64text(np.concatenate([b64array(key, part[key], dtype) for part in parts]), dtype)
    return merged


def decode_top_k(
    meta_info: Mapping[str, Any], output_ids: ArrayLike, k: int, *, vocab_size: int | None = None
) -> CandidateSets:
    """Decode each position's k most likely tokens as a candidate set.

    The request must have `top_logprobs_num` >= `k`.

    The response may come from SGLang with or without the plugin. Let `q` be the probabilities at position
    `t`. The candidate set of position `t` is::

        C_t = { i : fewer than k tokens j have q[j] > q[i] }  ∪  { the sampled token }

    If the response lists more than `k` tokens, the set also keeps listed tokens that are as likely as the
    k-th. SGLang omits tied tokens after the k-th if `top_logprobs_num` equals `k`. To get the tied tokens
    too, set `top_logprobs_num` slightly higher than `k`. The decoder drops unsampled tokens of zero
    probability. The sampled token's log-prob comes from `output_token_logprobs`.

    Args:
        meta_info: the response's `meta_info`. By default, SGLang returns lists (`output_top_logprobs`).
            SGLang returns flat arrays, as JSON or base64, if the request has
            `return_flat_raw_output_top_logprobs`. The plugin returns base64 arrays if the request has
            `return_logprobs_in_base64`.
        output_ids: integers [T], the response's `output_ids`.
        k: how many of the most likely tokens to keep at each position, 1 or more.
        vocab_size: if given, ids of `vocab_size` or more are errors.

    Raises:
        InvalidInputError: `k` is not an integer of 1 or more.
        MissingCandidateSetsError: the response has no top log-probs, or none for a position.
        WireError: a field lists fewer than `k` tokens for a position, or is malformed in any other way. The
            message names the invalid field.
    """
    try:
        least = index(k)
    except TypeError:
        least = 0
    if least < 1 or isinstance(k, bool):
        raise InvalidInputError(f"k: got {k!r}, expected an integer of 1 or more")
    sampled = token_ids_of("output_ids", output_ids)
    ids, logprobs, lengths, fields = _read(meta_info, len(sampled))
    lengths = lengths[: len(sampled)]
    ids, logprobs = ids[: lengths.clip(0).sum()], logprobs[: lengths.clip(0).sum()]
    _check_rows(fields["offsets"], lengths, least)
    check_range(fields["token_ids"], ids, 0, "token ids from 0 on")
    check_vocab(fields["token_ids"], ids, vocab_size)
    with renaming_errors(fields):
        values = as_float32("logprobs", logprobs)
        check_distinct(ids, rows_of(offsets_of(lengths)))
    if (e := first_true(np.isnan(values))) is not None:
        raise WireError(fields["logprobs"], f"got nan at position {rows_of(offsets_of(lengths))[e]}")
    reported = output_token_logprobs.sampled_logprobs(meta_info, sampled)
    return _cut(ids, values, offsets_of(lengths), least, sampled, reported, fields).to_sets()


def _cut(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    offsets: NDArray[np.int64],
    k: int,
    sampled: NDArray[np.integer[Any]],
    reported: NDArray[np.float32],
    fields: Mapping[str, str],
) -> Decoded:
    """At each position, keep the k most likely listed tokens, all ties with the k-th, and the sampled token.

    Listed tokens of probability 0 are dropped, except for the sampled token.
    """
    rows = rows_of(offsets)
    ids, logprobs = sorted_by_logprob(rows, ids, logprobs)
    kth, lowest = logprobs[offsets[:-1] + (k - 1)], logprobs[offsets[1:] - 1]
    is_sampled = ids == sampled[rows]
    listed = np.zeros(len(sampled), np.bool_)
    listed[rows[is_sampled]] = True
    in_row = np.maximum(logprobs[is_sampled], LOWEST)
    wrong = np.zeros(len(sampled), np.bool_)
    wrong[listed] = in_row != np.maximum(reported[listed], LOWEST)
    # An unlisted token cannot be more likely than the least likely listed token.
    wrong[~listed] = reported[~listed] > np.maximum(lowest, LOWEST)[~listed]
    if (t := first_true(wrong)) is not None:
        raise WireError(
            output_token_logprobs.FIELD,
            f"gives the sampled token at position {t} the log-prob {reported[t]}, which is at odds with"
            f" {fields['logprobs']}; they are of different tokens or distributions",
        )
    kept = ((logprobs >= kth[rows]) & (logprobs > LOWEST)) | is_sampled
    forced = np.flatnonzero(~listed)
    ids, logprobs, sizes = ids[kept], logprobs[kept], np.bincount(rows[kept], minlength=len(sampled))
    if len(forced):
        ends = offsets_of(sizes)[forced + 1]
        ids, logprobs = np.insert(ids, ends, sampled[forced]), np.insert(logprobs, ends, reported[forced])
        sizes[forced] += 1
        ids, logprobs = sorted_by_logprob(rows_of(offsets_of(sizes)), ids, logprobs)
    return Decoded(ids, logprobs, offsets_of(sizes), sampled, fields)


_Rows: TypeAlias = tuple[NDArray[np.int32], NDArray[np.floating[Any]], NDArray[np.int32], dict[str, str]]


def _read(meta_info: Mapping[str, Any], num_tokens: int) -> _Rows:
    """Parse the top log-probs into `(token_ids [n], logprobs [n], lengths [T], fields)`.

    `meta_info` may hold any of the four forms that this module's docstring lists. A position without a
    distribution gets length -1. For each argument of `CandidateSets`, `fields` names the `meta_info` field
    that holds the argument's values.
    """
    for kind in ("base64", "flat_b64", "flat"):
        values, ids = f"{_LISTS}_val_{kind}", f"{_LISTS}_idx_{kind}"
        if values in meta_info or ids in meta_info:
            break
    else:
        if meta_info.get(_LISTS) is None:
            raise MissingCandidateSetsError(
                _LISTS, "the response holds no fixed-k log-probs; is top_logprobs_num in the request?"
            )
        token_ids, logprobs, lengths = entry_rows(_LISTS, meta_info[_LISTS])
        check_count(_LISTS, len(lengths), num_tokens)
        return token_ids, logprobs, lengths, _fields(_LISTS, _LISTS, _LISTS)

    nowhere = _NONE if kind == "base64" else _PREFIX
    for key in (values, ids, _SHAPE, nowhere):
        if key not in meta_info:
            raise WireError(key, f"missing beside {values if key != values else ids}")
    if kind == "flat":
        logprobs, token_ids = _flat_numbers(values, meta_info[values]), integers(ids, meta_info[ids])
    else:
        for key, expected in ((values, "float32"), (ids, "int32")):
            if kind == "flat_b64" and (got := meta_info.get(f"{key}_dtype")) != expected:
                raise WireError(f"{key}_dtype", f"got {describe(got)}, expected {expected!r}")
        logprobs = b64array(values, meta_info[values], FLOAT32)
        token_ids = b64array(ids, meta_info[ids], INT32)
    lengths = _lengths(meta_info[_SHAPE], nowhere, meta_info[nowhere], num_tokens)
    rows, width = meta_info[_SHAPE]
    for key, array in ((values, logprobs), (ids, token_ids)):
        if len(array) != rows * width:
            raise WireError(key, f"got {len(array)} numbers, expected {rows} x {width}, as in {_SHAPE}")
    return token_ids, logprobs, lengths, _fields(ids, values, _SHAPE)


def _fields(ids: str, values: str, counts: str) -> dict[str, str]:
    return {"token_ids": ids, "logprobs": values, "offsets": counts, "sampled_ids": ids}


def _flat_numbers(name: str, values: Any) -> NDArray[np.float64]:
    if not isinstance(values, list):
        raise WireError(name, f"got {type(values).__name__}, expected a list of numbers")
    return numbers(name, values)


def _lengths(shape: Any, nowhere: str, none: Any, num_tokens: int) -> NDArray[np.int32]:
    """Return int32 [T]: k for a position with k listed tokens, -1 for a position without a distribution."""
    sizes = integers(_SHAPE, shape).tolist()
    if len(sizes) != 2 or min(sizes) < 0:
        raise WireError(_SHAPE, f"got {str(sizes)[:80]}, expected [rows, k]")
    absent = integers(nowhere, none if nowhere == _NONE else [none])
    prefix = len(absent) if nowhere == _NONE else int(absent[0])
    # Check the number of positions before `lengths` is allocated, because a malformed shape may be huge.
    check_count(_SHAPE, sizes[0] + prefix, num_tokens)
    num_positions = sizes[0] + prefix
    if nowhere == _PREFIX:
        absent = np.arange(prefix, dtype=np.int32)
    if prefix < 0 or (np.diff(absent, prepend=-1, append=num_positions) <= 0).any():
        raise WireError(nowhere, f"expected positions below {num_positions}, in ascending order")
    lengths = np.full(num_positions, sizes[1], np.int32)
    lengths[absent] = -1
    return lengths


def _check_rows(field: str, lengths: NDArray[np.int32], k: int) -> None:
    missing = np.flatnonzero(lengths <= 0)
    if len(missing):
        raise MissingCandidateSetsError(
            field,
            f"no log-probs at {len(missing)} of {len(lengths)} positions, the first at {missing[0]};"
            " every generated token needs them",
        )
    if (t := first_true(lengths < k)) is not None:
        raise WireError(
            field,
            f"lists {lengths[t]} tokens at position {t}, expected {k} or more; is top_logprobs_num {k}?",
        )
