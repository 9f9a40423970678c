"""Between rollout and trainer: collation, packing, loss masks, nested batches, micro-batches.

Needs torch (`pip install sglang-topp[torch]`). No function here runs a Python loop per token.
"""

from sglang_topp.batch.collate import RLBatch, SFTBatch, collate_rl, collate_sft
from sglang_topp.batch.loss_mask import PackedLossMask, pack_loss_mask, unpack_loss_masks
from sglang_topp.batch.micro import MicroBatches, split_micro_batches, take_batch
from sglang_topp.batch.nested import Nest, NestedBatch, nest_batch, unnest_batch
from sglang_topp.batch.pack import PackedBatch, PackedCollator
from sglang_topp.batch.row_sets import RowSets

__all__ = [
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
