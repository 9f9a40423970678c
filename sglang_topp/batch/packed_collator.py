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
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets
from sglang_topp.batch.collate import read_examples, rollout_columns, sample_lengths, write_samples
from sglang_topp.batch.micro_batches import deal_bins
from sglang_topp.batch.ragged_rows import RaggedRows, as_integer, write_rows
from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import first_true, offsets_of
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.row_selection import Layout


class PackedBatch(TypedDict):
    """The batch that `PackedCollator` returns: CPU tensors of N rows and W columns, and lists of N tensors.

    Data-parallel rank d trains on the rows from `d * N / dp_size` to `(d + 1) * N / dp_size - 1`. Each row is
    a micro-batch. An RL batch also has one entry for each of the caller's `fields`: int64 or float32 [N, W].
    Such an entry holds a token's value in the column whose logits predict the token, one column before the
    token itself. Each of the caller's `sequence_fields`, [N, W, ...], is in the columns of `sequences`.
    `Layout.take_tokens` cuts out a context-parallel rank's part.
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
    layouts: list[Layout]
    """For each row, the layout of its hidden states on context-parallel rank 0. On rank r, use
    `dataclasses.replace(layout, cp_rank=r)`. `Layout.select_rows` takes the prompt and response lengths of
    the row's samples, in the order of `samples`, and refuses samples of other lengths."""
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


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """A collator that packs samples into rows of at most `max_tokens` columns.

    `deal_bins` of `micro_batches.py` assigns the samples to rows by the samples' padded lengths.

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

    def collate_sft(
        self, input_ids: RaggedRows, num_actions: Sequence[int], loss_masks: RaggedRows | None = None
    ) -> PackedBatch:
        """Pack supervised examples. The arguments are those of `sglang_topp.batch.collate_sft`.

        Raises:
            InvalidInputError: an argument is invalid (see `sglang_topp.batch.collate_sft`), a sample is
                empty, or a sample is longer than `max_tokens` after alignment.
        """
        ids, masks, lengths, mask_lengths = read_examples(input_ids, num_actions, loss_masks)
        batch, first = self._pack("input_ids", lengths)
        write_rows("input_ids", ids, first, batch["sequences"].numpy())
        losses = write_rows(
            "loss_masks", masks, first + lengths - 1 - mask_lengths, batch["loss_mask"].numpy()
        )
        losses *= 1 / max(1, int(np.count_nonzero(losses.view(np.int32))))
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
        sequence_fields: Mapping[str, RaggedRows] | None = None,
    ) -> PackedBatch:
        """Pack rollouts. The arguments are those of `sglang_topp.batch.collate_rl`.

        Raises:
            InvalidInputError: an argument is invalid (see `sglang_topp.batch.collate_rl`), a sample is empty,
                or a sample is longer than `max_tokens` after alignment.
        """
        prompt_lengths, lengths = sample_lengths(prompts, responses)
        batch, first = self._pack("prompts", prompt_lengths + lengths)
        start, shape = first + prompt_lengths - 1, batch["sequences"].numpy().shape
        columns = (prompts, responses, rewards, loss_masks, logprobs, candidates, fields, sequence_fields)
        packed: PackedBatch = write_samples(batch, prompt_lengths, lengths, first, start, shape, *columns)
        if candidates is not None:
            in_order = packed["candidates"].take(torch.cat(packed["samples"]).numpy())
            is_response = packed["response_mask"].numpy() != 0
            edges = np.arange(len(is_response) + 1, dtype=np.int64) * is_response.shape[1]
            packed["candidates"] = BatchCandidateSets(in_order.sets.place(is_response), edges)
        return packed

    def collate_rollouts(
        self,
        rollouts: Sequence[Any],
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
        return self.collate_rl(**rollout_columns(rollouts, rewards, candidates), fields=fields)

    def _pack(self, name: str, lengths: NDArray[np.int64]) -> tuple[PackedBatch, NDArray[np.int64]]:
        """Return a batch without tokens and losses, and the index of each sample's first column, flattened.

        `lengths` holds each sample's number of tokens. `name` is the field that has them.
        """
        if (i := first_true(lengths == 0)) is not None:
            raise InvalidInputError(f"{name}[{i}]: is empty, expected at least one token to pack")
        footprints = _round_up(lengths, self.sequence_multiple)
        capacity = self.max_tokens // self.row_multiple * self.row_multiple
        dealt = [bin_ for shard in deal_bins(footprints, capacity, self.dp_size) for bin_ in shard]
        bins = [np.array(members, np.int64) for members in dealt]
        edges = [offsets_of(footprints[members]) for members in bins]
        # A row without samples gets one padding token as its sequence, so that attention returns finite
        # values.
        row_lengths = _round_up(np.array([max(1, one[-1]) for one in edges]), self.row_multiple)
        shape = (len(bins), int(row_lengths.max()))
        if self.pp_size > 1:
            row_lengths[:] = shape[1]
        order = np.concatenate(bins)
        starts = np.concatenate([row * shape[1] + one[:-1] for row, one in enumerate(edges)])
        first = np.empty_like(lengths)
        first[order] = starts
        # Samples cover nearly all columns: write each column once.
        stops = np.append(0, starts + lengths[order])
        gaps = np.append(starts, shape[0] * shape[1]) - stops
        padding = np.repeat(stops - offsets_of(gaps)[:-1], gaps) + np.arange(gaps.sum())
        sequences, position_ids = np.empty(shape, np.int64), np.empty(shape, np.int64)
        attention_mask = np.ones(shape, np.int64)
        for field, value in ((sequences, self.pad_token_id), (position_ids, 0), (attention_mask, 0)):
            field.reshape(-1)[padding] = value
        attention_mask[[not len(members) for members in bins], 0] = 1
        count = np.arange(lengths.max())
        write_rows("position_ids", [count[:length] for length in lengths.tolist()], first, position_ids)
        sequence_edges = [
            np.array([0, *one[1:-1], length], np.int32)
            for one, length in zip(edges, row_lengths, strict=True)
        ]
        held = [lengths[members].astype(np.int32) for members in bins]
        batch: PackedBatch = {
            "sequences": torch.from_numpy(sequences),
            "attention_mask": torch.from_numpy(attention_mask),
            "position_ids": torch.from_numpy(position_ids),
            "loss_mask": torch.from_numpy(np.zeros(shape, np.float32)),
            "row_lengths": torch.from_numpy(row_lengths),
            "cu_seqlens": [torch.from_numpy(one) for one in sequence_edges],
            "seq_lengths": [torch.from_numpy(one if len(one) else np.ones(1, np.int32)) for one in held],
            "samples": [torch.from_numpy(members) for members in bins],
            "layouts": [
                Layout(cp_size=self.cp_size, cu_seqlens=one.tolist(), seq_lengths=of.tolist())
                for one, of in zip(sequence_edges, held, strict=True)
            ],
        }
        return batch, first


def _round_up(values: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    return -(-values // multiple) * multiple
