"""Triton kernels for dot products and weighted sums of selected rows, without a copy of these rows.

`gathered_products` has the same functions in plain torch.

`gathered_dot` computes dot products, and reads the two rows of each dot product once.

`gathered_sum` and `gathered_add` compute weighted sums: `gathered_sum` returns new rows, and `gathered_add`
adds to existing rows. An entry is one selected row with its weight, and all entries of one output row form a
segment. A call launches at most two Triton kernels. If a segment has at most `_PIECE` entries, the first
kernel sums them in registers, and writes the sum in the output's dtype. The first kernel cuts longer segments
into pieces of at most `_PIECE` entries, and writes one float32 sum for each piece. The second kernel adds the
sums of the pieces in order. No kernel uses atomics, so results are bitwise reproducible.

For the gradient of the LM head's weight, a segment holds all entries of one token id. For the gradient of the
hidden states, a segment holds the candidates of one position. So frequent tokens and large sets make long
segments.

Shape legend: m entries or dot products, S segments, P pieces of segments, H hidden size, R rows of the
output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gathered_add", "gathered_dot", "gathered_sum"]

_PIECE = 128
_DOT_ENTRIES = 4
_MAX_BLOCK = 1024


def gathered_dot(
    left: Tensor, left_rows: Tensor, right: Tensor, right_rows: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """Compute `gathered_products.gathered_dot` with float32 sums."""
    left, right = _with_contiguous_rows(left), _with_contiguous_rows(right)
    num_entries, width = len(left_rows), left.shape[1]
    out_m = torch.empty(num_entries, dtype=out_dtype, device=left.device)
    if num_entries:
        with torch.cuda.device(left.get_device()):  # Triton launches kernels on the current device
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
    """Compute `gathered_products.gathered_sum` with float32 sums."""
    out_SH = torch.empty((num_segments, source.shape[1]), dtype=out_dtype, device=source.device)
    _sum_segments(source, source_rows, weights, segments, out_SH, None)
    return out_SH


def gathered_add(out: Tensor, source: Tensor, source_rows: Tensor, weights: Tensor, segments: Tensor) -> None:
    """Compute `gathered_products.gathered_add` with float32 sums, without waiting for the device."""
    num_entries = len(segments)
    if not num_entries:
        return
    # Number the nonempty segments 0, 1, 2, and so on. Only the GPU knows how many segments are nonempty, so
    # the host assumes the largest possible count. Some elements of `numbers` therefore belong to no segment,
    # and the kernels skip these elements.
    number_m = F.pad((segments[1:] != segments[:-1]).cumsum(0), (1, 0))
    numbers = torch.arange(min(num_entries, len(out)), device=segments.device)
    first = torch.searchsorted(number_m, numbers).clamp(max=num_entries - 1)
    _sum_segments(source, source_rows, weights, number_m, out, segments[first])


def _sum_segments(
    source: Tensor,
    source_rows: Tensor,
    weights: Tensor,
    segments: Tensor,
    out_RH: Tensor,
    out_row_S: Tensor | None,
) -> None:
    """Compute the weighted sum of each segment, and write or add the sum to a row of `out_RH`.

    If `out_row_S` is None, the function overwrites row `s` of `out_RH` with the sum of segment `s`.
    Otherwise, the function adds the sum of segment `s` to row `out_row_S[s]` of `out_RH`.
    """
    source = _with_contiguous_rows(source)
    device, width = source.device, source.shape[1]
    adds = out_row_S is not None
    num_segments = len(out_RH if out_row_S is None else out_row_S)
    if not num_segments or not width:
        return
    # Each segment is cut into pieces of at most `_PIECE` entries. Each Triton program sums one piece. Only
    # the GPU knows how many pieces there are. Instead of waiting for the GPU, the host launches programs for
    # the largest possible number of pieces. A program without a piece returns at once.
    num_entries = len(segments)
    max_pieces = num_segments + num_entries // _PIECE
    max_long = num_entries // _PIECE
    start_S1 = torch.searchsorted(segments, torch.arange(num_segments + 1, device=device))
    # If the kernels overwrite `out_RH`, a segment without entries gets one piece, so that a kernel writes
    # zeros to the segment's row. If the kernels add to `out_RH`, a segment without entries gets no piece.
    pieces_S = ((start_S1.diff() + (_PIECE - 1)) // _PIECE).clamp(min=0 if adds else 1)
    # If a segment has two or more pieces, `partial_PH` holds one partial sum per piece. Other segments have
    # no partial sums. `partial_end_S[s]` is the number of partial sums in all segments up to and including
    # `s`.
    partial_end_S = torch.where(pieces_S > 1, pieces_S, 0).cumsum(0)
    piece_end_S = pieces_S.cumsum(0)
    piece_segment_P = torch.searchsorted(piece_end_S, torch.arange(max_pieces, device=device), right=True)
    partial_PH = torch.empty((2 * max_long, width), dtype=torch.float32, device=device)
    block = _block(width)
    blocks = triton.cdiv(width, block)
    out = (
        out_RH,
        # If `out_row_S` is None, the kernels do not read this argument, so `start_S1` is only a placeholder.
        start_S1 if out_row_S is None else out_row_S,
        out_RH.stride(0),
        out_RH.stride(1),
        num_segments,
        width,
    )
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
            partial_PH,
            *out,
            source.stride(0),
            ADDS=adds,
            PIECE=_PIECE,
            BLOCK=block,
        )
        if max_long:
            long_S = (pieces_S > 1).cumsum(0)
            long_segment = torch.searchsorted(long_S, torch.arange(1, max_long + 1, device=device))
            _join_kernel[(max_long, blocks)](
                partial_PH, long_segment, pieces_S, partial_end_S, *out, ADDS=adds, BLOCK=block
            )


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _block(width: int) -> int:
    block: int = triton.next_power_of_2(width)
    return min(_MAX_BLOCK, block)


@triton.jit
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


@triton.jit
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
