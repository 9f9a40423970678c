"""Build training batches from rollouts: collate, pack, compress, and split into micro-batches.

Needs torch (`pip install sglang-topp[torch]`). All functions process the tokens of a sample at once, without
a Python loop per token.
"""

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets
from sglang_topp.batch.collate import (
    RLBatch,
    SFTBatch,
    collate_rl,
    collate_rollouts,
    collate_sft,
)
from sglang_topp.batch.micro_batches import MicroBatches, split_micro_batches, take_batch
from sglang_topp.batch.nested import NestedBatch, nest_batch, unnest_batch
from sglang_topp.batch.packed_collator import PackedBatch, PackedCollator
from sglang_topp.batch.ragged_rows import pack_loss_mask, unpack_loss_masks

__all__ = [
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
