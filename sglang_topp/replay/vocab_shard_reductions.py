"""Helpers for an LM head that is split over ranks by vocabulary: each rank's ids, and reductions over ranks.

`group=None` means no tensor parallelism: this process holds the whole vocabulary, and the reductions do
nothing. In `torch.distributed`, by contrast, `group=None` means all processes. To reduce over all processes
with this module, pass the group of all processes.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from sglang_topp.errors import InvalidInputError

__all__ = ["reduce_max", "reduce_sum", "vocab_range"]


def vocab_range(vocab_size: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return `(vocab_start, vocab_stop)` of one rank's rows of the LM head, as `torch.chunk` splits them.

    The first shards hold `ceil(vocab_size / tp_size)` ids each. The last shards may hold fewer ids, or none.
    For a head that is padded to a multiple of `tp_size`, pass the padded size.

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
    """Sum `tensor` over the ranks of `group` in place, and return `tensor`."""
    if group is not None:
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
    return tensor


def reduce_max(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Take the elementwise maximum of `tensor` over the ranks of `group` in place, and return `tensor`."""
    if group is not None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


def first_true(mask: Tensor) -> int | None:
    """Return the index of the first True of a 1-D mask, or None.

    The host waits until the device has computed the mask.
    """
    return int(mask.int().argmax()) if bool(mask.any()) else None
