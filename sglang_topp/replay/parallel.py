"""Vocabulary shards over the ranks of a tensor-parallel group, and the reductions across them.

A group of None means one process holding the whole vocabulary: nothing is sent. (torch.distributed
reads None as "all processes"; here the group must be named.)
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from sglang_topp.errors import InvalidInputError

__all__ = ["reduce_max", "reduce_sum", "vocab_range"]


def vocab_range(vocab_size: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """`(vocab_start, vocab_stop)` of one rank's rows of the LM head, as `torch.chunk` cuts them.

    Every shard but the last holds `ceil(vocab_size / tp_size)` ids; the last ones hold what is left,
    which may be fewer or none. For a head whose vocabulary was padded to a multiple of `tp_size`,
    give the padded size.

    Raises:
        InvalidInputError: the rank is not within the group, or a size is not positive.
    """
    if vocab_size < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise InvalidInputError(
            f"got vocab_size={vocab_size}, tp_size={tp_size}, tp_rank={tp_rank};"
            " expected positive sizes and 0 <= tp_rank < tp_size"
        )
    width = -(-vocab_size // tp_size)
    return min(tp_rank * width, vocab_size), min((tp_rank + 1) * width, vocab_size)


def reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum `tensor` over the group, in place, and return it."""
    if group is not None:
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
    return tensor


def reduce_max(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Elementwise maximum of `tensor` over the group, in place, and return it."""
    if group is not None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


def first_true(mask: Tensor) -> int | None:
    """Index of the first True of a 1-D mask, or None; waits for the device."""
    return int(mask.int().argmax()) if bool(mask.any()) else None
