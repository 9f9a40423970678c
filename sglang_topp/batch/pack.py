"""Packing: several samples to a row, for attention over variable lengths.

A value that scores token t of a sample (loss mask, reward, log-prob, candidate set) stands in the
column whose logits predict that token, one before the token's own. So `f(logits)[row, column]` and
every scored field line up without a shift, and the last column of each sample scores nothing::

    sequences      p0 p1 r0 r1 r2 .  |  p0 r0 .   .       . is padding
    scored field   .  r0 r1 r2 .  .  |  r0 .  .   .       the value of response token r0, ...

The loops that define the layout stand in `reference.py`.

Shape legend: B samples of L_i tokens, P_i of the prompt and R_i of the response; N rows of W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch.bins import deal_bins
from sglang_topp.batch.row_sets import RowSets
from sglang_topp.batch.rows import Rows, as_integer, write_row
from sglang_topp.batch.samples import check_sets, read_examples, read_rollouts
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError

__all__ = ["PackedBatch", "PackedCollator"]


class PackedBatch(TypedDict):
    """What `PackedCollator` returns; CPU tensors of N rows and W columns, and lists of N entries.

    Rank d of `dp_size` owns rows `d * N / dp_size` to `(d + 1) * N / dp_size`; each row is a micro-batch.
    """

    sequences: torch.Tensor
    """int64 [N, W], `pad_token_id` where there is no token."""
    attention_mask: torch.Tensor
    """int64 [N, W], 1 on tokens."""
    position_ids: torch.Tensor
    """int64 [N, W], from 0 in every sample; 0 on padding."""
    loss_mask: torch.Tensor
    """float32 [N, W], where the logits that predict the token stand. SFT: divided by its sum over the
    whole batch, so that summed losses make a mean; RL: 0 or 1."""
    row_lengths: torch.Tensor
    """int64 [N]: the columns of each row that are to be computed; all W with pipeline parallelism."""
    cu_seqlens: list[torch.Tensor]
    """int32 [samples + 1] for each row: where its samples begin, alignment included; ends at the row's
    length. For a row without samples, one sequence."""
    seq_lengths: list[torch.Tensor]
    """int32 [samples] for each row: the samples' tokens, without alignment."""
    samples: list[torch.Tensor]
    """int64 [samples] for each row: which samples lie in it, in order."""
    response_mask: NotRequired[torch.Tensor]
    """RL: int64 [N, W], 1 where a response token is predicted."""
    rewards: NotRequired[torch.Tensor]
    """RL: float32 [N, W]."""
    logprobs: NotRequired[torch.Tensor]
    """RL: float32 [N, W]; only where log-probs were given."""
    candidates: NotRequired[RowSets]
    """RL: N rows of W positions, empty where nothing was sampled; only where sets were given."""


@dataclass(frozen=True)
class _Layout:
    """Where every sample lies. `order` holds the samples row by row; `rows` and `starts` go with it."""

    order: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_rows: int
    width: int
    row_lengths: NDArray[np.int64]

    def gaps(self) -> NDArray[np.int64]:
        """Indices of the flattened field where no sample lies: few, in a packed row."""
        first = self.rows * self.width + self.starts
        stop = first + self.lengths[self.order]
        sizes = np.append(first[1:], self.num_rows * self.width) - stop
        before = np.cumsum(sizes) - sizes
        return np.repeat(stop - before, sizes) + np.arange(sizes.sum())

    def spans(self, skip: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """(sample, first, stop) in the flattened field, `lengths` columns from `skip` on, per sample."""
        first = self.rows * self.width + self.starts + skip[self.order]
        stop = first + lengths[self.order]
        return list(zip(self.order.tolist(), first.tolist(), stop.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Packs samples into rows of a token budget: first-fit decreasing, by padded footprints.

    Args:
        max_tokens: the most columns a row may have, all alignment included.
        pad_token_id: fills `sequences` between and after samples.
        dp_size: data-parallel ranks. The number of rows is a multiple of it, tokens spread evenly.
        tp_size: tensor-parallel ranks (sequence parallelism): every sample is aligned to it.
        cp_size: context-parallel ranks; above 1 every sample is aligned to `2 * cp_size * tp_size`, for
            the zigzag halves that each rank takes.
        pp_size: pipeline stages; above 1 all rows are computed at one width.
        fp8_multiple: what the rows of an FP8 GEMM must be a multiple of on every rank: 16 with per-tensor
            scaling, 32 with MXFP8, 128 with blocks; 1 without FP8. Rows are aligned to it once.

    Raises:
        InvalidInputError: not an integer, a size below 1, or `max_tokens` below one aligned row.
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
        """What every sample's columns are rounded up to."""
        return self.tp_size * (2 * self.cp_size if self.cp_size > 1 else 1)

    @property
    def row_multiple(self) -> int:
        """What every row's columns are rounded up to."""
        return self.fp8_multiple * self.sequence_multiple

    def collate_sft(
        self, input_ids: Rows, num_actions: Sequence[int], loss_masks: Rows | None = None
    ) -> PackedBatch:
        """Pack supervised examples; arguments as in `sglang_topp.batch.collate_sft`.

        A loss on the first token of a sample is dropped: nothing predicts it.

        Raises:
            InvalidInputError: as `collate_sft`; a sample is empty, or longer than `max_tokens` once
                aligned.
        """
        examples = read_examples(input_ids, num_actions, loss_masks)
        layout = self._layout("input_ids", examples.lengths)
        whole = layout.spans(np.zeros_like(examples.lengths), examples.lengths)
        batch, sequences = self._common(layout, whole)
        for i, first, stop in whole:
            write_row(sequences[first:stop], examples.ids[i], "input_ids", i)
        losses = batch["loss_mask"].numpy()
        flat = losses.reshape(-1)
        for i, first, stop in whole:
            mask = examples.loss_masks[i]
            if len(mask) == stop - first:
                mask = mask[1:]  # nothing predicts a sample's first token
            flat[stop - 1 - len(mask) : stop - 1] = mask
        losses *= 1 / max(1, int(np.count_nonzero(flat)))
        return batch

    def collate_rl(
        self,
        prompts: Rows,
        responses: Rows,
        rewards: Rows,
        loss_masks: Rows,
        logprobs: Rows | None = None,
        candidates: Sequence[CandidateSets] | None = None,
    ) -> PackedBatch:
        """Pack rollouts; arguments as in `sglang_topp.batch.collate_rl`.

        Raises:
            InvalidInputError: as `collate_rl`; a sample is empty, or longer than `max_tokens` once aligned.
        """
        samples = read_rollouts(prompts, responses, rewards, loss_masks, logprobs, candidates)
        prompt_lengths, lengths = samples.prompt_lengths, samples.response_lengths
        layout = self._layout("prompts", prompt_lengths + lengths)
        nothing = np.zeros_like(prompt_lengths)
        batch, sequences = self._common(layout, layout.spans(nothing, layout.lengths))
        for i, first, stop in layout.spans(nothing, prompt_lengths):
            write_row(sequences[first:stop], samples.prompts[i], "prompts", i)
        scored = layout.spans(prompt_lengths - 1, lengths)
        for i, first, stop in scored:
            write_row(sequences[first + 1 : stop + 1], samples.responses[i], "responses", i)
        if samples.candidates is not None:
            ids = np.empty(lengths.sum(), np.int64)
            ends = np.cumsum(lengths).tolist()
            for i, first, stop in scored:
                ids[ends[i] - (stop - first) : ends[i]] = sequences[first + 1 : stop + 1]
            check_sets(samples.candidates, ids, samples.loss_masks)
            batch["candidates"] = samples.candidates.take(layout.order).place(
                layout.rows,
                layout.starts + prompt_lengths[layout.order] - 1,
                (layout.num_rows, layout.width),
            )

        shape = (layout.num_rows, layout.width)
        response_mask = np.zeros(shape, np.int64)
        flat_mask = response_mask.reshape(-1)
        for _, first, stop in scored:
            flat_mask[first:stop] = 1
        batch["response_mask"] = torch.from_numpy(response_mask)
        losses = batch["loss_mask"].numpy().reshape(-1)
        for i, first, stop in scored:
            losses[first:stop] = samples.loss_masks[i]

        def place(name: str, rows: Rows) -> torch.Tensor:
            out = np.zeros(shape, np.float32)
            flat = out.reshape(-1)
            for i, first, stop in scored:
                write_row(flat[first:stop], rows[i], name, i)
            return torch.from_numpy(out)

        batch["rewards"] = place("rewards", samples.rewards)
        if samples.logprobs is not None:
            batch["logprobs"] = place("logprobs", samples.logprobs)
        return batch

    def _layout(self, name: str, lengths: NDArray[np.int64]) -> _Layout:
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
        before = np.concatenate([[0], ends])[np.cumsum(counts) - counts]  # of each row's first sample
        starts = ends - footprints[order] - before[rows]
        filled = np.bincount(rows, weights=footprints[order], minlength=len(bins)).astype(np.int64)
        row_lengths = _round_up(np.maximum(filled, 1), self.row_multiple)
        width = int(row_lengths.max())
        if self.pp_size > 1:
            row_lengths[:] = width
        return _Layout(order, rows, starts, lengths, len(bins), width, row_lengths)

    def _common(
        self, layout: _Layout, spans: list[tuple[int, int, int]]
    ) -> tuple[PackedBatch, NDArray[np.int64]]:
        """The fields that every packed batch has; `sequences` flattened, for the caller to fill."""
        shape, gaps = (layout.num_rows, layout.width), layout.gaps()
        # Samples fill nearly all of a packed field: writing the gaps alone halves the memory traffic.
        sequences, position_ids = np.empty(shape, np.int64), np.empty(shape, np.int64)
        attention_mask = np.ones(shape, np.int64)
        sequences.reshape(-1)[gaps] = self.pad_token_id
        attention_mask.reshape(-1)[gaps] = 0
        flat_positions, count = position_ids.reshape(-1), np.arange(layout.lengths.max())
        flat_positions[gaps] = 0
        for _, first, stop in spans:
            flat_positions[first:stop] = count[: stop - first]

        edges = np.searchsorted(layout.rows, np.arange(layout.num_rows + 1)).tolist()
        cu_seqlens, seq_lengths, samples = [], [], []
        for row, total in enumerate(layout.row_lengths.tolist()):
            span = slice(edges[row], edges[row + 1])
            members, starts = layout.order[span], layout.starts[span]
            lengths = layout.lengths[members]
            if not len(members):
                # One padding token is a sequence of its own, so that attention has something finite to do.
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
            "row_lengths": torch.from_numpy(layout.row_lengths),
            "cu_seqlens": cu_seqlens,
            "seq_lengths": seq_lengths,
            "samples": samples,
        }
        return batch, sequences.reshape(-1)


def _round_up(values: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    return -(-values // multiple) * multiple
