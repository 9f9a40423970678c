"""Loss masks, candidate sets, and nested batches pass through a real Ray object store and worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray
import torch

from sglang_topp.batch import (
    BatchCandidateSets,
    nest_batch,
    pack_loss_mask,
    unnest_batch,
    unpack_loss_masks,
)
from tests.batch.hypothesis_samples import random_sets

pytestmark = pytest.mark.usefixtures("local_ray")


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_int8_mask_is_read_without_a_copy() -> None:
    mask = np.arange(500_000) % 3 == 0
    reference = ray.put(pack_loss_mask(mask))
    first, second = ray.get(reference), ray.get(reference)
    assert address(first) == address(second)
    assert np.array_equal(first, mask)
    assert unpack_loss_masks([first])[0].tolist() == mask.tolist()


def test_lists_of_masks_round_trip() -> None:
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, 2, n).tolist() for n in rng.integers(0, 3000, 50)]
    got = ray.get(ray.put([pack_loss_mask(mask) for mask in masks]))
    assert [mask.sum() for mask in got] == [sum(mask) for mask in masks]
    assert [tensor.tolist() for tensor in unpack_loss_masks(got)] == masks


def test_candidate_sets_are_read_without_a_copy() -> None:
    ids = [list(range(4000)), list(range(2000))]
    rows = BatchCandidateSets.from_rows(random_sets(ids, [[1] * len(row) for row in ids], 0))
    reference = ray.put(rows)
    first, second = ray.get(reference), ray.get(reference)
    assert first == rows
    for name in ("token_ids", "logprobs", "offsets", "sampled_ids"):
        assert address(getattr(first.sets, name)) == address(getattr(second.sets, name)), name
    part = ray.get(ray.put(rows[1:]))
    assert part == rows[1:]


def test_nested_parts_are_modified_in_workers_and_returned() -> None:
    rng = np.random.default_rng(0)
    mask = torch.from_numpy(rng.random((8, 5000)) < 0.1).long()
    batch = {
        "mask": mask,
        "field": torch.from_numpy(rng.integers(1, 9, (8, 5000))),
        "bf16": torch.from_numpy(rng.random((8, 5000))).bfloat16() * mask,
        "dense": torch.from_numpy(rng.random((8, 2000))),
    }
    batch["field"] *= mask
    fields = {"mask": "mask", "field": "mask", "bf16": "mask"}
    nested = nest_batch(batch, fields)

    @ray.remote
    def work(part: Any) -> dict[str, torch.Tensor]:
        out: dict[str, torch.Tensor] = unnest_batch(part)
        out["field"] += 1
        out["dense"] += 1  # dense fields are writable too
        return out

    parts = ray.get([work.remote(ray.put(part)) for part in (nested[:3], nested[3:6], nested[6:])])
    expected = dict(batch, field=batch["field"] * mask + 1, dense=batch["dense"] + 1)
    for name, tensor in expected.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor), name

    reference = ray.put(nested)
    first, second = ray.get(reference), ray.get(reference)
    for name in batch:
        assert address(first._entries[name].values) == address(second._entries[name].values), name
