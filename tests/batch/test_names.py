"""The package's public names, and what importing the core may cost."""

from __future__ import annotations

import subprocess
import sys

from sglang_topp import batch


def test_public_names() -> None:
    assert sorted(batch.__all__) == [
        "MicroBatches",
        "Nest",
        "NestedBatch",
        "PackedBatch",
        "PackedCollator",
        "PackedLossMask",
        "RLBatch",
        "RowSets",
        "SFTBatch",
        "collate_rl",
        "collate_sft",
        "nest_batch",
        "pack_loss_mask",
        "split_micro_batches",
        "take_batch",
        "unnest_batch",
        "unpack_loss_masks",
    ]
    assert all(hasattr(batch, name) for name in batch.__all__)


def test_the_batch_room_imports_neither_ray_nor_tensordict() -> None:
    code = "import sys, sglang_topp.batch; sys.exit(bool({'ray', 'tensordict'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
