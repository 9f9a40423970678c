"""The prompt positions' sets (`logprob_start_len`), in the scheduler processes.

SGLang scores a prompt chunk by chunk, from logits that it asks a function for; the hooks listen to that
function. Row `k` is the distribution of the token after it. Over chunked prefill the rows of one request
arrive in several passes; where weights were pushed between two of them, the request ends as an error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import numpy as np
import torch

from sglang_topp_patches.budget import budget, charge, in_flight, is_refused, refuse, refuse_prompt
from sglang_topp_patches.extract import Sets, extract
from sglang_topp_patches.payload import KEY, PROMPT_KEY, Entry, Span
from sglang_topp_patches.pipeline import PassSets
from sglang_topp_patches.releases import internals
from sglang_topp_patches.row_sets import RowSets
from sglang_topp_patches.rows import Rows, rows_of
from sglang_topp_patches.staging import StagedSets

# Of log-probs: the sets of so many rows are taken at once, at most as large.
_VALUES_AT_ONCE = 1 << 25
_CHUNKS_UNDER_WAY = 2

__all__ = [
    "PromptSets",
    "Taken",
    "compute_logprobs_only",
    "forget_rows",
    "forward",
    "hear_logits",
    "process_by_chunk",
    "process_whole",
]


def forward(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """AROUND hook on `InputLogprobProcessor.forward`, which SGLang calls with keywords."""
    indices = kwargs["input_logprob_indices"]
    listener = _listener(self, kwargs["logits_metadata"], indices)
    if listener is None:
        return original(self, **kwargs)
    get_logits = kwargs["get_logits_fn"]

    def listen(states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        logits: torch.Tensor = get_logits(states, *args, **options)
        listener.hear(logits)
        return logits

    result = original(self, **{**kwargs, "get_logits_fn": listen})
    listener.finish()
    return result


def process_whole(
    original: Callable[..., Any], self: Any, input_logits: torch.Tensor, logits_metadata: Any
) -> Any:
    """AROUND hook on `LogitsProcessor.process_input_logprobs`, which has the logits of all scored rows."""
    rows = torch.arange(len(input_logits), device=input_logits.device)
    listener = _listener(self, logits_metadata, rows)
    if listener is not None:
        listener.hear(input_logits)
        listener.finish()
    return original(self, input_logits, logits_metadata)


def process_by_chunk(
    original: Callable[..., Any],
    self: Any,
    pruned_states: torch.Tensor,
    sample_indices: torch.Tensor,
    input_logprob_indices: torch.Tensor,
    token_to_seq_idx: list[int],
    lm_head: Any,
    logits_metadata: Any,
) -> Any:
    """AROUND hook on `LogitsProcessor.process_input_logprobs_by_chunk`, which makes the logits piece by
    piece."""
    global _listening
    _listening = listener = _listener(self, logits_metadata, input_logprob_indices)
    try:
        result = original(
            self,
            pruned_states,
            sample_indices,
            input_logprob_indices,
            token_to_seq_idx,
            lm_head,
            logits_metadata,
        )
    finally:
        _listening = None
    if listener is not None:
        listener.finish()
    return result


def hear_logits(result: torch.Tensor, self: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `LogitsProcessor._get_logits`."""
    if _listening is not None:
        _listening.hear(result)


class _Listener:
    """Takes the sets of a pass's scored rows, from the logits as SGLang makes them."""

    def __init__(self, processor: Any, metadata: Any, rows: Rows, indices: torch.Tensor) -> None:
        self._processor, self._rows = processor, rows
        self._indices, self._scored = indices, internals().scored_rows(metadata, indices)
        self._next_ids = metadata.extend_input_logprob_token_ids_gpu
        self._counts = metadata.extend_logprob_pruned_lens_cpu
        self._taken = Taken(rows.thresholds, self._counts)
        self._position = 0

    def hear(self, logits: torch.Tensor) -> None:
        """Take the next rows of the pass, scored or not; float [rows, V]."""
        taken, position = self._taken, self._position
        self._position += len(logits)
        first, last = bisect_left(self._scored, position), bisect_left(self._scored, self._position)
        at_once = max(1, _VALUES_AT_ONCE // logits.shape[1])
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            thresholds = taken.thresholds[start:stop].tolist()
            if any(thresholds):
                scored = logits[self._indices[start:stop] - position]
                logprobs = internals().input_logprobs(self._processor, scored)
                taken.add(extract(logprobs, thresholds, self._next_ids[start:stop]))
            else:
                taken.add(_no_sets(stop - start, logits.device))

    def finish(self) -> None:
        """Note what was taken on the pass's rows."""
        rows, taken = self._rows, self._taken
        rows.prompt = PromptSets(
            rows.request_ids,
            rows.thresholds,
            tuple(self._counts),
            tuple(taken.chunks),
            internals().weight_version(),
            taken.refused,
        )


_listening: _Listener | None = None  # a scheduler process scores one batch at a time


def _listener(processor: Any, metadata: Any, indices: torch.Tensor) -> _Listener | None:
    """None where no row asks."""
    rows = rows_of(metadata.top_logprobs_nums)
    # Nobody draws a prompt's tokens: what a sampler could draw is known of the generated ones alone.
    if rows is None or not any(rows.thresholds):
        return None
    return _Listener(processor, metadata, rows, indices)


class Taken:
    """What a pass has taken so far. Of a prompt that is beyond the budget nothing more is taken: at p = 1 the
    rows of one pass may hold more than any device does.

    Attributes:
        thresholds: float64, one for each scored row of the pass; 0 where nothing is taken (any more).
        chunks: the sets, in order.
        refused: requests, by their place in the pass, that get an error in place of sets, and whether that
            is because all together hold too much.
    """

    def __init__(self, thresholds: Sequence[float], counts: Sequence[int]) -> None:
        self._owners = np.repeat(np.arange(len(counts)), counts)
        self._candidates = np.zeros(len(counts), np.int64)
        self.thresholds = np.repeat(np.array(thresholds, np.float64), counts)
        self.chunks: list[Sets] = []
        self.refused: dict[int, bool] = {}
        self._num_rows = self._num_settled = 0

    def add(self, chunk: Sets) -> None:
        """Take the next rows' sets.

        Staged ones keep their log-probs until they are settled: of two chunks at most. A prompt of no more
        chunks than that is not waited for; a longer one chunk after chunk, while the next is under way. The
        chunks that are left are counted when they are consumed.
        """
        self.chunks.append(chunk)
        while self._num_settled < len(self.chunks):
            oldest = self.chunks[self._num_settled]
            if isinstance(oldest, StagedSets):
                if len(self.chunks) - self._num_settled <= _CHUNKS_UNDER_WAY:
                    return
                oldest = oldest.settled()
            self.chunks[self._num_settled] = self._counted(oldest)
            self._num_settled += 1

    def _counted(self, chunk: RowSets) -> RowSets:
        num_rows = chunk.num_rows
        if len(chunk.token_ids):
            sizes = chunk.offsets.diff().cpu().numpy()
            np.add.at(self._candidates, self._owners[self._num_rows :][:num_rows], sizes)
            for owner in np.flatnonzero(self._candidates > budget().max_candidates_per_sample):
                self._refuse(int(owner), is_busy=False)
            while self._held() > in_flight().limit - in_flight().total:
                kept = [owner for owner in range(len(self._candidates)) if owner not in self.refused]
                self._refuse(max(kept, key=lambda owner: self._candidates[owner]), is_busy=True)
            if self._candidates.sum() > _VALUES_AT_ONCE:
                # The device may have no room for so much; the host's is what the budget is for.
                chunk = chunk.map(lambda tensor: tensor.cpu())
        self._num_rows += num_rows
        return chunk

    def _held(self) -> int:
        return sum(int(n) for owner, n in enumerate(self._candidates) if owner not in self.refused)

    def _refuse(self, owner: int, *, is_busy: bool) -> None:
        self.refused.setdefault(owner, is_busy)
        self.thresholds[self._owners == owner] = 0


def compute_logprobs_only(
    original: Callable[..., None], self: Any, logits_output: Any, forward_batch: Any
) -> None:
    """AROUND hook on `ModelRunner.compute_logprobs_only`, which stands in for `sample` where a pass
    only scores prompts (`max_new_tokens` 0)."""
    internals().begin_pass(logits_output)
    original(self, logits_output, forward_batch)
    rows = rows_of(forward_batch.top_logprobs_nums)
    if rows is not None and rows.prompt is not None:
        internals().attach(logits_output, PassSets((rows.prompt,)))


def forget_rows(result: None, self: Any) -> None:
    """AFTER hook on `Req.reset_for_retract`: rows of a prompt that was scored in part go, as SGLang's do.

    Once a token is visible the prompt's rows are whole, and stay.
    """
    if self.customized_info and not self.customized_info.get(KEY) and not is_refused(self):
        rows = list(self.customized_info.pop(PROMPT_KEY, ()))[1:]
        charge(self, -_num_candidates(rows), -len(rows))


@dataclass(frozen=True)
class PromptSets:
    """The prompt rows of one pass, on the device and then on the host.

    Attributes:
        request_ids: each row's request.
        thresholds: each row's threshold, 0 where its request asks for no sets.
        counts: how many scored rows each of them has.
        chunks: the sets of all scored rows, in order.
        weight_version: the weights that the pass ran with.
        refused: see `Taken`.
    """

    request_ids: tuple[str, ...]
    thresholds: tuple[float, ...]
    counts: tuple[int, ...]
    chunks: tuple[Sets, ...]
    weight_version: str
    refused: Mapping[int, bool] = field(default_factory=dict)

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> PromptSets:
        """Issue the copies; `consume` runs after SGLang has waited for them."""
        return replace(self, chunks=tuple(chunk.map(copy_tensor) for chunk in self.chunks))

    def settled(self) -> PromptSets:
        """The same with whole sets on the device; waits for them."""
        return replace(self, chunks=tuple(chunk.settled() for chunk in self.chunks))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append the rows to their requests' `customized_info`."""
        spans: list[Span | None] = []
        for chunk in (each.on_host() for each in self.chunks):
            spans += [None if row in chunk.problems else each for row, each in enumerate(chunk.spans())]
        start = 0
        for row, (req, request_id, p, count) in enumerate(
            zip(batch.reqs, self.request_ids, self.thresholds, self.counts, strict=False)
        ):
            own = spans[start : start + count]
            start += count
            # A request that was retracted since the pass began will be scored again, from its start.
            if not p or not own or req.rid != request_id or req.is_retracted or is_refused(req):
                continue
            if row in self.refused:
                refuse_prompt(req, is_busy=self.refused[row])
                continue
            info = req.customized_info = req.customized_info or {}
            # After a retraction the prompt is scored again, but its rows are here already.
            if info.get(KEY):
                continue
            there = info.setdefault(PROMPT_KEY, internals().prompt_rows())
            if not there:
                there.append(Entry(None, weight_version=self.weight_version))
            version = there[0].weight_version
            if version != self.weight_version:
                refuse(
                    req,
                    f"weights were pushed while the prompt was scored: {len(there) - 1} of its positions come"
                    f" from {version!r}, the next from {self.weight_version!r}; send it again",
                    HTTPStatus.SERVICE_UNAVAILABLE,
                )
                continue
            there.extend(own)
            charge(req, _num_candidates(own), len(own))


def _num_candidates(spans: Sequence[Span | None]) -> int:
    return sum(len(each[0]) // 4 for each in spans if each is not None)


def _no_sets(count: int, device: torch.device) -> RowSets:
    empty = torch.empty(0, device=device)
    return RowSets(empty.int(), empty, torch.zeros(count + 1, dtype=torch.int64, device=device))
