"""The two products of `gathered`, as Triton kernels: no `[m, H]` copy of the gathered rows.

`gathered_dot` reads each gathered row once. `gathered_sum` adds the rows of a segment in registers
and writes each sum once, in the output's dtype. A segment longer than `_PIECE` entries (a frequent
token in the gradient of the head, a wide candidate set) is cut into pieces, whose float32 sums a
second kernel adds in order: no atomics, so results repeat to the last bit.

Shape legend: m entries, S segments, P pieces, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gathered_dot", "gathered_sum"]

_PIECE = 128
_DOT_ENTRIES = 4
_MAX_BLOCK = 1024


def gathered_dot(
    left: Tensor, left_rows: Tensor, right: Tensor, right_rows: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """`gathered.gathered_dot`, for rows that are contiguous in memory; float32 sums."""
    left, right = _with_contiguous_rows(left), _with_contiguous_rows(right)
    num_entries, width = len(left_rows), left.shape[1]
    out_m = torch.empty(num_entries, dtype=out_dtype, device=left.device)
    if num_entries:
        with torch.cuda.device(left.get_device()):  # Triton launches on the current one
            _dot_kernel[(triton.cdiv(num_entries, _DOT_ENTRIES),)](
                left,
                left_rows,
                right,
                right_rows,
                out_m,
                num_entries,
                width,
                left.stride(0),
                right.stride(0),
                ENTRIES=_DOT_ENTRIES,
                BLOCK=_block(width),
            )
    return out_m


def gathered_sum(
    source: Tensor,
    source_rows: Tensor,
    weights: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """`gathered.gathered_sum`, for rows that are contiguous in memory; float32 sums."""
    source = _with_contiguous_rows(source)
    device, width = source.device, source.shape[1]
    out_SH = torch.empty((num_segments, width), dtype=out_dtype, device=device)
    if not num_segments or not width:
        return out_SH
    # How many entries a segment has is known on the device only; their total bounds the pieces, so
    # nothing waits: surplus programs find that they have no piece.
    num_entries = len(segments)
    max_pieces = num_segments + num_entries // _PIECE
    max_long = num_entries // _PIECE
    start_S1 = torch.searchsorted(segments, torch.arange(num_segments + 1, device=device))
    pieces_S = ((start_S1.diff() + (_PIECE - 1)) // _PIECE).clamp(min=1)
    # Only pieces of long segments have a partial sum: `partial_end_S` counts those up to each segment.
    partial_end_S = torch.where(pieces_S > 1, pieces_S, 0).cumsum(0)
    piece_end_S = pieces_S.cumsum(0)
    piece_segment_P = torch.searchsorted(piece_end_S, torch.arange(max_pieces, device=device), right=True)
    partial_PH = torch.empty((2 * max_long, width), dtype=torch.float32, device=device)
    block = _block(width)
    blocks = triton.cdiv(width, block)
    with torch.cuda.device(source.get_device()):
        _piece_kernel[(max_pieces, blocks)](
            source,
            source_rows,
            weights,
            piece_segment_P,
            start_S1,
            pieces_S,
            piece_end_S,
            partial_end_S,
            out_SH,
            partial_PH,
            num_segments,
            width,
            source.stride(0),
            PIECE=_PIECE,
            BLOCK=block,
        )
        if max_long:
            long_S = (pieces_S > 1).cumsum(0)
            long_segment = torch.searchsorted(long_S, torch.arange(1, max_long + 1, device=device))
            _join_kernel[(max_long, blocks)](
                partial_PH, long_segment, pieces_S, partial_end_S, out_SH, num_segments, width, BLOCK=block
            )
    return out_SH


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _block(width: int) -> int:
    block: int = triton.next_power_of_2(width)
    return min(_MAX_BLOCK, block)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _dot_kernel(  # type: ignore[no-untyped-def]  # a kernel, not a Python function
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
    # 64-bit: V * H passes 2^31.
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


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _piece_kernel(  # type: ignore[no-untyped-def]  # a kernel, not a Python function
    source_ptr,
    source_rows_ptr,
    weights_ptr,
    piece_segment_ptr,
    segment_start_ptr,
    pieces_ptr,
    piece_end_ptr,
    partial_end_ptr,
    out_ptr,
    partial_ptr,
    num_segments,
    width,
    source_stride,
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
            tl.store(out_ptr + segment.to(tl.int64) * width + column, total, mask=mask)
        else:
            partial = tl.load(partial_end_ptr + segment) - pieces + number
            tl.store(partial_ptr + partial.to(tl.int64) * width + column, total, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _join_kernel(  # type: ignore[no-untyped-def]  # a kernel, not a Python function
    partial_ptr,
    long_segment_ptr,
    pieces_ptr,
    partial_end_ptr,
    out_ptr,
    num_segments,
    width,
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
        tl.store(out_ptr + segment.to(tl.int64) * width + column, total, mask=mask)
