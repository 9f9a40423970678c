"""Triton kernels that find, for each row, the ids and log-probs of the tokens that a sampler could draw.

A sampler draws the token of a row in proportion to the row's sampling weights. So it could draw every token
with a weight above 0. Each Triton program reads a tile of a row's weights. The programs of a row share the
row's set size, error, and next free place, which they update by atomic operations.

Shape legend: R rows, V ids in the vocabulary, W sampling weights per row, C candidates that the output has
room for.
"""

from __future__ import annotations

from typing import Any, TypeAlias

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
from sglang_topp.nucleus.top_p_triton import error, kernel

_TILE = 4096
_WARPS = 8
_HIGHEST = tl.constexpr(MAX_LOGPROB)
_NOT_LOGPROBS, _SAMPLED_OUT_OF_RANGE = tl.constexpr(NOT_LOGPROBS), tl.constexpr(SAMPLED_OUT_OF_RANGE)
_ZERO_PROBABILITY, _TOKEN_OUT_OF_RANGE = tl.constexpr(ZERO_PROBABILITY), tl.constexpr(TOKEN_OUT_OF_RANGE)


Drawn: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""The tokens that a sampler could draw in each row, on a GPU:

- the log-probs, floats [R, V], contiguous along a row;
- bool [R, W], contiguous, True where the sampler's weight of a token is above 0;
- int32 [R, W], contiguous, the token id of each of these, or None, which means that W is V, and that column
  `i` belongs to token id `i`;
- int64 [R], the sampled token id of each row.
"""


def launch(function: Any, drawn: Drawn, rows_R3: Tensor, *others: Tensor | float) -> None:
    """Launch a kernel over the tiles of all rows.

    - `count_kernel` takes V, and the highest log-prob that stands for probability 0. It writes the set sizes
      and the errors to `rows_R3`, zeros [R, 3], as in `gpu_extraction.StagingArea`.
    - `compact_kernel` takes the output, int32 [2, C], and C. It writes each row's candidate set, in any
      order: the token ids to row 0, and the bits of the float32 log-probs to row 1. `top_p_triton.place` has
      written the start indices to `rows_R3`, to which the kernel adds the set sizes.
    """
    logprobs, is_drawn, token_ids, sampled_ids = drawn
    num_rows, width = is_drawn.shape
    if num_rows:
        function[(num_rows, triton.cdiv(width + 1, _TILE))](
            logprobs,
            is_drawn.view(torch.uint8),
            token_ids,
            sampled_ids,
            rows_R3,
            width,
            logprobs.stride(0),
            *others,
            TILE=_TILE,
            num_warps=_WARPS,
        )


@triton.jit
def _tile(is_drawn_ptr, ids_ptr, sampled_ptr, row, width, TILE: tl.constexpr):
    """Load the token ids of a tile's columns, and which of them are candidates.

    The sampled token has the column after the last one, and is no candidate in another.
    """
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_drawn = tl.load(is_drawn_ptr + row * width + column, mask=column < width, other=0) != 0
    token_ids = column
    if ids_ptr is not None:
        token_ids = tl.load(ids_ptr + row * width + column, mask=is_drawn, other=0)
    sampled = tl.load(sampled_ptr + row)
    is_sampled = column == width
    is_candidate = (is_drawn & (token_ids != sampled)) | is_sampled
    return tl.where(is_sampled, sampled, token_ids.to(tl.int64)), is_candidate, is_sampled


@kernel
def count_kernel(
    logprobs_ptr,
    is_drawn_ptr,
    ids_ptr,
    sampled_ptr,
    rows_ptr,
    width,
    row_stride,
    vocab,
    lowest,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_ids, is_candidate, is_sampled = _tile(is_drawn_ptr, ids_ptr, sampled_ptr, row, width, TILE)
    is_inside = (token_ids >= 0) & (token_ids < vocab)
    place = logprobs_ptr + row * row_stride + token_ids
    values = tl.load(place, mask=is_candidate & is_inside, other=float("-inf")).to(tl.float32)
    errors = tl.where((values <= lowest) & ~is_sampled, error(_ZERO_PROBABILITY, ~token_ids), 0)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a NaN may be negative
    errors = tl.where(values <= _HIGHEST, errors, error(_NOT_LOGPROBS, bits))
    outside = tl.where(
        is_sampled, error(_SAMPLED_OUT_OF_RANGE, token_ids), error(_TOKEN_OUT_OF_RANGE, token_ids)
    )
    errors = tl.where(is_candidate, tl.where(is_inside, errors, outside), 0)
    rows_ptr += row * 3
    tl.atomic_add(rows_ptr, tl.sum(is_candidate.to(tl.int64), 0))
    worst = tl.max(errors, 0)
    if worst > 0:
        tl.atomic_max(rows_ptr + 2, worst)


@kernel
def compact_kernel(
    logprobs_ptr,
    is_drawn_ptr,
    ids_ptr,
    sampled_ptr,
    rows_ptr,
    width,
    row_stride,
    entries_ptr,
    capacity: tl.int64,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows_ptr += row * 3
    if tl.load(rows_ptr + 1) < 0:
        return
    token_ids, is_candidate, _ = _tile(is_drawn_ptr, ids_ptr, sampled_ptr, row, width, TILE)
    values = tl.load(logprobs_ptr + row * row_stride + token_ids, mask=is_candidate, other=0.0).to(tl.float32)
    counts = tl.cumsum(is_candidate.to(tl.int32), 0)
    place = tl.atomic_add(rows_ptr + 1, tl.sum(is_candidate.to(tl.int64), 0))
    place_ptr = entries_ptr + place + counts - 1
    tl.store(place_ptr, token_ids.to(tl.int32), mask=is_candidate)
    tl.store(place_ptr + capacity, values.to(tl.int32, bitcast=True), mask=is_candidate)
