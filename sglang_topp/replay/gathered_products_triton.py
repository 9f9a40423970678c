"""Triton kernels for dot products of candidates' rows, and for sums of rows over segments.

`lm_head` has the same functions in plain torch, and their docstrings. The kernels read the rows
where they are, without a copy, and sum in float32.

A call for sums launches at most two kernels. If a segment has at most `_PIECE` entries, the first kernel sums
them in registers, and writes the sum in the output's dtype. The first kernel cuts longer segments into pieces
of at most `_PIECE` entries, and writes one float32 sum for each piece. The second kernel adds the sums of the
pieces in order. No kernel uses atomics, so results are bitwise reproducible.

For the gradient of the LM head's weight, a segment holds all entries of one token id. For the gradient of the
hidden states, a segment holds the candidates of one position. So frequent tokens and large sets make long
segments.

Shape legend: m entries or dot products, S segments, P pieces of segments, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_topp.replay.candidate_index import Entries, Segments

_PIECE = 128
_DOT_ENTRIES = 4
_MAX_BLOCK = 1024


def gathered_dot(left: Tensor, right: Tensor, entries: Entries, *, out_dtype: torch.dtype) -> Tensor:
    """Compute `lm_head.gathered_dot` with float32 sums."""
    left, right = _with_contiguous_rows(left), _with_contiguous_rows(right)
    num_entries, width = len(entries.ids), left.shape[1]
    out_m = torch.empty(num_entries, dtype=out_dtype, device=left.device)
    if num_entries:
        with torch.cuda.device(left.get_device()):  # Triton launches kernels on the current device
            _dot_kernel[(triton.cdiv(num_entries, _DOT_ENTRIES),)](
                left,
                entries.positions,
                right,
                entries.ids,
                out_m,
                num_entries,
                width,
                left.stride(0),
                right.stride(0),
                ENTRIES=_DOT_ENTRIES,
                BLOCK=_block(width),
            )
    return out_m


def segment_sum(source: Tensor, segments: Segments, weights: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Compute `lm_head.segment_sum` with float32 sums."""
    num_segments = len(segments.offsets) - 1
    out_SH = torch.zeros((num_segments, source.shape[1]), dtype=out_dtype, device=source.device)
    _sum_segments(out_SH, source, segments, weights, adds=False)
    return out_SH


def segment_add(out: Tensor, source: Tensor, segments: Segments, weights: Tensor) -> None:
    """Compute `lm_head.segment_add` with float32 sums, without waiting for the device."""
    _sum_segments(out, source, segments, weights, adds=True)


def _pieces_of(segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the pieces of the segments, and the segments that have several.

    Only the GPU knows how many there are. Instead of waiting for it, the host assumes the largest possible
    numbers. Where there is none, the row is -1, and a program returns at once.

    Returns:
        int64 [P, 4]: for each piece, its first entry, the entry after its last, the row for its sum, and
        whether this is a row of the partial sums and not of the output. And int64 [P', 3]: for each segment
        with several pieces, its first partial sum, the number of them, and its row of the output.
    """
    offsets, num_segments, num_entries = (
        segments.offsets,
        len(segments.offsets) - 1,
        len(segments.source_rows),
    )
    max_long = num_entries // _PIECE
    numbers = torch.arange(min(num_segments, num_entries) + max_long, device=offsets.device)
    count_S = (offsets.diff() + (_PIECE - 1)) // _PIECE
    end_S, is_long_S = count_S.cumsum(0), count_S > 1
    partial_S = torch.where(is_long_S, count_S, 0).cumsum(0) - count_S
    out_row_S = segments.out_rows
    if out_row_S is None:
        out_row_S = torch.arange(num_segments, device=offsets.device)

    def some(segment: Tensor) -> tuple[Tensor, ...]:
        """Return values of some segments: the row is -1 where there is no segment."""
        is_none, segment = segment == num_segments, segment.clamp(max=num_segments - 1)
        arrays = (offsets[:-1], offsets[1:], end_S - count_S, count_S, partial_S, out_row_S)
        *values, out_row = (array.index_select(0, segment) for array in arrays)
        return *values, out_row.masked_fill(is_none, -1)

    start, stop, first, count, partial, row = some(torch.searchsorted(end_S, numbers, right=True))
    number = numbers - first
    start = start + number * _PIECE
    row = torch.where((count > 1) & (row >= 0), partial + number, row)
    pieces = torch.stack([start, torch.minimum(start + _PIECE, stop), row, (count > 1).long()], dim=1)
    *_, count, partial, row = some(torch.searchsorted(is_long_S.cumsum(0), numbers[:max_long] + 1))
    return pieces, torch.stack([partial, count, row], dim=1)


def _sum_segments(out_RH: Tensor, source: Tensor, segments: Segments, weights: Tensor, *, adds: bool) -> None:
    """Write the sum of each segment to its row of `out_RH`, or add it to row `segments.out_rows[s]`."""
    source = _with_contiguous_rows(source)
    width, block = source.shape[1], _block(source.shape[1])
    if len(segments.offsets) == 1 or not width or not len(weights):
        return
    if _PIECE not in segments.plans:
        segments.plans[_PIECE] = _pieces_of(segments)
    pieces, long_segments = segments.plans[_PIECE]
    max_long, num_blocks = len(long_segments), triton.cdiv(width, block)
    partial_PH = torch.empty((2 * max_long, width), dtype=torch.float32, device=source.device)
    out = (partial_PH, out_RH, out_RH.stride(0), out_RH.stride(1), width)
    with torch.cuda.device(source.get_device()):
        _piece_kernel[(len(pieces), num_blocks)](
            pieces, source, source.stride(0), segments.source_rows, weights, *out, ADDS=adds, BLOCK=block
        )
        if max_long:
            _join_kernel[(max_long, num_blocks)](long_segments, *out, ADDS=adds, BLOCK=block)


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _block(width: int) -> int:
    block: int = triton.next_power_of_2(width)
    return min(_MAX_BLOCK, block)


@triton.jit(do_not_specialize=["num_entries"])
def _dot_kernel(
    left_ptr,
    left_rows_ptr,
    right_ptr,
    right_rows_ptr,
    out_ptr,
    num_entries,
    width,
    left_stride,
    right_stride,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    exists = entry < num_entries
    # Use 64-bit offsets, because the number of elements in the LM head's weight may exceed 2^31.
    left_row = tl.load(left_rows_ptr + entry, mask=exists, other=0).to(tl.int64) * left_stride
    right_row = tl.load(right_rows_ptr + entry, mask=exists, other=0).to(tl.int64) * right_stride
    total = tl.zeros((ENTRIES, BLOCK), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = exists[:, None] & (column < width)[None, :]
        left = tl.load(left_ptr + left_row[:, None] + column[None, :], mask=mask, other=0.0)
        right = tl.load(right_ptr + right_row[:, None] + column[None, :], mask=mask, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out_ptr + entry, tl.sum(total, axis=1), mask=exists)


@triton.jit
def _piece_kernel(
    pieces_ptr,
    source_ptr,
    source_stride,
    source_rows_ptr,
    weights_ptr,
    partial_ptr,
    out_ptr,
    out_stride,
    out_column_stride,
    width,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece_ptr = pieces_ptr + 4 * tl.program_id(0)
    row = tl.load(piece_ptr + 2)
    if row >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for entry in range(tl.load(piece_ptr), tl.load(piece_ptr + 1)):
            source_row = tl.load(source_rows_ptr + entry).to(tl.int64) * source_stride
            value = tl.load(source_ptr + source_row + column, mask=mask, other=0.0)
            total += tl.load(weights_ptr + entry) * value.to(tl.float32)
        if tl.load(piece_ptr + 3) == 1:
            tl.store(partial_ptr + row * width + column, total, mask=mask)
        else:
            _store(out_ptr, row * out_stride + column.to(tl.int64) * out_column_stride, total, mask, ADDS)


@triton.jit
def _join_kernel(
    long_segments_ptr,
    partial_ptr,
    out_ptr,
    out_stride,
    out_column_stride,
    width,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment_ptr = long_segments_ptr + 3 * tl.program_id(0)
    row = tl.load(segment_ptr + 2)
    if row >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        first = tl.load(segment_ptr) * width
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for _ in range(tl.load(segment_ptr + 1)):
            total += tl.load(partial_ptr + first + column, mask=mask, other=0.0)
            first += width
        _store(out_ptr, row * out_stride + column.to(tl.int64) * out_column_stride, total, mask, ADDS)


@triton.jit
def _store(out_ptr, place, total, mask, ADDS: tl.constexpr):
    if ADDS:
        total += tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total, mask=mask)
