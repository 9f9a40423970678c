"""The two products of a head that only looks at candidates, in plain torch, on any device.

Both work on chunks of entries, so that memory is bounded whatever their number, and both sum in
float32 (float64 for float64) in a fixed order: results repeat to the last bit. `head_triton` has the
same two for NVIDIA GPUs, without a gathered copy.

Shape legend: m entries, S segments, H hidden size, C entries of one chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gathered_dot", "gathered_sum"]


def gathered_dot(
    left: Tensor,
    left_rows: Tensor,
    right: Tensor,
    right_rows: Tensor,
    *,
    out_dtype: torch.dtype,
    chunk: int,
) -> Tensor:
    """`out[e] = sum over h of left[left_rows[e], h] * right[right_rows[e], h]`.

    Args:
        left: [L, H]; right: [R, H], of any floating dtype.
        left_rows, right_rows: int64 [m].
        out_dtype: float32 or float64, what the product and its sum run in.
        chunk: entries worked on at a time.

    Returns:
        [m] of `out_dtype`.
    """
    out_m = torch.empty(len(left_rows), dtype=out_dtype, device=left.device)
    for start in range(0, len(out_m), chunk):
        part = slice(start, start + chunk)
        product_CH = right.index_select(0, right_rows[part]).to(out_dtype)
        product_CH *= left.index_select(0, left_rows[part])
        torch.sum(product_CH, dim=1, out=out_m[part])
    return out_m


def gathered_sum(
    source: Tensor,
    source_rows: Tensor,
    weights: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    out_dtype: torch.dtype,
    chunk: int,
) -> Tensor:
    """`out[s] = sum over the entries e of segment s of weights[e] * source[source_rows[e]]`.

    Args:
        source: [R, H], of any floating dtype.
        source_rows: int64 [m].
        weights: [m], float32 or float64: the dtype that the sums run in.
        segments: int64 [m], ascending, below `num_segments`.
        out_dtype: what each finished sum is rounded to, once.
        chunk: entries worked on at a time.

    Returns:
        [num_segments, H]; zeros where a segment has no entry.
    """
    out_SH = source.new_zeros((num_segments, source.shape[1]), dtype=out_dtype)
    carried, carried_H = -1, torch.empty(0)
    for start in range(0, len(segments), chunk):
        part = slice(start, start + chunk)
        rows, table = source_rows[part], source
        if table.dtype != weights.dtype:
            table = table.index_select(0, rows).to(weights.dtype)
            rows = torch.arange(len(rows), device=source.device)
        present, counts = torch.unique_consecutive(segments[part], return_counts=True)
        sums = F.embedding_bag(
            rows,
            table,
            counts.cumsum(0) - counts,
            mode="sum",
            per_sample_weights=weights[part],
        )
        # A segment may run over a chunk's end. Its sum is carried on and written again, so that it is
        # rounded to `out_dtype` from the whole sum and not once per chunk.
        if int(present[0]) == carried:
            sums[0] += carried_H
        carried, carried_H = int(present[-1]), sums[-1]
        out_SH.index_copy_(0, present, sums.to(out_dtype))
    return out_SH
