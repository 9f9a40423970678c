"""Dot products of candidates' rows, and sums of rows over segments, in plain torch.

A sum over a segment adds up `weights[e] * source[source_rows[e]]` for the entries `e` of the segment. The
functions run on any device, sum in float32 (float64 for float64 inputs), and in a fixed order, so results
are bitwise reproducible. `gathered_products_triton` has the same functions for NVIDIA GPUs.

On a CPU, torch's threads wait for each other after each operation, so fewer operations are faster. By
default, waiting threads spin, and so occupy cores that other processes could use. On a busy machine, set
`OMP_WAIT_POLICY=passive`, so that waiting threads sleep.

Shape legend: m entries, S segments, H hidden size, L or R rows of an input matrix.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_topp.replay.candidate_index import Entries, Segments

__all__ = ["gathered_dot", "segment_add", "segment_sum"]

_CHUNK_BYTES = 1 << 23  # larger chunks exceed a CPU's cache; smaller chunks need more thread barriers


def gathered_dot(left: Tensor, right: Tensor, entries: Entries, *, out_dtype: torch.dtype) -> Tensor:
    """Return [m] of `out_dtype`: `left[entries.positions[e]] . right[entries.ids[e]]` for each entry.

    Args:
        left, right: [L, H] and [R, H], of any floating dtypes.
    """
    if left.is_cpu:
        left, left_rows = _compact(left, entries.positions, out_dtype)
        right, right_rows = _compact(right, entries.ids, out_dtype)
        return _sampled_product(left, left_rows, right, right_rows)
    out_m = torch.empty(len(entries.ids), dtype=out_dtype, device=left.device)
    step = _step(left, out_dtype)
    for start in range(0, len(out_m), step):
        part = slice(start, start + step)
        rows = right.index_select(0, entries.ids[part]).to(out_dtype)
        torch.sum(rows.mul_(left.index_select(0, entries.positions[part])), dim=1, out=out_m[part])
    return out_m


def segment_sum(source: Tensor, segments: Segments, weights: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Return [S, H]: the sum of each segment, rounded once to `out_dtype`. An empty segment sums to zero.

    Args:
        source: [R, H], of any floating dtype.
        weights: [m], float32 or float64, the dtype of the sums.
    """
    source, rows = _compact(source, segments.source_rows, weights.dtype)
    return _bags(source, rows, weights, segments.offsets).to(out_dtype)


def segment_add(out: Tensor, source: Tensor, segments: Segments, weights: Tensor) -> None:
    """Add the sum of each segment `s` to row `segments.out_rows[s]` of `out`, in place, and round once.

    Rows of `out` without a segment are neither read nor written. The other arguments are those of
    `segment_sum`.
    """
    source, rows = _compact(source, segments.source_rows, weights.dtype)
    assert segments.out_rows is not None
    num_segments = len(segments.out_rows)
    if not weights.is_cpu:  # the empty segments at the end repeat a row
        num_segments = int((segments.offsets[:-1] < len(weights)).sum())
    # A step's sums take twice `_CHUNK_BYTES`. All steps are about equally large.
    step = 2 * _step(source, weights.dtype)
    step = -(-num_segments // max(1, -(-num_segments // step)))
    for start in range(0, num_segments, max(1, step)):
        bounds = segments.offsets[start : min(start + step, num_segments) + 1]
        entries = slice(int(bounds[0]), int(bounds[-1]))
        sums = _bags(source, rows[entries], weights[entries], bounds - entries.start)
        _add_rows(out, segments.out_rows[start : start + len(sums)], sums)
        del sums  # free these sums before the next step allocates its own


def _step(matrix: Tensor, dtype: torch.dtype) -> int:
    return max(1, _CHUNK_BYTES // max(1, matrix.shape[1] * dtype.itemsize))


def _compact(matrix: Tensor, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a contiguous matrix in `dtype`, and the rows of it that `rows` are: copies only what is read."""
    if matrix.dtype == dtype and matrix.is_contiguous():
        return matrix, rows
    present, places = torch.unique(rows, return_inverse=True)
    return matrix.index_select(0, present).to(dtype), places


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


def _sampled_product(left: Tensor, left_rows: Tensor, right: Tensor, right_rows: Tensor) -> Tensor:
    """Compute only some elements of `left @ right.T`, in one torch operation. `left_rows` must ascend."""
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
