"""Triton kernels that find, for each row, the ids and log-probs of the tokens that a sampler could draw.

A sampler draws the token of a row in proportion to the row's sampling weights. So it could draw every token
with a weight above 0.

Shape legend: B rows of log-probs, R rows of sampling weights, V ids in the vocabulary, W sampling weights per
row, C candidates that the output has room for. Each row of weights belongs to one of the rows of log-probs.
Without the argument `token_ids_RW`, every id of the vocabulary has a weight, and W is V. With `token_ids_RW`,
only the ids in `token_ids_RW` have weights, so W may be less than V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_topp.candidates.validation import MAX_LOGPROB
from sglang_topp.nucleus.argument_checks import (
    NOT_LOGPROBS,
    SAMPLED_OUT_OF_RANGE,
    TOKEN_OUT_OF_RANGE,
    ZERO_PROBABILITY,
)
from sglang_topp.nucleus.top_p_triton import launch

__all__ = ["compact", "count"]

_TILE = 1024
_WARPS = 8
_HIGHEST = tl.constexpr(MAX_LOGPROB)
_NOT_LOGPROBS, _SAMPLED_OUT_OF_RANGE = tl.constexpr(NOT_LOGPROBS), tl.constexpr(SAMPLED_OUT_OF_RANGE)
_ZERO_PROBABILITY, _TOKEN_OUT_OF_RANGE = tl.constexpr(ZERO_PROBABILITY), tl.constexpr(TOKEN_OUT_OF_RANGE)


def count(
    logprobs_BV: Tensor,
    rows_R: Tensor,
    is_drawn_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    lowest: float,
) -> Tensor:
    """Return int32 [3, R]: the set size, the error code, and the error detail of each row.

    `argument_checks` lists the error codes and their details.

    Args:
        logprobs_BV: floats on a GPU, contiguous along a row.
        rows_R: int64. The log-probs for row `r` of `is_drawn_RW` are in row `rows_R[r]` of `logprobs_BV`.
        is_drawn_RW: bool, contiguous, True where the sampler's weight of a token is above 0.
        token_ids_RW: int32, contiguous, the token id of each element of `is_drawn_RW`. None means that W is
            V, and that column `i` belongs to token id `i`.
        sampled_R: int64, the sampled token id of each row of `is_drawn_RW`.
        lowest: log-probs at or below this value stand for probability 0.
    """
    found_3R = torch.empty((3, len(rows_R)), dtype=torch.int32, device=logprobs_BV.device)
    if len(rows_R):
        with launch(logprobs_BV):
            _count_kernel[(len(rows_R),)](
                logprobs_BV,
                rows_R,
                is_drawn_RW.view(torch.uint8),
                token_ids_RW,
                sampled_R,
                found_3R,
                logprobs_BV.shape[1],
                is_drawn_RW.shape[1],
                logprobs_BV.stride(0),
                len(rows_R),
                lowest,
                HAS_IDS=token_ids_RW is not None,
                TILE=_TILE,
                num_warps=_WARPS,
            )
    return found_3R


def compact(
    logprobs_BV: Tensor,
    rows_R: Tensor,
    is_drawn_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    sizes_R: Tensor,
    starts_R: Tensor,
    entries_2C: Tensor,
) -> None:
    """Write each row's candidate set to `entries_2C`, in the order of the columns of `is_drawn_RW`.

    If `is_drawn_RW` is not True for a row's sampled token, the sampled token comes last in the row's set.

    Args:
        logprobs_BV, rows_R, is_drawn_RW, token_ids_RW, sampled_R: as passed to `count`.
        sizes_R: the set sizes that `count` returned.
        starts_R: integers, the column of `entries_2C` for the first candidate of each set, or -1 to skip the
            set.
        entries_2C: int32, the output. Row 0 gets the candidates' token ids, and row 1 the bits of their
            float32 log-probs.
    """
    if not len(rows_R):
        return
    with launch(logprobs_BV):
        _compact_kernel[(len(rows_R),)](
            logprobs_BV,
            rows_R,
            is_drawn_RW.view(torch.uint8),
            token_ids_RW,
            sampled_R,
            sizes_R,
            starts_R,
            entries_2C,
            is_drawn_RW.shape[1],
            logprobs_BV.stride(0),
            entries_2C.shape[1],
            HAS_IDS=token_ids_RW is not None,
            TILE=_TILE,
            num_warps=_WARPS,
        )


@triton.jit
def _tile(is_drawn_ptr, ids_ptr, row, start, width, HAS_IDS: tl.constexpr, TILE: tl.constexpr):
    """Load the token ids of a row's next TILE columns, and a mask of the tokens that the sampler can draw."""
    at = start + tl.arange(0, TILE)
    is_drawn = tl.load(is_drawn_ptr + row * width + at, mask=at < width, other=0) != 0
    token_ids = at
    if HAS_IDS:
        token_ids = tl.load(ids_ptr + row * width + at, mask=is_drawn, other=0)
    return token_ids, is_drawn


@triton.jit(do_not_specialize=["width", "num_rows"])
def _count_kernel(
    logprobs_ptr,
    rows_ptr,
    is_drawn_ptr,
    ids_ptr,
    sampled_ptr,
    found_ptr,
    vocab,
    width,
    row_stride,
    num_rows,
    lowest,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tl.store(found_ptr + row, 0)
    error_code_ptr = found_ptr + num_rows + row
    detail_ptr = error_code_ptr + num_rows
    tl.store(detail_ptr, 0)
    sampled = tl.load(sampled_ptr + row)
    if (sampled < 0) | (sampled >= vocab):
        tl.store(error_code_ptr, _SAMPLED_OUT_OF_RANGE)
        return

    row_ptr = logprobs_ptr + tl.load(rows_ptr + row) * row_stride
    size_T = tl.zeros((TILE,), tl.int32)
    has_sampled_T = tl.zeros((TILE,), tl.int32)
    has_nan_T = tl.zeros((TILE,), tl.int32)
    highest_T = tl.full((TILE,), float("-inf"), tl.float32)
    no_token_T = tl.full((TILE,), 0, tl.int32)
    is_outside_T = tl.zeros((TILE,), tl.int32)
    impossible_T = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    for start in range(0, width, TILE):
        token_ids, is_drawn = _tile(is_drawn_ptr, ids_ptr, row, start, width, HAS_IDS, TILE)
        is_outside = is_drawn & ((token_ids < 0) | (token_ids >= vocab))
        values = tl.load(row_ptr + token_ids, mask=is_drawn & ~is_outside, other=float("-inf")).to(tl.float32)
        size_T += is_drawn.to(tl.int32)
        has_sampled_T |= (is_drawn & (token_ids == sampled)).to(tl.int32)
        is_nan = values != values
        has_nan_T |= is_nan.to(tl.int32)
        highest_T = tl.maximum(highest_T, tl.where(is_nan, float("-inf"), values))
        is_outside_T |= is_outside.to(tl.int32)
        no_token_T = tl.where(is_outside, token_ids, no_token_T)
        is_impossible = is_drawn & (values <= lowest) & (token_ids != sampled)
        impossible_T = tl.minimum(impossible_T, tl.where(is_impossible, token_ids, 0x7FFFFFFF))
    highest = tl.load(row_ptr + sampled).to(tl.float32)
    if (tl.max(has_nan_T, 0) > 0) | (highest != highest):
        highest = tl.full((), float("nan"), tl.float32)
    else:
        highest = tl.maximum(highest, tl.max(highest_T, 0))
    impossible = tl.min(impossible_T, 0)
    if tl.max(is_outside_T, 0) > 0:
        tl.store(detail_ptr, tl.max(tl.where(is_outside_T > 0, no_token_T, -(1 << 31)), 0))
        tl.store(error_code_ptr, _TOKEN_OUT_OF_RANGE)
    elif not (highest.to(tl.float64) <= _HIGHEST):
        tl.store(detail_ptr, highest.to(tl.int32, bitcast=True))
        tl.store(error_code_ptr, _NOT_LOGPROBS)
    elif impossible < 0x7FFFFFFF:
        tl.store(detail_ptr, impossible)
        tl.store(error_code_ptr, _ZERO_PROBABILITY)
    else:
        tl.store(error_code_ptr, 0)
        tl.store(found_ptr + row, tl.sum(size_T, 0) + 1 - tl.max(has_sampled_T, 0))


@triton.jit(do_not_specialize=["width", "capacity"])
def _compact_kernel(
    logprobs_ptr,
    rows_ptr,
    is_drawn_ptr,
    ids_ptr,
    sampled_ptr,
    sizes_ptr,
    starts_ptr,
    entries_ptr,
    width,
    row_stride,
    capacity,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes_ptr + row)
    place = tl.load(starts_ptr + row)
    if (size == 0) | (place < 0):
        return
    row_ptr = logprobs_ptr + tl.load(rows_ptr + row) * row_stride
    bits_ptr = entries_ptr + capacity
    end = place + size
    for start in range(0, width, TILE):
        token_ids, is_drawn = _tile(is_drawn_ptr, ids_ptr, row, start, width, HAS_IDS, TILE)
        values = tl.load(row_ptr + token_ids, mask=is_drawn, other=0.0).to(tl.float32)
        at = place + tl.cumsum(is_drawn.to(tl.int32), 0) - 1
        tl.store(entries_ptr + at, token_ids, mask=is_drawn)
        tl.store(bits_ptr + at, values.to(tl.int32, bitcast=True), mask=is_drawn)
        place += tl.sum(is_drawn.to(tl.int32), 0)
    is_outside = place < end
    sampled = tl.load(sampled_ptr + row)
    value = tl.load(row_ptr + sampled).to(tl.float32)
    tl.store(entries_ptr + place, sampled.to(tl.int32), mask=is_outside)
    tl.store(bits_ptr + place, value.to(tl.int32, bitcast=True), mask=is_outside)
