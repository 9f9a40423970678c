"""A vocabulary that is split over ranks: each rank's ids, and reductions over the ranks.

`group=None` means no tensor parallelism: this process holds the whole vocabulary, and the reductions do
nothing. In `torch.distributed`, by contrast, `group=None` means all processes. To reduce over all processes
with this module, pass the group of all processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from sglang_topp.errors import InvalidInputError

__all__ = ["Shard", "first_true", "reduce_max", "reduce_sum", "vocab_range"]


@dataclass(frozen=True)
class Shard:
    """The ids `start <= id < stop` that this rank holds, out of a vocabulary of `vocab_size` ids.

    `vocab_size` is None if this rank holds only a part of the vocabulary, and the caller did not pass the
    size. The last shard may contain padding, so `num_ids` counts only the ids below `vocab_size`.
    """

    start: int
    stop: int
    vocab_size: int | None

    @classmethod
    def of(cls, num_held: int, start: int, vocab_size: int | None, *, parallel: bool) -> Shard:
        """Build the `Shard` of a rank that holds the ids from `start` to `start + num_held - 1`."""
        if start < 0:
            raise InvalidInputError(f"vocab_start: got {start}, expected 0 or more")
        if vocab_size is not None and vocab_size < 1:
            raise InvalidInputError(f"vocab_size: got {vocab_size}, expected 1 or more")
        if not parallel:
            stop = start + num_held
            vocab_size = stop if vocab_size is None else min(vocab_size, stop)
        return cls(start, start + num_held, vocab_size)

    @property
    def num_ids(self) -> int:
        """The number of ids in the shard, not counting padding."""
        stop = self.stop if self.vocab_size is None else min(self.stop, self.vocab_size)
        return max(0, stop - self.start)


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
