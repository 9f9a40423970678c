"""Gathered products in plain torch: dot products and weighted sums over selected rows of a matrix.

`candidate_head` and `lm_head_weight_grad` use these functions for the candidates' logits and the gradients.
In a weighted sum, an entry is one selected row with its weight. A segment is a run of consecutive entries
whose weighted rows sum to one output row.

The functions run on any device. A call copies at most `chunk` rows of a matrix at a time, so the call's
memory is bounded for any number of entries. Sums are in float32 (float64 for float64 inputs) and in a fixed
order, so results are bitwise reproducible. `gathered_products_triton` has the same functions for NVIDIA GPUs.

On a CPU, torch's threads wait for each other after each torch operation, so fewer operations are faster. A
call needs the fewest operations if its inputs already have the dtype of the sums (float32 or float64).
By default, waiting threads spin, and so occupy cores that other processes could use. On a busy machine, set
`OMP_WAIT_POLICY=passive`, so that waiting threads sleep.

Shape legend: m entries or dot products, S segments, H hidden size, L or R rows of an input matrix, C dot
products or segments of one chunk.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gathered_add", "gathered_dot", "gathered_sum"]


def gathered_dot(
    left: Tensor,
    left_rows: Tensor,
    right: Tensor,
    right_rows: Tensor,
    *,
    out_dtype: torch.dtype,
    chunk: int,
) -> Tensor:
    """Compute `out[e] = sum over h of left[left_rows[e], h] * right[right_rows[e], h]`.

    Args:
        left: [L, H], of any floating dtype.
        left_rows: int64 [m], ascending. Dot product `e` reads row `left_rows[e]` of `left`.
        right: [R, H], of any floating dtype.
        right_rows: int64 [m]. Dot product `e` reads row `right_rows[e]` of `right`.
        out_dtype: float32 or float64, the dtype of the products and sums.
        chunk: the number of dot products to compute at a time. On a CPU, if `left` and `right` are contiguous
            and have the dtype `out_dtype`, the function copies no rows and ignores `chunk`.

    Returns:
        [m] of `out_dtype`.
    """
    if left.is_cpu and _is_plain(left, out_dtype) and _is_plain(right, out_dtype):
        return _sampled_product(left, left_rows, right, right_rows)
    out_m = torch.empty(len(left_rows), dtype=out_dtype, device=left.device)
    for start in range(0, len(out_m), chunk):
        part = slice(start, start + chunk)
        right_CH = right.index_select(0, right_rows[part]).to(out_dtype)
        if left.is_cpu:
            present, places = torch.unique_consecutive(left_rows[part], return_inverse=True)
            some_left = left.index_select(0, present).to(out_dtype)
            out_m[part] = _sampled_product(some_left, places, right_CH, torch.arange(len(right_CH)))
        else:
            right_CH *= left.index_select(0, left_rows[part])
            torch.sum(right_CH, dim=1, out=out_m[part])
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
    """Compute `out[s] = sum(weights[e] * source[source_rows[e]] for each entry e of segment s)`.

    Args:
        source: [R, H], of any floating dtype.
        source_rows: int64 [m]. Entry `e` is row `source_rows[e]` of `source`.
        weights: [m], float32 or float64. Entry `e` is multiplied by `weights[e]`. The sums have the dtype of
            `weights`.
        segments: int64 [m], ascending, below `num_segments`. Entry `e` is added to row `segments[e]` of the
            result.
        out_dtype: the dtype of the result. The function rounds each finished sum to `out_dtype` once.
        chunk: the number of entries to add up at a time. If `source`, `weights`, and the result have the same
            dtype, the function adds up all entries at once and ignores `chunk`.

    Returns:
        [num_segments, H]. The row of a segment without entries is zero.
    """
    if len(segments) and source.dtype == weights.dtype == out_dtype:
        bounds = torch.searchsorted(segments, torch.arange(num_segments + 1, device=segments.device))
        return _bags(source, source_rows, weights, bounds)
    out_SH = source.new_zeros((num_segments, source.shape[1]), dtype=out_dtype)
    carried, carried_H = -1, torch.empty(0)
    for start in range(0, len(segments), chunk):
        part = slice(start, start + chunk)
        rows, table = source_rows[part], source
        if table.dtype != weights.dtype:
            table = table.index_select(0, rows).to(weights.dtype)
            rows = torch.arange(len(rows), device=source.device)
        present, counts = torch.unique_consecutive(segments[part], return_counts=True)
        sums = _bags(table, rows, weights[part], F.pad(counts.cumsum(0), (1, 0)))
        # The last segment of a chunk may continue in the next chunk. Carry the segment's unrounded sum over
        # to the next chunk, so that rounding affects only the complete sum.
        if int(present[0]) == carried:
            sums[0] += carried_H
        carried, carried_H = int(present[-1]), sums[-1]
        out_SH.index_copy_(0, present, sums.to(out_dtype))
    return out_SH


def gathered_add(
    out: Tensor, source: Tensor, source_rows: Tensor, weights: Tensor, segments: Tensor, *, chunk: int
) -> None:
    """Compute `out[s] += sum(weights[e] * source[source_rows[e]] for each entry e of segment s)`.

    The function changes `out` in place. If segment `s` has no entries, the function neither reads nor writes
    row `s` of `out`. Each changed row is rounded once to the dtype of `out`.

    Args:
        out: [S, H], of any floating dtype.
        chunk: limits the number of segments whose sums the function holds at a time. If `source` and
            `weights` have the same dtype, the function holds at most `2 * chunk` sums. Otherwise, the
            function holds at most `chunk` sums, and also copies rows of `source`.

    The other arguments are those of `gathered_sum`.
    """
    plain = source.dtype == weights.dtype
    # Each step below computes the sums of at most `step` segments. If `source` and `weights` have different
    # dtypes, `gathered_sum` also copies up to `chunk` rows of `source`, which take as much memory as `chunk`
    # sums.
    step = 2 * chunk if plain else chunk
    present, counts = torch.unique_consecutive(segments, return_counts=True)
    if not len(present):
        return
    step = -(-len(present) // -(-len(present) // step))  # make all steps about equally large
    bounds = F.pad(counts.cumsum(0), (1, 0))
    stops = [*bounds[:-1:step].tolist(), len(segments)]
    for number, start in enumerate(range(0, len(present), step)):
        part, some = slice(stops[number], stops[number + 1]), slice(start, start + step)
        entries = source, source_rows[part], weights[part]
        rows = present[some]
        if plain:
            sums_CH = _bags(*entries, bounds[start : start + step + 1] - part.start)
        else:
            places = torch.repeat_interleave(counts[some], output_size=part.stop - part.start)
            sums_CH = gathered_sum(*entries, places, len(rows), out_dtype=weights.dtype, chunk=chunk)
        _add_rows(out, rows, sums_CH)
        del sums_CH  # free these sums before the next iteration allocates its sums


def _add_rows(out: Tensor, rows: Tensor, values: Tensor) -> None:
    """Compute `out[rows] += values`, rounded once to the dtype of `out`. `rows` must ascend."""
    if out.dtype != values.dtype:
        out.index_copy_(0, rows, values.add_(out.index_select(0, rows)).to(out.dtype))
    elif out.is_cpu:  # this sparse addition is one parallel operation; `index_add_` runs five
        out.add_(
            torch.sparse_coo_tensor(rows[None], values, out.shape, is_coalesced=True, check_invariants=False)
        )
    else:
        out.index_add_(0, rows, values)


def _is_plain(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `matrix` is contiguous and has the given dtype, as `_sampled_product` requires."""
    return matrix.dtype == dtype and matrix.is_contiguous()


def _sampled_product(left: Tensor, left_rows: Tensor, right: Tensor, right_rows: Tensor) -> Tensor:
    """Compute only the elements of `left @ right.T` that `gathered_dot` selects, in one torch operation."""
    _suppress_sparse_csr_warning()
    bounds = torch.searchsorted(left_rows, torch.arange(len(left) + 1))
    pattern = torch.sparse_csr_tensor(
        bounds, right_rows, left.new_zeros(len(right_rows)), (len(left), len(right)), check_invariants=False
    )
    product: Tensor = torch.sparse.sampled_addmm(pattern, left, right.t(), beta=0.0)
    return product.values()


@functools.cache
def _suppress_sparse_csr_warning() -> None:
    """Trigger and suppress torch's warning about sparse CSR tensors.

    Torch gives the warning once per process. `catch_warnings` is not thread-safe, so this function is cached
    and runs only once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float32, check_invariants=False)


def _bags(source: Tensor, source_rows: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Return [S, H]: row `s` is the weighted sum over entries `bounds[s]` to `bounds[s + 1] - 1`."""
    return F.embedding_bag(
        source_rows, source.detach(), bounds, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
