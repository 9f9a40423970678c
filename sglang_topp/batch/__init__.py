"""Between rollout and trainer: collation, packing, loss masks, nested batches, micro-batches.

Needs torch (`pip install sglang-topp[torch]`). No function here runs a Python loop per token.
"""

from sglang_topp.batch.collate import RLBatch, SFTBatch, collate_rl, collate_sft
from sglang_topp.batch.loss_mask import PackedLossMask, pack_loss_mask, unpack_loss_masks
from sglang_topp.batch.nested import Nest, NestedBatch, nest_batch, unnest_batch
from sglang_topp.batch.row_sets import RowSets

__all__ = [
    "Nest",
    "NestedBatch",
    "PackedLossMask",
    "RLBatch",
    "RowSets",
    "SFTBatch",
    "collate_rl",
    "collate_sft",
    "nest_batch",
    "pack_loss_mask",
    "unnest_batch",
    "unpack_loss_masks",
]
