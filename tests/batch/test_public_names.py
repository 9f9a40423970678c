"""Public names of `sglang_topp.batch`, and the packages that it must not import."""

from __future__ import annotations

import subprocess
import sys

from sglang_topp import batch


def test_public_names() -> None:
    assert sorted(batch.__all__) == [
        "BatchCandidateSets",
        "MicroBatches",
        "NestedBatch",
        "PackedBatch",
        "PackedCollator",
        "RLBatch",
        "SFTBatch",
        "collate_rl",
        "collate_rollouts",
        "collate_sft",
        "nest_batch",
        "pack_loss_mask",
        "split_micro_batches",
        "take_batch",
        "unnest_batch",
        "unpack_loss_masks",
    ]
    assert all(hasattr(batch, name) for name in batch.__all__)


def test_import_loads_neither_ray_nor_tensordict() -> None:
    code = "import sys, sglang_topp.batch; sys.exit(bool({'ray', 'tensordict'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
