"""Select the rows of this rank's hidden states that predict response tokens.

Hidden states, candidate sets, targets, old log-probs, and loss masks all go through one `RowSelection`, so
they stay aligned. The hidden state at position `s` of a sequence scores the token at `s + 1`. The rank that
holds the hidden state computes the score, even if another context-parallel rank holds the token.

A *response position* is a token's index among the response tokens of all samples, concatenated in order.
The concatenated candidate sets, response ids, and masks have one entry per response position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import Int64Array, first_true, integer_array, offsets_of
from sglang_topp.candidates.torch_tensors import to_device, to_numpy
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import reduce_sum


@dataclass(frozen=True)
class Layout:
    """The layout of a micro-batch's tokens in the hidden states of one context-parallel rank.

    ::

        packed  sequences one after the other, each padded at its end: hidden is [tokens, H] ("thd")
        padded  one row per sequence, with an attention mask: hidden is [B, S, H] ("bshd")

        zigzag      each sequence or row is cut into 2 * cp_size chunks of equal length; rank r holds chunks r
                    and 2 * cp_size - 1 - r, in this order
        contiguous  the whole packed stream or each row is cut into cp_size equal parts; rank r holds part r

    The lengths of sequences do not tell on which side rows are padded. If `select_rows` assumed the wrong
    side, the selected hidden states would be wrong but have the right shape, so no check would find the
    mistake. `select_rows` therefore reads each row's padding from the mask.

    Args:
        split: how context parallelism splits the sequences; ignored for `cp_size` 1.
        cp_size, cp_rank: the size of the context-parallel group, and this rank's index in it.
        attention_mask: [B, S] for padded rows, 0 on padding, or None for packed sequences. Pass the whole
            mask of the forward pass, such as `sglang_topp.batch.collate_rl` returns, and not one
            context-parallel rank's part of it. A row's tokens must be one run.
        cu_seqlens: packed only. The `cu_seqlens` of the forward pass, padding included: the first token of
            each sequence in the whole packed stream before the split, followed by the stream's length.
            Sequences after those of the samples hold padding. With the zigzag split and `cp_size` above 1,
            each sequence's padded length is a multiple of `2 * cp_size`. The default is for a stream with no
            more padding than `split` and `cp_size` require. A `PackedBatch` has the
            layout of each row.
        seq_lengths: packed only. The number of tokens of each sample, without padding, or None. `select_rows`
            refuses samples of other lengths, such as those of another row.

    Raises:
        InvalidInputError: an argument is not valid, or context parallelism cannot split the lengths evenly.
    """

    split: Literal["zigzag", "contiguous"] = "zigzag"
    cp_size: int = 1
    cp_rank: int = 0
    attention_mask: ArrayLike | None = None
    cu_seqlens: Sequence[int] | Tensor | None = None
    seq_lengths: Sequence[int] | Tensor | None = None

    def __post_init__(self) -> None:
        if self.split not in ("zigzag", "contiguous"):
            raise InvalidInputError(f"split: got {self.split!r}, expected 'zigzag' or 'contiguous'")
        if self.cp_size < 1 or not 0 <= self.cp_rank < self.cp_size:
            raise InvalidInputError(
                f"got cp_size={self.cp_size}, cp_rank={self.cp_rank}; expected 0 <= cp_rank < cp_size"
            )
        for name in ("cu_seqlens", "seq_lengths"):
            if getattr(self, name) is not None:
                if self.attention_mask is not None:
                    raise InvalidInputError(
                        f"{name}: got {getattr(self, name)} with an attention_mask, which shows the padding"
                        " of its rows; expected one of the two"
                    )
                object.__setattr__(self, name, tuple(_lengths(name, getattr(self, name)).tolist()))
        if self.cu_seqlens is not None:
            edges: list[int] = np.array(self.cu_seqlens).tolist()
            multiple = self._num_parts if self.split == "zigzag" else 1
            if not edges or edges[0] or edges != sorted(edges):
                raise InvalidInputError(
                    f"cu_seqlens: got {self.cu_seqlens}, expected to rise from 0 to the stream's length"
                )
            if math.gcd(*edges) % multiple or edges[-1] % self.cp_size:
                raise InvalidInputError(
                    f"cu_seqlens: got {self.cu_seqlens}, expected multiples of {multiple} that end in a"
                    f" multiple of {self.cp_size}, which {self.split} context parallelism over"
                    f" {self.cp_size} ranks can split"
                )

    def select_rows(
        self, prompt_lengths: ArrayLike, response_lengths: ArrayLike, *, loss_mask: ArrayLike | None = None
    ) -> RowSelection:
        """Find this rank's rows that predict response tokens, and the token that each row predicts.

        If a prompt is empty, no token precedes the first response token, so no row on any rank scores the
        first response token. `RowSelection.scored` is False for that token.

        Args:
            prompt_lengths, response_lengths: integers [B], 0 or more.
            loss_mask: [sum of response lengths], samples concatenated. The selection leaves out rows that
                score a token whose loss mask is 0 or False.

        Raises:
            InvalidInputError: a length is negative, or prompts and responses differ in number. A sample does
                not have as many tokens as its row of `attention_mask`, does not fit its sequence of
                `cu_seqlens`, or differs from `seq_lengths`. The loss mask does not hold exactly one number
                per response token.
        """
        prompts = _lengths("prompt_lengths", prompt_lengths)
        responses = _lengths("response_lengths", response_lengths)
        if len(prompts) != len(responses):
            raise InvalidInputError(
                f"response_lengths: got {len(responses)} for {len(prompts)} prompt_lengths"
            )
        lengths = prompts + responses
        if self.attention_mask is None:
            first, edges = self._stream(lengths)
        else:
            first, edges = self._rows(to_numpy(self.attention_mask), lengths)
        num_positions, ends = int(responses.sum()), np.cumsum(responses)
        position = np.arange(num_positions)
        # The index of the hidden state that scores the token, in its sample.
        token = position + np.repeat(prompts - 1 - (ends - responses), responses)
        scored = token >= 0
        if loss_mask is not None:
            scored &= as_bool_mask(loss_mask, num_positions)
        row = self._held_rows(edges)[(np.repeat(first, responses) + token)[scored]]
        mine, num_rows = row >= 0, int(edges[-1]) // self.cp_size
        num_sequences = 1 if self.attention_mask is None else len(prompts)
        return RowSelection(row[mine], position[scored][mine], num_rows, num_sequences, responses, scored)

    def take_tokens(self, values: Tensor) -> Tensor:
        """Select the values of the tokens that this rank holds, in the order of its hidden states.

        Args:
            values: [tokens, ...], one value per token of the packed stream that `cu_seqlens` describes, such
                as a row of `PackedBatch["sequences"]` or of its routed experts, up to its `row_lengths`.

        Raises:
            InvalidInputError: `cu_seqlens` is None, or there are more or fewer values.
        """
        if self.cu_seqlens is None:
            raise InvalidInputError("cu_seqlens: got None, expected those of the packed stream")
        rows = self._held_rows(np.array(self.cu_seqlens))
        if len(values) != len(rows):
            raise InvalidInputError(f"values: got {len(values)}, expected {len(rows)}, one per token")
        return values.index_select(0, to_device(np.flatnonzero(rows >= 0), values.device))

    def _rows(self, mask: NDArray[Any], lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return `(first, edges)` of the rows of `attention_mask`, one after the other.

        `first` [B] is where each sample begins, and row `b` is from `edges[b]` to `edges[b + 1] - 1`.
        """
        if mask.ndim != 2 or len(mask) != len(lengths) or mask.dtype.kind not in "biuf":
            raise InvalidInputError(
                f"attention_mask: got {mask.dtype} of shape {mask.shape}, expected numbers"
                f" [{len(lengths)}, columns]"
            )
        is_token = mask != 0
        num_tokens = is_token.sum(axis=1)
        if (i := first_true(num_tokens != lengths)) is not None:
            raise InvalidInputError(
                f"attention_mask: row {i} marks {num_tokens[i]} tokens, expected {lengths[i]}, its prompt and"
                " response"
            )
        begins = np.diff(np.pad(is_token, ((0, 0), (1, 1))).astype(np.int8), axis=1) == 1
        if (i := first_true(begins.sum(axis=1) > 1)) is not None:
            raise InvalidInputError(
                f"attention_mask: row {i} has padding between its tokens, expected one run of tokens"
            )
        width = mask.shape[1]
        if width % self._num_parts:
            raise InvalidInputError(
                f"attention_mask: got {width} columns, expected a multiple of {self._num_parts}, which"
                f" {self.split} context parallelism over {self.cp_size} ranks can split; pad the rows first"
            )
        edges = np.arange(len(lengths) + 1) * width
        return edges[:-1] + begins.argmax(axis=1), edges

    def _stream(self, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return `(first, edges)` of packed sequences, as `_rows` does."""
        if self.seq_lengths is not None and tuple(lengths.tolist()) != self.seq_lengths:
            raise InvalidInputError(
                f"prompt_lengths, response_lengths: got samples of {lengths.tolist()} tokens, expected"
                f" {list(self.seq_lengths)}, as in seq_lengths"
            )
        if self.cu_seqlens is None:
            multiple = self._num_parts if self.split == "zigzag" else 1
            edges = offsets_of(-(-lengths // multiple) * multiple)
            edges = np.append(edges, -(-edges[-1] // self.cp_size) * self.cp_size)
        else:
            edges = np.array(self.cu_seqlens)
        padded = np.diff(edges)[: len(lengths)]
        if len(padded) < len(lengths) or (lengths > padded).any():
            raise InvalidInputError(
                f"cu_seqlens: its sequences have {padded.tolist()} tokens, expected at least"
                f" {lengths.tolist()}, the samples' prompts and responses"
            )
        return edges[: len(lengths)], edges

    @property
    def _num_parts(self) -> int:
        """The number of equal parts that context parallelism cuts a sequence, a row, or the stream into."""
        return self.cp_size * (2 if self.split == "zigzag" and self.cp_size > 1 else 1)

    def _held_rows(self, edges: Int64Array) -> Int64Array:
        """Return int64 [edges[-1]]: each token's row on this rank, or -1 if another rank holds the token."""
        if self.attention_mask is None and self.split == "contiguous":
            edges = edges[[0, -1]]  # the whole stream is cut, not each sequence
        lengths, parts = np.diff(edges), self._num_parts
        column = np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)
        part = column // np.repeat(np.maximum(lengths // parts, 1), lengths)
        is_held = (part == self.cp_rank) | (part == 2 * self.cp_size - 1 - self.cp_rank)
        return np.where(is_held, np.cumsum(is_held) - 1, -1)


@dataclass(frozen=True, eq=False)
class RowSelection:
    """R rows of this rank's hidden states, and the response position that each row scores.

    Attributes:
        hidden_rows: int64 [R], row indices of the hidden states reshaped to `[num_hidden_rows, H]`.
        positions: int64 [R], the response position that each row scores, ascending.
        num_hidden_rows: the number of rows that this rank holds according to the layout.
        num_sequences: the length of the hidden states' batch axis: B for padded rows, 1 for packed.
        response_lengths: int64 [B], the number of response positions of each sample.
        scored: bool [response positions], True where any rank scores the position. `scored` is the same on
            every rank.
    """

    hidden_rows: Int64Array
    positions: Int64Array
    num_hidden_rows: int
    num_sequences: int
    response_lengths: Int64Array
    scored: NDArray[np.bool_]
    _indices: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """Return R, the number of selected rows of hidden states."""
        return len(self.positions)

    def select(self, hidden: Tensor) -> Tensor:
        """Return the selected rows of `hidden`, [R, H].

        The result is differentiable. Rows of `hidden` that are not selected get zero gradients.

        Args:
            hidden: [num_hidden_rows, H], or with a batch axis: [B, S, H] for padded rows, [1, tokens, H] or
                [tokens, 1, H] for packed sequences.

        Raises:
            InvalidInputError: the shape of `hidden` does not match the layout.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        if len(flat) != self.num_hidden_rows:
            raise InvalidInputError(
                f"hidden: got shape {tuple(hidden.shape)}, {len(flat)} rows; by the layout this rank holds"
                f" {self.num_hidden_rows}"
            )
        # Reject hidden states in the layout [S, B, H] of some trainers. [S, B, H] has as many rows as
        # [B, S, H], but in another order.
        axes = [length for length in hidden.shape[:-1] if length != 1]
        if len(axes) > 1 and axes[0] != self.num_sequences:
            raise InvalidInputError(
                f"hidden: got shape {tuple(hidden.shape)}; by the layout its first axis counts"
                f" {self.num_sequences} sequences"
            )
        return flat.index_select(0, self._on("hidden_rows", hidden.device))

    def take(self, values: Tensor) -> Tensor:
        """Select the elements of `values` at the response positions that this rank scores.

        `values` has one element per response position of the micro-batch, such as a token id, an
        advantage, or a mask value.

        Raises:
            InvalidInputError: the number of values differs from the number of response positions.
        """
        self._check_length("values", len(values))
        return values.index_select(0, self._on("positions", values.device))

    def take_sets(self, candidates: CandidateSets | Sequence[CandidateSets]) -> CandidateSets:
        """Select the candidate sets of the response positions that this rank scores.

        `candidates` is one `CandidateSets` for all samples, or a sequence with one `CandidateSets` per
        sample.

        Raises:
            InvalidInputError: the sequence does not have one entry per sample. Or the number of sets differs
                from the number of response positions, in total or in one sample.
        """
        if not isinstance(candidates, CandidateSets):
            lengths, expected = [len(sets) for sets in candidates], self.response_lengths.tolist()
            if lengths != expected:
                raise InvalidInputError(
                    f"candidates: got samples of {lengths} positions, expected {expected}, as the responses"
                )
            candidates = CandidateSets.concat(candidates)
        self._check_length("candidates", len(candidates))
        return candidates.take(self.positions)

    def scatter(self, values: Tensor, cp_group: dist.ProcessGroup | None = None) -> Tensor:
        """Put the R values at their response positions in a zero tensor, and sum the tensor over `cp_group`.

        The result is differentiable. The backward pass needs no communication, because each rank reads the
        gradients of its own rows from its incoming gradient. The incoming gradient must therefore be the same
        on every rank. This condition holds if all ranks compute the same loss.

        Raises:
            InvalidInputError: the number of values differs from the number of selected rows.
        """
        if values.shape != (len(self),):
            raise InvalidInputError(f"values: got shape {tuple(values.shape)}, expected [{len(self)}]")
        index = self._on("positions", values.device)
        everywhere = values.new_zeros(len(self.scored))
        if cp_group is not None:
            everywhere = reduce_sum(everywhere.index_copy(0, index, values.detach()), cp_group)
        # No other rank scores these positions, so their sums are `values`, through which the gradient flows.
        return everywhere.index_copy(0, index, values)

    def _on(self, name: str, device: torch.device) -> Tensor:
        """Return one of the index arrays on `device`. The first call copies it, without waiting."""
        if (name, device) not in self._indices:
            # Autograd cannot save inference tensors, and a later call may need a gradient.
            with torch.inference_mode(False):
                self._indices[name, device] = to_device(getattr(self, name), device)
        return self._indices[name, device]

    def _check_length(self, name: str, length: int) -> None:
        if length != len(self.scored):
            raise InvalidInputError(
                f"{name}: got {length}, expected one per response position, {len(self.scored)}"
            )


def as_bool_mask(loss_mask: ArrayLike, num_positions: int) -> NDArray[np.bool_]:
    """Return bool [num_positions], which is True where the loss mask is neither 0 nor False.

    Raises:
        InvalidInputError: the mask does not hold exactly one number per position.
    """
    mask: NDArray[Any] = to_numpy(loss_mask)
    if mask.shape != (num_positions,):
        raise InvalidInputError(
            f"loss_mask: got shape {mask.shape}, expected [{num_positions}], one per response position"
        )
    # Refuse NaN and everything that is not a number, because `astype` below would convert NaN and the text
    # "0" to True, and None to False.
    if mask.size and (mask.dtype.kind not in "biuf" or np.isnan(mask).any()):
        raise InvalidInputError(f"loss_mask: got dtype {mask.dtype} or a NaN, expected numbers")
    return mask.astype(np.bool_)


def _lengths(name: str, lengths: ArrayLike) -> Int64Array:
    array = integer_array(name, lengths, "integers [B]")
    if (array < 0).any():
        raise InvalidInputError(f"{name}: got {array.min()}, expected 0 or more")
    return array.astype(np.int64)
