"""Which rows of this rank's hidden states score which response tokens: the one place that decides.

Hidden states, candidate sets, targets, old log-probs and loss masks all go through one `Rows`, so
they cannot come to lie against each other. The token at position `s + 1` of a sequence is scored by
the hidden state at `s`, wherever the context-parallel layout put that.

Words: a *response position* counts response tokens, sample after sample, over the whole micro-batch;
candidate sets, response ids and masks, concatenated in that order, are indexed by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp._tensors import to_numpy
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.parallel import reduce_sum

__all__ = ["Layout", "Rows", "counted"]

Int64Array: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How a micro-batch of sequences lies in the hidden states of one context-parallel rank.

    ::

        thd   sequences packed one after the other: hidden is [tokens, H]
        bshd  one row per sequence, padded at its end: hidden is [B, S, H]

        zigzag      each sequence (thd) or row (bshd) is cut into 2 * cp_size chunks of equal length; rank r
                    holds chunks r and 2 * cp_size - 1 - r, in this order
        contiguous  the whole packed stream (thd) or each row (bshd) is cut into cp_size equal parts; rank r
                    holds part r

    Args:
        format: "thd" or "bshd".
        split: what context parallelism does; of no meaning for `cp_size` 1.
        cp_size, cp_rank: the context-parallel group.
        sequence_multiple: thd: each sequence is padded to a multiple of this; zigzag pads to a multiple
            of `2 * cp_size` in any case.
        padded_length: tokens before the split, where more padding follows: thd, of the whole stream
            (zigzag: `cp_size` times what one rank holds); bshd, of one row. By default as few as fit.
    """

    format: Literal["thd", "bshd"] = "thd"
    split: Literal["zigzag", "contiguous"] = "zigzag"
    cp_size: int = 1
    cp_rank: int = 0
    sequence_multiple: int = 1
    padded_length: int | None = None

    def __post_init__(self) -> None:
        if self.format not in ("thd", "bshd"):
            raise InvalidInputError(f"format: got {self.format!r}, expected 'thd' or 'bshd'")
        if self.split not in ("zigzag", "contiguous"):
            raise InvalidInputError(f"split: got {self.split!r}, expected 'zigzag' or 'contiguous'")
        if self.cp_size < 1 or not 0 <= self.cp_rank < self.cp_size:
            raise InvalidInputError(
                f"got cp_size={self.cp_size}, cp_rank={self.cp_rank}; expected 0 <= cp_rank < cp_size"
            )
        if self.sequence_multiple < 1:
            raise InvalidInputError(f"sequence_multiple: got {self.sequence_multiple}, expected 1 or more")

    def rows(
        self,
        prompt_lengths: ArrayLike,
        response_lengths: ArrayLike,
        *,
        loss_mask: ArrayLike | None = None,
    ) -> Rows:
        """The rows of this rank that score a response token, and which token each scores.

        A response's first token has no row where the prompt is empty: nothing precedes it, so no rank
        scores it (`Rows.scored` is False there).

        Args:
            prompt_lengths, response_lengths: integers [B], 0 or more.
            loss_mask: [sum of response lengths], samples concatenated; rows whose mask is 0 or False
                are left out.

        Raises:
            InvalidInputError: lengths are negative or of different number, the mask is not numbers or
                its length is not their sum, or `padded_length` does not hold them or does not divide.
        """
        prompts, responses = (
            _lengths("prompt_lengths", prompt_lengths),
            _lengths("response_lengths", response_lengths),
        )
        if len(prompts) != len(responses):
            raise InvalidInputError(
                f"response_lengths: got {len(responses)} for {len(prompts)} prompt_lengths"
            )
        num_positions = int(responses.sum())
        sample = np.repeat(np.arange(len(responses)), responses)
        position = np.arange(num_positions)
        within_response = position - np.repeat(np.cumsum(responses) - responses, responses)
        token = prompts[sample] + within_response - 1  # the one before the token that is scored

        scored = token >= 0
        if loss_mask is not None:
            scored &= counted(loss_mask, num_positions)
        owner, row, num_rows = self._place(prompts + responses, sample[scored], token[scored])
        mine = owner == self.cp_rank
        num_sequences = len(prompts) if self.format == "bshd" else 1
        return Rows(row[mine], position[scored][mine], num_rows, num_sequences, responses, scored)

    def _place(
        self, lengths: Int64Array, sample: Int64Array, token: Int64Array
    ) -> tuple[Int64Array, Int64Array, int]:
        """The rank that holds each token, its row there, and how many rows each rank has."""
        zigzag = self.split == "zigzag" and self.cp_size > 1
        multiple = 2 * self.cp_size if zigzag else 1
        if self.format == "bshd":
            width = self._padded(int(lengths.max(initial=0)), multiple if zigzag else self.cp_size)
            padded = np.full(len(lengths), width)
            num_rows = len(lengths) * width // self.cp_size
        else:
            multiple = int(np.lcm(multiple, self.sequence_multiple))
            padded = -(-lengths // multiple) * multiple
            num_rows = self._padded(int(padded.sum()), self.cp_size) // self.cp_size
        first = np.cumsum(padded) - padded  # of each sequence, in the stream before the split

        if zigzag:
            chunk = padded[sample] // (2 * self.cp_size)
            number, inside = np.divmod(token, chunk)
            owner = np.where(number < self.cp_size, number, 2 * self.cp_size - 1 - number)
            return (
                owner,
                first[sample] // self.cp_size + np.where(number < self.cp_size, 0, chunk) + inside,
                num_rows,
            )
        if self.format == "bshd":
            part = padded[sample] // self.cp_size
            owner, inside = np.divmod(token, part)
            return owner, sample * part + inside, num_rows
        owner, row = np.divmod(first[sample] + token, max(num_rows, 1))
        return owner, row, num_rows

    def _padded(self, needed: int, multiple: int) -> int:
        if self.padded_length is None:
            return -(-needed // multiple) * multiple
        if self.padded_length < needed or self.padded_length % multiple:
            raise InvalidInputError(
                f"padded_length: got {self.padded_length}, expected at least {needed}"
                f" and a multiple of {multiple}"
            )
        return self.padded_length


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows of this rank's hidden states, and the response position that each scores.

    Attributes:
        hidden_rows: int64 [R], into the rank's hidden states as `[num_hidden_rows, H]`.
        positions: int64 [R], ascending, into the response positions of the micro-batch.
        num_hidden_rows: what the layout says this rank holds.
        num_sequences: how many rows of tokens they lie in: B for bshd, 1 for thd.
        response_lengths: int64 [B], what the response positions are cut into.
        scored: bool [response positions], those that some rank scores; the same on every rank.
    """

    hidden_rows: Int64Array
    positions: Int64Array
    num_hidden_rows: int
    num_sequences: int
    response_lengths: Int64Array
    scored: NDArray[np.bool_]

    def __len__(self) -> int:
        """Number of rows R."""
        return len(self.positions)

    def select(self, hidden: Tensor) -> Tensor:
        """The rows of `hidden` to [R, H]; differentiable, zeros flow to the rest.

        Args:
            hidden: [num_hidden_rows, H], or with the sequences as an axis of their own: [B, S, H] for bshd,
                [1, tokens, H] or [tokens, 1, H] for thd.

        Raises:
            InvalidInputError: `hidden` is not as the layout says.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        if len(flat) != self.num_hidden_rows:
            raise InvalidInputError(
                f"hidden: got shape {tuple(hidden.shape)}, {len(flat)} rows; by the layout this rank holds"
                f" {self.num_hidden_rows}"
            )
        # [S, B, H], which some trainers hold, has as many rows in another order.
        axes = [length for length in hidden.shape[:-1] if length != 1]
        if len(axes) > 1 and axes[0] != self.num_sequences:
            raise InvalidInputError(
                f"hidden: got shape {tuple(hidden.shape)}; by the layout its first axis counts"
                f" {self.num_sequences} sequences"
            )
        return flat.index_select(0, torch.tensor(self.hidden_rows, device=hidden.device))

    def take(self, values: Tensor) -> Tensor:
        """This rank's part of one value per response position: ids, old log-probs, advantages, masks.

        Raises:
            InvalidInputError: there is not one value per response position.
        """
        self._check_length("values", len(values))
        return values.index_select(0, torch.tensor(self.positions, device=values.device))

    def take_sets(self, candidates: CandidateSets | Sequence[CandidateSets]) -> CandidateSets:
        """This rank's part of the candidate sets, given whole or sample by sample.

        Raises:
            InvalidInputError: there is not one set per response position, of each sample.
        """
        if not isinstance(candidates, CandidateSets):
            self._check_samples(candidates)
            candidates = CandidateSets.concat(candidates)
        self._check_length("candidates", len(candidates))
        return candidates.take(self.positions)

    def scatter(self, values: Tensor, cp_group: dist.ProcessGroup | None = None) -> Tensor:
        """Put [R] values at their response positions, zeros elsewhere; with a group, those of all ranks.

        Differentiable. The backward sends nothing: it expects the same incoming gradient on every
        rank, which a loss computed alike on every rank gives, and hands each row its own.

        Raises:
            InvalidInputError: there is not one value per row.
        """
        if values.shape != (len(self),):
            raise InvalidInputError(f"values: got shape {tuple(values.shape)}, expected [{len(self)}]")
        index = torch.tensor(self.positions, device=values.device)
        result: Tensor = _Scatter.apply(values, index, len(self.scored), cp_group)
        return result

    def _check_samples(self, candidates: Sequence[CandidateSets]) -> None:
        if len(candidates) != len(self.response_lengths):
            raise InvalidInputError(
                f"candidates: got {len(candidates)} samples, expected {len(self.response_lengths)}"
            )
        for sample, (sets, length) in enumerate(zip(candidates, self.response_lengths, strict=True)):
            if len(sets) != length:
                raise InvalidInputError(
                    f"candidates: got {len(sets)} positions for sample {sample}, whose response has {length}"
                )

    def _check_length(self, name: str, length: int) -> None:
        if length != len(self.scored):
            raise InvalidInputError(
                f"{name}: got {length}, expected one per response position, {len(self.scored)}"
            )


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values_R: Tensor, index_R: Tensor, length: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(index_R)
        return reduce_sum(values_R.new_zeros(length).index_copy_(0, index_R, values_R), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index_R,) = ctx.saved_tensors
        return grad.index_select(0, index_R), None, None, None


def counted(loss_mask: ArrayLike, num_positions: int) -> NDArray[np.bool_]:
    """bool [num_positions]: where the mask is not 0 or False.

    Raises:
        InvalidInputError: the mask is not one number per position.
    """
    mask: NDArray[Any] = to_numpy(loss_mask)
    if mask.shape != (num_positions,):
        raise InvalidInputError(
            f"loss_mask: got shape {mask.shape}, expected [{num_positions}], one per response position"
        )
    # Anything else is "not 0": None, NaN, the text "0".
    if mask.size and (mask.dtype.kind not in "biuf" or np.isnan(mask).any()):
        raise InvalidInputError(f"loss_mask: got dtype {mask.dtype} or a NaN, expected numbers")
    return mask.astype(np.bool_)


def _lengths(name: str, lengths: ArrayLike) -> Int64Array:
    array = to_numpy(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInputError(
            f"{name}: got shape {array.shape} and dtype {array.dtype}, expected integers [B]"
        )
    if (array < 0).any():
        raise InvalidInputError(f"{name}: got {array.min()}, expected 0 or more")
    return array.astype(np.int64)
