"""`PackedCollator`: pack several samples into each row, for variable-length attention.

A scored field has one value per response token: a loss mask, a reward, a log-prob, or a candidate set. The
collator writes a token's value to the column whose logits predict the token, one column before the token
itself. The loss can therefore combine scored fields and logits at equal indices. The last column of each
sample predicts no token of the sample, so scored fields are 0 or empty there. If a sample's length must be a
multiple of some number, the sample is padded. The columns after the last sample of a row are padding too.

Example of one row of 10 columns, in which the length of a sample is a multiple of 2. `p` marks tokens of a
prompt, `r` marks tokens of a response and their values, and `.` marks padding and empty values::

                   first sample         second   rest of the row
    sequences      p0 p1 r0 r1 r2 .  |  p0 r0  |  .  .
    scored field   .  r0 r1 r2 .  .  |  r0 .   |  .  .

`tests/batch/reference_loops.py` has slow versions, `pack_rl` and `pack_sft`, which define the results.

Shape legend: B samples; L_i tokens in sample i, P_i in its prompt and R_i in its response; N rows of W
columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets
from sglang_topp.batch.bin_packing import deal_bins
from sglang_topp.batch.sample_validation import (
    RolloutLike,
    Rollouts,
    check_sets_match_responses,
    read_examples,
    read_rollouts,
    rollout_columns,
)
from sglang_topp.batch.write_ragged_rows import RaggedRows, as_integer, field_dtype, write_row
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.row_selection import Layout

__all__ = ["PackedBatch", "PackedCollator"]


class PackedBatch(TypedDict):
    """The batch that `PackedCollator` returns: CPU tensors of N rows and W columns, and lists of N tensors.

    Data-parallel rank d trains on the rows from `d * N / dp_size` to `(d + 1) * N / dp_size - 1`. Each row is
    a micro-batch. An RL batch also has one entry for each of the caller's `fields`: int64 or float32 [N, W].
    Such an entry holds a token's value in the column whose logits predict the token, one column before the
    token itself.
    """

    sequences: torch.Tensor
    """int64 [N, W], `pad_token_id` on padding."""
    attention_mask: torch.Tensor
    """int64 [N, W], 1 on tokens. A row without samples has a 1 in its first column."""
    position_ids: torch.Tensor
    """int64 [N, W], each token's position in its sample, counted from 0. Padding has position 0."""
    loss_mask: torch.Tensor
    """float32 [N, W]: each token's loss mask, in the column that predicts the token. An RL mask holds
    zeros and ones. An SFT mask is divided by its sum over the whole batch, so that the sum of `loss * mask`
    over the batch is the mean loss of the trained tokens."""
    row_lengths: torch.Tensor
    """int64 [N]: the number of columns to compute in each row. With pipeline parallelism, each of these
    numbers is W."""
    cu_seqlens: list[torch.Tensor]
    """For each row, int32 [samples + 1]: the first column of each sample, followed by the row's length. Each
    sequence of `cu_seqlens` includes the padding after its sample, and the last one also the padding at the
    row's end. A row without samples has one sequence, which consists of padding."""
    seq_lengths: list[torch.Tensor]
    """For each row, int32 [samples]: the number of tokens of each sample, without padding. For a row without
    samples, int32 [1]: the number 1."""
    samples: list[torch.Tensor]
    """For each row, int64 [samples]: the indices of the row's samples, in order."""
    response_mask: NotRequired[torch.Tensor]
    """RL only: int64 [N, W], 1 in the columns that predict response tokens."""
    rewards: NotRequired[torch.Tensor]
    """RL only: float32 [N, W], each token's reward, in the column that predicts the token."""
    logprobs: NotRequired[torch.Tensor]
    """RL only: float32 [N, W], each token's log-prob, in the column that predicts the token. Present only if
    log-probs were passed."""
    candidates: NotRequired[BatchCandidateSets]
    """RL only: N rows of W positions. A position has a candidate set if its column predicts a sampled token.
    Present only if candidate sets were passed."""


@dataclass(frozen=True)
class _Packing:
    """The place of every sample: sample `order[k]` starts in row `rows[k]` at column `starts[k]`.

    `order` lists the samples row by row. `lengths` holds each sample's number of tokens, in the caller's
    order.
    """

    order: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_rows: int
    width: int
    row_lengths: NDArray[np.int64]

    def gaps(self) -> NDArray[np.int64]:
        """Find the elements that no sample covers, and return their indices in the flattened [N, W] field."""
        first = self.rows * self.width + self.starts
        stop = first + self.lengths[self.order]
        sizes = np.append(first[1:], self.num_rows * self.width) - stop
        before = np.cumsum(sizes) - sizes
        return np.repeat(stop - before, sizes) + np.arange(sizes.sum())

    def spans(self, skip: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Return one tuple `(i, first, stop)` per sample i: a slice of a flattened [N, W] field.

        The slice `first:stop` begins `skip[i]` elements after the first element of sample i, and has
        `lengths[i]` elements.
        """
        first = self.rows * self.width + self.starts + skip[self.order]
        stop = first + lengths[self.order]
        return list(zip(self.order.tolist(), first.tolist(), stop.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """A collator that packs samples into rows of at most `max_tokens` columns.

    `bin_packing.deal_bins` assigns the samples to rows by the samples' padded lengths.

    Args:
        max_tokens: the maximum number of columns in a row, including alignment padding.
        pad_token_id: fills `sequences` between and after samples.
        dp_size: the number of data-parallel ranks. The number of rows is a multiple of `dp_size`, and each
            rank gets about the same number of tokens.
        tp_size: the number of tensor-parallel ranks. Every sample is padded to a multiple of `tp_size`, as
            sequence parallelism requires.
        cp_size: the number of context-parallel ranks. If `cp_size` is above 1, every sample is padded to a
            multiple of `2 * cp_size * tp_size`, because each rank takes two zigzag chunks.
        pp_size: the number of pipeline stages. If `pp_size` is above 1, all rows have the same length
            (`row_lengths`).
        fp8_multiple: each tensor-parallel or context-parallel rank gets a multiple of `fp8_multiple` tokens
            of every row, as FP8 GEMMs require. Pass 16 with per-tensor scaling, 32 with MXFP8, 128 with block
            scaling, and 1 without FP8. For FP8, the collator pads each row of the batch, but not each sample.

    Raises:
        InvalidInputError: an argument is not an integer, a size is below 1, or `max_tokens` is below
            `row_multiple`.
    """

    max_tokens: int
    pad_token_id: int
    dp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    fp8_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "pad_token_id"):
            as_integer(name, getattr(self, name))
        for name in ("dp_size", "tp_size", "cp_size", "pp_size", "fp8_multiple"):
            if (value := as_integer(name, getattr(self, name))) < 1:
                raise InvalidInputError(f"{name}: got {value}, expected 1 or more")
        if self.max_tokens < self.row_multiple:
            raise InvalidInputError(
                f"max_tokens: got {self.max_tokens}, expected at least {self.row_multiple}, one aligned row"
            )

    @property
    def sequence_multiple(self) -> int:
        """Every sample is padded to a multiple of this number of columns."""
        return self.tp_size * (2 * self.cp_size if self.cp_size > 1 else 1)

    @property
    def row_multiple(self) -> int:
        """Every row is padded to a multiple of this number of columns."""
        return self.fp8_multiple * self.sequence_multiple

    def layout(self, batch: PackedBatch, row: int, cp_rank: int = 0) -> Layout:
        """Return the layout of a row's hidden states on one context-parallel rank.

        `Layout.select_rows` takes the prompt and response lengths of the row's samples, in the order of
        `batch["samples"][row]`. It refuses samples of other lengths.
        """
        lengths = batch["seq_lengths"][row][: len(batch["samples"][row])]
        return Layout(
            cp_size=self.cp_size, cp_rank=cp_rank, cu_seqlens=batch["cu_seqlens"][row], seq_lengths=lengths
        )

    def collate_sft(
        self, input_ids: RaggedRows, num_actions: Sequence[int], loss_masks: RaggedRows | None = None
    ) -> PackedBatch:
        """Pack supervised examples. The arguments are those of `sglang_topp.batch.collate_sft`.

        Raises:
            InvalidInputError: an argument is invalid (see `sglang_topp.batch.collate_sft`), a sample is
                empty, or a sample is longer than `max_tokens` after alignment.
        """
        examples = read_examples(input_ids, num_actions, loss_masks)
        packing = self._pack("input_ids", examples.lengths)
        whole = packing.spans(np.zeros_like(examples.lengths), examples.lengths)
        batch, sequences = self._common(packing, whole)
        for i, first, stop in whole:
            write_row(sequences[first:stop], examples.ids[i], "input_ids", i)
        losses = batch["loss_mask"].numpy()
        flat = losses.reshape(-1)
        for i, _, stop in whole:
            mask = examples.loss_masks[i]
            flat[stop - 1 - len(mask) : stop - 1] = mask
        losses *= 1 / max(1, int(np.count_nonzero(flat)))
        return batch

    def collate_rl(
        self,
        prompts: RaggedRows,
        responses: RaggedRows,
        rewards: RaggedRows,
        loss_masks: RaggedRows,
        logprobs: RaggedRows | None = None,
        candidates: Sequence[CandidateSets] | None = None,
        *,
        fields: Mapping[str, RaggedRows] | None = None,
    ) -> PackedBatch:
        """Pack rollouts. The arguments are those of `sglang_topp.batch.collate_rl`.

        Raises:
            InvalidInputError: an argument is invalid (see `sglang_topp.batch.collate_rl`), a sample is empty,
                or a sample is longer than `max_tokens` after alignment.
        """
        samples = read_rollouts(
            prompts, responses, rewards, loss_masks, logprobs, candidates, fields, PackedBatch.__annotations__
        )
        return self._pack_rollouts(samples)

    def collate_rollouts(
        self,
        rollouts: Sequence[RolloutLike],
        rewards: Sequence[Any],
        *,
        candidates: Sequence[CandidateSets] | None = None,
        fields: Mapping[str, RaggedRows] | None = None,
    ) -> PackedBatch:
        """Pack a client's `Rollout` objects. The arguments are those of `sglang_topp.batch.collate_rollouts`.

        Raises:
            InvalidInputError: an argument is invalid (see `sglang_topp.batch.collate_rollouts`), a sample is
                empty, or a sample is longer than `max_tokens` after alignment.
        """
        columns = rollout_columns(rollouts, rewards, candidates)
        samples = read_rollouts(**columns, fields=fields, own_names=PackedBatch.__annotations__)
        return self._pack_rollouts(samples)

    def _pack_rollouts(self, samples: Rollouts) -> PackedBatch:
        prompt_lengths, lengths = samples.prompt_lengths, samples.response_lengths
        packing = self._pack("prompts", prompt_lengths + lengths)
        nothing = np.zeros_like(prompt_lengths)
        batch, sequences = self._common(packing, packing.spans(nothing, packing.lengths))
        for i, first, stop in packing.spans(nothing, prompt_lengths):
            write_row(sequences[first:stop], samples.prompts[i], "prompts", i)
        scored = packing.spans(prompt_lengths - 1, lengths)
        for i, first, stop in scored:
            write_row(sequences[first + 1 : stop + 1], samples.responses[i], "responses", i)
        if samples.candidates is not None:
            ids = np.empty(lengths.sum(), np.int64)
            ends = np.cumsum(lengths).tolist()
            for i, first, stop in scored:
                ids[ends[i] - (stop - first) : ends[i]] = sequences[first + 1 : stop + 1]
            check_sets_match_responses(samples.candidates, ids, samples.loss_masks)
            batch["candidates"] = samples.candidates.take(packing.order).place(
                packing.rows,
                packing.starts + prompt_lengths[packing.order] - 1,
                (packing.num_rows, packing.width),
            )

        shape = (packing.num_rows, packing.width)
        response_mask = np.zeros(shape, np.int64)
        flat_mask = response_mask.reshape(-1)
        for _, first, stop in scored:
            flat_mask[first:stop] = 1
        batch["response_mask"] = torch.from_numpy(response_mask)
        losses = batch["loss_mask"].numpy().reshape(-1)
        for i, first, stop in scored:
            losses[first:stop] = samples.loss_masks[i]

        def place(name: str, rows: RaggedRows, dtype: DTypeLike = np.float32) -> torch.Tensor:
            out = np.zeros(shape, dtype)
            flat = out.reshape(-1)
            for i, first, stop in scored:
                write_row(flat[first:stop], rows[i], name, i)
            return torch.from_numpy(out)

        batch["rewards"] = place("rewards", samples.rewards)
        if samples.logprobs is not None:
            batch["logprobs"] = place("logprobs", samples.logprobs)
        for name, rows in samples.fields.items():
            cast(dict[str, Any], batch)[name] = place(name, rows, field_dtype(rows))
        return batch

    def _pack(self, name: str, lengths: NDArray[np.int64]) -> _Packing:
        if (empty := np.flatnonzero(lengths == 0)).size:
            raise InvalidInputError(f"{name}[{empty[0]}]: is empty, expected at least one token to pack")
        footprints = _round_up(lengths, self.sequence_multiple)
        capacity = self.max_tokens // self.row_multiple * self.row_multiple
        shards = deal_bins(footprints, capacity, self.dp_size)
        bins = [members for shard in shards for members in shard]
        counts = np.array([len(members) for members in bins])
        order = np.concatenate([np.array(members, np.int64) for members in bins])
        rows = np.repeat(np.arange(len(bins)), counts)
        ends = np.cumsum(footprints[order])
        # `before[row]` is the number of columns that samples take in all rows before `row`.
        before = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
        starts = ends - footprints[order] - before[rows]
        filled = np.bincount(rows, weights=footprints[order], minlength=len(bins)).astype(np.int64)
        row_lengths = _round_up(np.maximum(filled, 1), self.row_multiple)
        width = int(row_lengths.max())
        if self.pp_size > 1:
            row_lengths[:] = width
        return _Packing(order, rows, starts, lengths, len(bins), width, row_lengths)

    def _common(
        self, packing: _Packing, spans: list[tuple[int, int, int]]
    ) -> tuple[PackedBatch, NDArray[np.int64]]:
        """Return the fields that all packed batches have, and a flat view of `sequences`.

        `sequences` does not contain the samples' tokens yet. The caller writes the tokens to the flat view.
        """
        shape, gaps = (packing.num_rows, packing.width), packing.gaps()
        # Samples cover nearly all columns of the packed rows. To halve the memory traffic, write the padding
        # values only to the columns that no sample covers.
        sequences, position_ids = np.empty(shape, np.int64), np.empty(shape, np.int64)
        attention_mask = np.ones(shape, np.int64)
        sequences.reshape(-1)[gaps] = self.pad_token_id
        attention_mask.reshape(-1)[gaps] = 0
        flat_positions, count = position_ids.reshape(-1), np.arange(packing.lengths.max())
        flat_positions[gaps] = 0
        for _, first, stop in spans:
            flat_positions[first:stop] = count[: stop - first]

        edges = np.searchsorted(packing.rows, np.arange(packing.num_rows + 1)).tolist()
        cu_seqlens, seq_lengths, samples = [], [], []
        for row, total in enumerate(packing.row_lengths.tolist()):
            span = slice(edges[row], edges[row + 1])
            members, starts = packing.order[span], packing.starts[span]
            lengths = packing.lengths[members]
            if not len(members):
                # A row without samples gets one padding token as its sequence, so that attention returns
                # finite values.
                attention_mask[row, 0] = 1
                starts, lengths = np.zeros(1, np.int64), np.ones(1, np.int64)
            cu_seqlens.append(torch.from_numpy(np.append(starts, total).astype(np.int32)))
            seq_lengths.append(torch.from_numpy(lengths.astype(np.int32)))
            samples.append(torch.from_numpy(members.copy()))
        batch: PackedBatch = {
            "sequences": torch.from_numpy(sequences),
            "attention_mask": torch.from_numpy(attention_mask),
            "position_ids": torch.from_numpy(position_ids),
            "loss_mask": torch.from_numpy(np.zeros(shape, np.float32)),
            "row_lengths": torch.from_numpy(packing.row_lengths),
            "cu_seqlens": cu_seqlens,
            "seq_lengths": seq_lengths,
            "samples": samples,
        }
        return batch, sequences.reshape(-1)


def _round_up(values: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    return -(-values // multiple) * multiple
