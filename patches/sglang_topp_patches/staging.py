"""Sets on their way from a GPU, without a wait in the step that takes them.

Between sampling and SGLang's own copy to the host nothing reads a value back. The sets lie in a staging area
of a fixed size, which is copied with SGLang's own results. When the pass is consumed the sizes are known;
the rows that did not fit are taken again then, exactly, from their log-probs.

What is kept for that lives on the device, made on the stream that samples. SGLang waits for the event
behind its copies before it consumes a pass, so all that was queued on that stream before is done by then;
the second taking ends with a wait of its own, and only then is what was kept let go of: no later pass can
have got its memory. SGLang writes the dtype's lowest value over -inf in the log-probs meanwhile, which means
the same here. The weights' own tensor may be one that a CUDA graph writes to again: a copy is kept of it.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.nucleus.host import to_device
from sglang_topp_patches.budget import budget
from sglang_topp_patches.row_sets import RowSets

if TYPE_CHECKING:
    from sglang_topp.nucleus.staged import Staged

__all__ = ["StagedSets", "by_threshold", "by_weights", "counts", "is_staged", "warm_up"]

_LEAST_ROWS = 16  # a small batch has room for the large sets of some of its rows


@dataclass
class Counts:
    """What became of the rows of this process.

    Attributes:
        rows_staged: whose sets went through a staging area.
        rows_taken_again: those of them that did not fit.
    """

    rows_staged: int = 0
    rows_taken_again: int = 0

    def to_dict(self) -> dict[str, int]:
        """What `GET /server_info` shows."""
        return asdict(self)


counts = Counts()


def is_staged(logprobs: torch.Tensor) -> bool:
    """Whether sets of these log-probs are staged: on a GPU, and in Triton's interpreter."""
    return (logprobs.is_cuda or _is_interpreted()) and _has_triton()


@cache
def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _Source(Protocol):
    """What sets are taken from, kept until they are whole."""

    @property
    def sampled_ids(self) -> torch.Tensor: ...

    @property
    def lowest(self) -> float | None: ...

    @property
    def vocab(self) -> int: ...

    def again(self, rows: NDArray[np.intp]) -> RowSets:
        """The sets of these rows, on the device; waits for their sizes."""


@dataclass(frozen=True)
class _ByThreshold:
    logprobs: torch.Tensor
    thresholds: NDArray[np.float64]
    sampled_ids: torch.Tensor
    lowest: float | None

    @property
    def vocab(self) -> int:
        return self.logprobs.shape[1]

    def again(self, rows: NDArray[np.intp]) -> RowSets:
        from sglang_topp.nucleus import staged

        asked = np.zeros_like(self.thresholds)
        asked[rows] = self.thresholds[rows]
        ids, logprobs, offsets = staged.top_p_candidates(
            self.logprobs, asked, self.sampled_ids, lowest=self.lowest
        )
        ends = to_device(np.append(rows, len(asked)), offsets.device)
        return RowSets(ids, logprobs, offsets[ends])


@dataclass(frozen=True)
class _ByWeights:
    logprobs: torch.Tensor
    rows: torch.Tensor
    is_drawn: torch.Tensor
    token_ids: torch.Tensor | None
    sampled_ids: torch.Tensor
    lowest: float | None

    @property
    def vocab(self) -> int:
        return self.logprobs.shape[1]

    def again(self, rows: NDArray[np.intp]) -> RowSets:
        from sglang_topp.nucleus import staged

        which = to_device(rows, self.logprobs.device)
        return RowSets(
            *staged.support_candidates(
                self.logprobs[self.rows[which]],
                self.is_drawn[which],
                None if self.token_ids is None else self.token_ids[which],
                self.sampled_ids[which],
                lowest=self.lowest,
            )
        )


def by_threshold(
    logprobs: torch.Tensor, thresholds: Sequence[float], sampled_ids: torch.Tensor, lowest: float | None
) -> StagedSets:
    """`extract.extract`, without a wait."""
    from sglang_topp.nucleus import staged

    if logprobs.stride(1) != 1:
        logprobs = logprobs.contiguous()
    # SGLang may replace sampled tokens in place, when a grammar or another rank has the last word.
    source = _ByThreshold(logprobs, np.array(thresholds, np.float64), sampled_ids.long().clone(), lowest)
    taken = staged.stage_top_p(
        logprobs, source.thresholds, source.sampled_ids, capacity=_capacity(len(logprobs)), lowest=lowest
    )
    return StagedSets(taken, source)


def by_weights(
    logprobs: torch.Tensor,
    rows: torch.Tensor,
    is_drawn: torch.Tensor,
    token_ids: torch.Tensor | None,
    sampled_ids: torch.Tensor,
    lowest: float | None,
) -> StagedSets:
    """`extract.extract_support`, without a wait; `sampled_ids` are those of `rows`."""
    from sglang_topp.nucleus import staged

    if logprobs.stride(1) != 1:
        logprobs = logprobs.contiguous()
    token_ids = None if token_ids is None else token_ids.int().contiguous()
    source = _ByWeights(logprobs, rows, is_drawn.contiguous(), token_ids, sampled_ids.long(), lowest)
    taken = staged.stage_support(
        logprobs,
        rows,
        source.is_drawn,
        token_ids,
        source.sampled_ids,
        capacity=_capacity(len(rows)),
        lowest=lowest,
    )
    return StagedSets(taken, source)


@cache
def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels before the first request that asks for sets: it, and all beside it, would wait."""
    logprobs = torch.full((1, vocab), -math.log(vocab), dtype=dtype, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    by_threshold(logprobs, [0.5], first, None)
    for width in (1, vocab):
        is_drawn = torch.ones((1, width), dtype=torch.bool, device=device)
        by_weights(logprobs, first, is_drawn, None if width == vocab else first[None].int(), first, None)


def _capacity(num_rows: int) -> int:
    return max(num_rows, _LEAST_ROWS) * budget().staged_candidates_per_row


@dataclass(frozen=True)
class StagedSets:
    """The sets of some rows, on their way to the host.

    Attributes:
        taken: the staging area.
        source: what they are taken from.
        problems: rows that are known to be wrong already, and why.
    """

    taken: Staged
    source: _Source
    problems: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.taken.rows.shape[1]

    def map(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StagedSets:
        """The same sets with the staging area copied; the copies may still be under way."""
        return replace(self, taken=self.taken.map(copy_tensor))

    def with_problems(self, problems: Mapping[int, str]) -> StagedSets:
        """The same sets, with more rows that are known to be wrong."""
        return replace(self, problems={**self.problems, **problems})

    def settled(self) -> RowSets:
        """The sets on the device, whole; waits for them."""
        device = self.taken.rows.device
        return self.map(lambda tensor: tensor.cpu()).on_host().map(lambda tensor: tensor.to(device))

    def on_host(self) -> RowSets:
        """The sets; the staging area must be on the host by now. Waits only for rows that did not fit."""
        read = self.taken.read()
        found = read.problems(self.source.sampled_ids, self.source.vocab)
        problems = {**{row: str(problem) for row, problem in found.items()}, **self.problems}
        ids, logprobs, offsets = read.sets()
        counts.rows_staged += int((read.rows[0] > 0).sum())
        if len(rows := read.left_out):
            counts.rows_taken_again += len(rows)
            again = self.source.again(rows).map(lambda tensor: tensor.cpu())
            ids, logprobs, offsets = _inserted((ids, logprobs, offsets), rows, again)
        # SGLang has written over the -inf of a sampled token that was taken again.
        lowest = np.finfo(np.float32).min if self.source.lowest is None else self.source.lowest
        logprobs = np.where(logprobs <= lowest, np.float32(-np.inf), logprobs)
        return RowSets(torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(offsets), problems)


_Flat: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]


def _inserted(sets: _Flat, rows: NDArray[np.intp], again: RowSets) -> _Flat:
    """`sets`, whose `rows` are empty, with theirs in place."""
    ids, logprobs, offsets = sets
    sizes = np.diff(offsets)
    at = np.repeat(offsets[rows], again.offsets.diff().numpy())
    sizes[rows] = again.offsets.diff().numpy()
    return (
        np.insert(ids, at, again.token_ids.numpy()),
        np.insert(logprobs, at, again.logprobs.numpy()),
        np.concatenate([[0], sizes.cumsum()]),
    )
