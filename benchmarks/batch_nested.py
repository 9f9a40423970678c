"""Benchmark of converting a padded batch to a `NestedBatch` and back: memory size and time.

The batch has 1024 x 16384 positions, of which 8.7 % hold tokens. The batch has two int64 fields (the
responses and their mask), and three float32 fields. The dense batch takes 470 MB, so it fits in the memory of
a small machine. The controller process of a real trainer would hold a batch with eight times as many rows.

The baseline copies the dense batch with NumPy, because a `NestedBatch` holds NumPy arrays too. The baseline
does not use `torch.clone`, because its copy would distort the next timed function. On Linux, NumPy allocates
huge pages, but `torch.clone` allocates pages of 4 KiB. After the copy with `torch.clone`, Linux would have to
compact memory before NumPy gets huge pages again.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.batch_ray_transfer import pickled_bytes
from benchmarks.harness.paired_timing import compare, compare_counts
from sglang_topp.batch import nest_batch, unnest_batch
from tests.batch import reference_loops

__all__ = ["padded_batch", "run"]


def padded_batch(rows: int = 1024, width: int = 16384, fill: float = 0.084) -> dict[str, torch.Tensor]:
    """Return left-padded rows of random lengths. The fraction of positions with tokens is about `fill`."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, int(2 * fill * width) - 16, rows)
    lengths[0] = width  # the other rows are padded to the length of row 0
    keep = np.arange(width) >= width - lengths[:, None]
    batch = {"responses": np.zeros(keep.shape, np.int64), "response_mask": keep.astype(np.int64)}
    batch["responses"][keep] = rng.integers(0, 150_000, lengths.sum())
    for name in ("logprobs", "advantages", "rewards"):
        batch[name] = np.zeros(keep.shape, np.float32)
        batch[name][keep] = -rng.random(lengths.sum(), np.float32)
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def run() -> None:
    batch = padded_batch()
    fields = dict.fromkeys(batch, "response_mask")
    dense = sum(tensor.nbytes for tensor in batch.values())
    fill = float(batch["response_mask"].double().mean())
    nested = nest_batch(batch, fields)
    compare_counts(
        f"a batch that is {fill:.1%} full: the ceiling is {1 / fill:.2f} x less",
        "MB",
        {"dense": dense / 1e6, "nested": pickled_bytes(nested) / 1e6},
        target=0.94 / fill,
    )
    arrays = [tensor.numpy() for tensor in batch.values()]
    compare(
        "nest + unnest against one copy of the dense batch",
        {
            "numpy copy": lambda: [array.copy() for array in arrays],
            "nest": lambda: nest_batch(batch, fields),
            "unnest": lambda: unnest_batch(nested),
            "nest + unnest": lambda: unnest_batch(nest_batch(batch, fields)),
        },
        rounds=9,
        target=0.5,
    )
    mask, width = batch["response_mask"], batch["response_mask"].shape[1]
    compare(
        "nest + unnest against the loop over rows",
        {
            "loop": lambda: [
                reference_loops.unnest(reference_loops.nest(field, mask), width) for field in batch.values()
            ],
            "nest_batch, unnest_batch": lambda: unnest_batch(nest_batch(batch, fields)),
        },
        rounds=7,
    )
