"""Split a batch into micro-batches within a token budget, assign them to ranks, and join their results.

Shape legend: B is the number of rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.bin_packing import deal_bins
from sglang_topp.batch.nested import NestedBatch, nest_batch, unnest_batch
from sglang_topp.batch.write_ragged_rows import as_integers
from sglang_topp.errors import InvalidInputError

__all__ = ["MicroBatches", "split_micro_batches", "take_batch"]


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """The rows of every rank's micro-batches, as returned by `split_micro_batches`.

    Attributes:
        rows: `rows[rank][k]` is int64: the indices of the batch's rows in the rank's k-th micro-batch, in
            ascending order. Every rank has the same number of micro-batches. A micro-batch is empty only if
            there are fewer rows than micro-batches.
    """

    rows: tuple[tuple[NDArray[np.int64], ...], ...]

    def __len__(self) -> int:
        """Return the number of micro-batches per rank."""
        return len(self.rows[0])

    def of(self, batch: Any, rank: int) -> Iterator[Any]:
        """Yield the micro-batches of `rank`, in order.

        Args:
            batch: a batch of B rows: a NestedBatch, a TensorDict, or a dict of tensors, lists, and
                BatchCandidateSets.

        Raises:
            InvalidInputError: the batch has more or fewer rows than the `lengths` passed to
                `split_micro_batches`.
        """
        nested = batch if isinstance(batch, NestedBatch) else nest_batch(batch, {})
        num_rows = sum(len(rows) for rank in self.rows for rows in rank)
        if len(nested) != num_rows:
            raise InvalidInputError(f"batch: got {len(nested)} rows, expected {num_rows}, one per length")
        return (_like(batch, nested.take(rows)) for rows in self.rows[rank])

    def undo(self, results: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Join the results of the micro-batches in the order of the batch's rows.

        Args:
            results: `results[rank][k]` is [rows, ...], the results of the rank's k-th micro-batch.

        Returns:
            [B, ...], one result per row of the batch.

        Raises:
            InvalidInputError: a result is missing, or has more or fewer rows than its micro-batch.
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

    `bin_packing.deal_bins` packs the rows. Every rank gets about the same number of tokens. Every rank gets
    the same number of micro-batches, because all ranks must take part in collective operations.

    Args:
        lengths: integers [B], the number of tokens that the trainer processes in each row. If the trainer
            removes padding, `lengths[i]` is row i's length without padding. If the trainer keeps padding,
            `lengths[i]` is the batch's width for every row.
        max_tokens: the maximum number of tokens in a micro-batch.
        ranks: the number of data-parallel ranks.

    Raises:
        InvalidInputError: there are no rows, a row is longer than `max_tokens`, or `ranks` is below 1.
    """
    tokens = as_integers("lengths", lengths, "integers, one per row")
    if not len(tokens):
        raise InvalidInputError("lengths: got no rows, expected at least one")
    shards = deal_bins(tokens, max_tokens, ranks)
    return MicroBatches(tuple(tuple(np.sort(np.array(bin_, np.int64)) for bin_ in shard) for shard in shards))


def take_batch(batch: Any, rows: ArrayLike) -> Any:
    """Return the given rows of a batch, in the given order.

    The result includes the rows' candidate sets. Candidate sets and padded tensors are returned as views if
    the rows are consecutive.

    Args:
        batch: a NestedBatch, or a dict or TensorDict that `nest_batch` accepts, with tensors on any device.
            The result has the same type as `batch`. An entry that does not have one element per row is kept
            unchanged.
        rows: integers, from 0 to B - 1.

    Raises:
        InvalidInputError: entries differ in their number of rows, or an index is out of range.
    """
    nested = batch if isinstance(batch, NestedBatch) else nest_batch(batch, {})
    return _like(batch, nested.take(rows))


def _like(batch: Any, taken: NestedBatch) -> Any:
    """Convert the selected rows `taken` to the type of `batch`."""
    return taken if isinstance(batch, NestedBatch) else unnest_batch(taken)
