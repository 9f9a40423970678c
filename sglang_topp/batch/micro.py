"""Micro-batches: a batch split by a token budget, balanced over data-parallel ranks, and put together again.

Shape legend: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.bins import deal_bins
from sglang_topp.batch.nested import NestedBatch, nest_batch, unnest_batch
from sglang_topp.batch.rows import as_integers
from sglang_topp.errors import InvalidInputError

__all__ = ["MicroBatches", "split_micro_batches", "take_batch"]


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Which rows run together, and where; made by `split_micro_batches`.

    Attributes:
        rows: `rows[rank][k]` is int64, the rows of the k-th micro-batch of a rank, ascending. Every rank
            has as many micro-batches; one is empty only where B is less than their number.
    """

    rows: tuple[tuple[NDArray[np.int64], ...], ...]

    def __len__(self) -> int:
        """Micro-batches of each rank."""
        return len(self.rows[0])

    def of(self, batch: Any, rank: int) -> Iterator[Any]:
        """The micro-batches of `rank`, cut out of the whole batch in their order.

        Args:
            batch: a dict of tensors, lists and RowSets, a TensorDict, or a NestedBatch, of B rows.

        Raises:
            InvalidInputError: the batch has another number of rows than the lengths that were split.
        """
        nested = batch if isinstance(batch, NestedBatch) else nest_batch(batch, {})
        num_rows = sum(len(rows) for rank in self.rows for rows in rank)
        if len(nested) != num_rows:
            raise InvalidInputError(f"batch: got {len(nested)} rows, expected {num_rows}, one per length")
        return (_like(batch, nested.take(rows)) for rows in self.rows[rank])

    def undo(self, results: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """What the micro-batches gave, in the order of the batch's rows.

        Args:
            results: `results[rank][k]` is [rows, ...] for the rows of that micro-batch, in their order.

        Returns:
            [B, ...].

        Raises:
            InvalidInputError: a result is missing, or has another number of rows than its micro-batch.
        """
        parts = []
        for rank, expected in enumerate(self.rows):
            if len(results) != len(self.rows) or len(results[rank]) != len(expected):
                raise InvalidInputError(
                    f"results: expected {len(self)} for each of {len(self.rows)} ranks,"
                    f" got {[len(got) for got in results]}"
                )
            for k, rows in enumerate(expected):
                if len(results[rank][k]) != len(rows):
                    raise InvalidInputError(
                        f"results[{rank}][{k}]: got {len(results[rank][k])} rows, expected {len(rows)}"
                    )
                parts.append(results[rank][k])
        order = np.concatenate([rows for rank in self.rows for rows in rank])
        back = torch.from_numpy(np.argsort(order))
        joined = torch.cat(parts)
        return joined[back.to(joined.device)]


def split_micro_batches(lengths: ArrayLike, max_tokens: int, *, ranks: int = 1) -> MicroBatches:
    """Split B rows into micro-batches of at most `max_tokens` tokens.

    First-fit decreasing, then dealt so that every rank gets as many micro-batches of about as many
    tokens (`sglang_topp.batch.bins`), as collectives need.

    Args:
        lengths: integers [B], the tokens that each row costs: its own where padding is removed, the
            batch's width where it is not.
        max_tokens: what the lengths of a micro-batch may add up to.
        ranks: data-parallel ranks.

    Raises:
        InvalidInputError: no rows, a row longer than `max_tokens`, or `ranks` below 1.
    """
    tokens = as_integers("lengths", lengths, "integers, one per row")
    if not len(tokens):
        raise InvalidInputError("lengths: got no rows, expected at least one")
    shards = deal_bins(tokens, max_tokens, ranks)
    return MicroBatches(tuple(tuple(np.sort(np.array(bin_, np.int64)) for bin_ in shard) for shard in shards))


def take_batch(batch: Any, rows: ArrayLike) -> Any:
    """These rows of a batch, in this order, candidate sets included; views where they stand side by side.

    Args:
        batch: a dict, a TensorDict (entries as in `nest_batch`, tensors on any device), or a
            NestedBatch; comes back as the same. An entry without rows is one value for all, and is kept.
        rows: integers, from 0 to B - 1.

    Raises:
        InvalidInputError: entries differ in B, or an index is out of range.
    """
    nested = batch if isinstance(batch, NestedBatch) else nest_batch(batch, {})
    return _like(batch, nested.take(rows))


def _like(batch: Any, taken: NestedBatch) -> Any:
    """`taken` in the form of the batch that it was taken from."""
    return taken if isinstance(batch, NestedBatch) else unnest_batch(taken)
