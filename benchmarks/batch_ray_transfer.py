"""Benchmark that sends loss masks and candidate sets through Ray's object store, as arrays and as lists.

For loss masks and candidate sets, the tables compare the pickled sizes, and the time of `ray.put` plus
`ray.get`. For loss masks, two more tables compare the time to convert arrays or lists to float32 tensors, and
the time to convert lists of ints to arrays (`pack_loss_mask`). The batch has 512 responses of 16 to 8192
tokens. Ray runs on loopback with one CPU and no dashboard.
"""

from __future__ import annotations

import pickle

import numpy as np
import ray
import torch

from benchmarks.batch_collate import candidate_sets
from benchmarks.harness.paired_timing import compare, compare_counts
from sglang_topp.batch import BatchCandidateSets, pack_loss_mask, unpack_loss_masks
from tests.local_ray import run_local_ray

__all__ = ["pickled_bytes", "run"]


def pickled_bytes(value: object) -> int:
    """Return how many bytes pickle protocol 5 transfers, in its stream and out of band."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def run() -> None:
    with run_local_ray(object_store_bytes=512 * 2**20):
        _compare_in_ray()


def _compare_in_ray() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 8193, 512)
    arrays = [rng.integers(0, 2, n, np.int8) for n in lengths]
    forms = {
        "lists of ints": [array.tolist() for array in arrays],
        "int8": [pack_loss_mask(array) for array in arrays],
    }
    compare_counts(
        f"loss masks of {lengths.sum() / 1e6:.2f} M tokens, pickled",
        "bytes per token",
        {label: pickled_bytes(masks) / lengths.sum() for label, masks in forms.items()},
    )
    compare(
        "512 loss masks: put + get",
        {label: lambda masks=masks: ray.get(ray.put(masks)) for label, masks in forms.items()},
    )
    compare(
        "512 loss masks to float32 tensors",
        {
            "loop: torch.tensor(list)": lambda: [
                torch.tensor(mask, dtype=torch.float32) for mask in forms["lists of ints"]
            ],
            "int8": lambda: unpack_loss_masks(forms["int8"]),
        },
    )
    compare(
        "512 loss masks packed from lists",
        {
            "list(mask)": lambda: [list(mask) for mask in forms["lists of ints"]],
            "int8": lambda: [pack_loss_mask(mask) for mask in forms["lists of ints"]],
        },
    )

    ids = rng.integers(0, 150_000, lengths[:64].sum())
    sets = candidate_sets(rng, ids, np.ones(len(ids), bool))
    rows = BatchCandidateSets(sets, np.concatenate([[0], np.cumsum(lengths[:64])]))
    ragged = [row.to_lists() for row in rows]
    compare_counts(
        f"{len(ids) / 1e3:.0f} k candidate sets, {len(sets.token_ids) / 1e6:.2f} M candidates, pickled",
        "MB",
        {"lists of lists": pickled_bytes(ragged) / 1e6, "BatchCandidateSets": pickled_bytes(rows) / 1e6},
    )
    compare(
        "candidate sets: put + get",
        {
            "lists of lists": lambda: ray.get(ray.put(ragged)),
            "BatchCandidateSets": lambda: ray.get(ray.put(rows)),
        },
        rounds=3,
    )
