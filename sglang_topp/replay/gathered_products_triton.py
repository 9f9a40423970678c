"""Triton kernels for dot products of candidates' rows, and for sums of rows over segments.

`gathered_products` has the same functions in plain torch, and their docstrings. The kernels read the rows
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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_topp.replay.candidate_index import Entries, Segments

__all__ = ["gathered_dot", "segment_add", "segment_sum"]

_PIECE = 128
_DOT_ENTRIES = 4
_MAX_BLOCK = 1024


def gathered_dot(left: Tensor, right: Tensor, entries: Entries, *, out_dtype: torch.dtype) -> Tensor:
    """Compute `gathered_products.gathered_dot` with float32 sums."""
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
    """Compute `gathered_products.segment_sum` with float32 sums."""
    num_segments = len(segments.offsets) - 1
    out_SH = torch.zeros((num_segments, source.shape[1]), dtype=out_dtype, device=source.device)
    _sum_segments(out_SH, source, segments, weights, adds=False)
    return out_SH


def segment_add(out: Tensor, source: Tensor, segments: Segments, weights: Tensor) -> None:
    """Compute `gathered_products.segment_add` with float32 sums, without waiting for the device."""
    _sum_segments(out, source, segments, weights, adds=True)


@dataclass(frozen=True)
class _Pieces:
    """Where the pieces of the segments begin and end. One Triton program sums one piece.

    Only the GPU knows how many pieces there are. Instead of waiting for it, the host assumes the largest
    possible number, and a program without a piece returns at once.
    """

    segment_P: Tensor
    """The segment of each piece; S where there is no piece."""
    count_S: Tensor
    """The number of pieces of each segment; 0 if it is empty."""
    end_S: Tensor
    """The running sum of `count_S`."""
    partial_end_S: Tensor
    """The running sum of `count_S` over the segments with two or more pieces, which have partial sums."""
    long_segments: Tensor
    """The segments with two or more pieces, then S."""

    @classmethod
    def of(cls, segments: Segments) -> _Pieces:
        num_segments, num_entries = len(segments.offsets) - 1, len(segments.source_rows)
        device, max_long = segments.offsets.device, num_entries // _PIECE
        numbers = torch.arange(min(num_segments, num_entries) + max_long, device=device)
        count_S = (segments.offsets.diff() + (_PIECE - 1)) // _PIECE
        end_S = count_S.cumsum(0)
        return cls(
            torch.searchsorted(end_S, numbers, right=True),
            count_S,
            end_S,
            torch.where(count_S > 1, count_S, 0).cumsum(0),
            torch.searchsorted((count_S > 1).cumsum(0), numbers[:max_long] + 1),
        )


def _sum_segments(out_RH: Tensor, source: Tensor, segments: Segments, weights: Tensor, *, adds: bool) -> None:
    """Write the sum of each segment to its row of `out_RH`, or add it to row `segments.out_rows[s]`."""
    source = _with_contiguous_rows(source)
    width, num_segments = source.shape[1], len(segments.offsets) - 1
    if not num_segments or not width or not len(weights):
        return
    if _PIECE not in segments.plans:
        segments.plans[_PIECE] = _Pieces.of(segments)
    pieces: _Pieces = segments.plans[_PIECE]
    max_long, block = len(pieces.long_segments), _block(width)
    partial_PH = torch.empty((2 * max_long, width), dtype=torch.float32, device=source.device)
    out = (
        out_RH,
        segments.out_rows if adds else segments.offsets,  # the kernels read it only if they add
        out_RH.stride(0),
        out_RH.stride(1),
        num_segments,
        width,
    )
    with torch.cuda.device(source.get_device()):
        _piece_kernel[(len(pieces.segment_P), triton.cdiv(width, block))](
            source,
            segments.source_rows,
            weights,
            pieces.segment_P,
            segments.offsets,
            pieces.count_S,
            pieces.end_S,
            pieces.partial_end_S,
            partial_PH,
            *out,
            source.stride(0),
            ADDS=adds,
            PIECE=_PIECE,
            BLOCK=block,
        )
        if max_long:
            _join_kernel[(max_long, triton.cdiv(width, block))](
                partial_PH,
                pieces.long_segments,
                pieces.count_S,
                pieces.partial_end_S,
                *out,
                ADDS=adds,
                BLOCK=block,
            )


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


@triton.jit(do_not_specialize=["num_segments"])
def _piece_kernel(
    source_ptr,
    source_rows_ptr,
    weights_ptr,
    piece_segment_ptr,
    segment_start_ptr,
    pieces_ptr,
    piece_end_ptr,
    partial_end_ptr,
    partial_ptr,
    out_ptr,
    out_row_ptr,
    out_stride,
    out_column_stride,
    num_segments,
    width,
    source_stride,
    ADDS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    segment = tl.load(piece_segment_ptr + piece)
    if segment < num_segments:
        pieces = tl.load(pieces_ptr + segment)
        number = piece - (tl.load(piece_end_ptr + segment) - pieces)
        start = tl.load(segment_start_ptr + segment) + number * PIECE
        stop = tl.minimum(start + PIECE, tl.load(segment_start_ptr + segment + 1))
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for entry in range(start, stop):
            row = tl.load(source_rows_ptr + entry).to(tl.int64) * source_stride
            value = tl.load(source_ptr + row + column, mask=mask, other=0.0)
            total += tl.load(weights_ptr + entry) * value.to(tl.float32)
        if pieces == 1:
            row = (tl.load(out_row_ptr + segment) if ADDS else segment).to(tl.int64)
            place = out_ptr + row * out_stride + column.to(tl.int64) * out_column_stride
            if ADDS:
                total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
            tl.store(place, total, mask=mask)
        else:
            partial = tl.load(partial_end_ptr + segment) - pieces + number
            tl.store(partial_ptr + partial.to(tl.int64) * width + column, total, mask=mask)


@triton.jit(do_not_specialize=["num_segments"])
def _join_kernel(
    partial_ptr,
    long_segment_ptr,
    pieces_ptr,
    partial_end_ptr,
    out_ptr,
    out_row_ptr,
    out_stride,
    out_column_stride,
    num_segments,
    width,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.load(long_segment_ptr + tl.program_id(0))
    if segment < num_segments:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        pieces = tl.load(pieces_ptr + segment)
        first = (tl.load(partial_end_ptr + segment) - pieces).to(tl.int64) * width
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for _ in range(pieces):
            total += tl.load(partial_ptr + first + column, mask=mask, other=0.0)
            first += width
        row = (tl.load(out_row_ptr + segment) if ADDS else segment).to(tl.int64)
        place = out_ptr + row * out_stride + column.to(tl.int64) * out_column_stride
        if ADDS:
            total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, total, mask=mask)
