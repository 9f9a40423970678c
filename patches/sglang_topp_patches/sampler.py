"""The generated tokens' sets, in the scheduler processes.

`ModelRunner.sample` runs around the function that sees the log-probs that SGLang reports together with the
sampled tokens. The sets then travel to the host with SGLang's results, and `consume` joins them to their
requests once the tokens are committed: overlap, retraction and stops are resolved by then.

What the sampler itself could draw is captured on the way (`support`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sglang_topp_patches import staging, support
from sglang_topp_patches.budget import charge, is_refused
from sglang_topp_patches.extract import Sets, extract
from sglang_topp_patches.payload import KEY, PROMPT_KEY, Entry, Span
from sglang_topp_patches.pipeline import PassSets
from sglang_topp_patches.releases import internals
from sglang_topp_patches.rows import Rows, rows_of

__all__ = ["attach_logprobs", "compute_logprobs", "let_go_of_what_was_sent", "sample"]


@dataclass
class _Capture:
    """Filled by `compute_logprobs` while `sample` runs around it."""

    rows: Rows
    drawing: support.Drawing | None
    sets: Sets | None = None
    drawn: Sets | None = None


_active: _Capture | None = None  # a scheduler process samples one batch at a time


def sample(
    original: Callable[..., torch.Tensor], self: Any, logits_output: Any, forward_batch: Any
) -> torch.Tensor:
    """AROUND hook on `ModelRunner.sample`."""
    global _active
    logits = logits_output.next_token_logits
    if logits is not None and staging.is_staged(logits):
        staging.warm_up(logits.shape[1], logits.dtype, logits.device)
    internals().begin_pass(logits_output)
    rows = rows_of(forward_batch.top_logprobs_nums)
    if rows is None:
        return original(self, logits_output, forward_batch)
    drawing = support.Drawing(rows.drawn, rows.greedy) if rows.drawn else None
    _active = capture = _Capture(rows, drawing) if rows.answers else None
    try:
        with support.capture(drawing):
            next_token_ids = original(self, logits_output, forward_batch)
    finally:
        _active = None
    if capture is None:
        return next_token_ids
    prompt = () if rows.prompt is None else (rows.prompt,)
    version = internals().weight_version()
    generated = GeneratedSets(replace(rows, prompt=None), capture.sets, version, capture.drawn)
    internals().attach(logits_output, PassSets((*prompt, generated)))
    return next_token_ids


def compute_logprobs(
    original: Callable[..., Any],
    self: Any,
    logprobs: torch.Tensor,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[Any],
    batch_next_token_ids: torch.Tensor,
) -> Any:
    """AROUND hook on `OutputLogprobProcessor.compute_logprobs`.

    The sets are taken before the original clamps -inf in place, which a caller would see in them.
    """
    _take(logprobs, batch_next_token_ids)
    return original(self, logprobs, top_logprobs_nums, token_ids_logprobs, batch_next_token_ids)


def attach_logprobs(
    original: Callable[..., None],
    self: Any,
    logits_output: Any,
    logprobs: torch.Tensor,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[Any],
    sampling_info: Any,
    batch_next_token_ids: torch.Tensor,
) -> None:
    """AROUND hook on `Sampler._attach_logprobs_to_output`, which does the same before 0.5.16."""
    _take(logprobs, batch_next_token_ids)
    original(
        self,
        logits_output,
        logprobs,
        top_logprobs_nums,
        token_ids_logprobs,
        sampling_info,
        batch_next_token_ids,
    )


def _take(logprobs: torch.Tensor, sampled_ids: torch.Tensor) -> None:
    if _active is None:
        return
    thresholds = _active.rows.thresholds
    thresholds += (0.0,) * (len(logprobs) - len(thresholds))  # rows that belong to no request
    lowest = _lowest()
    if any(thresholds):
        _active.sets = extract(logprobs, thresholds, sampled_ids, lowest=lowest)
    if _active.drawing is not None:
        _active.drawn = _active.drawing.sets(logprobs, sampled_ids, lowest=lowest)


def _lowest() -> float | None:
    """Log-probs at or below it stand for probability 0.

    `SGLANG_SANITIZE_NAN_LOGITS`, which `sglang-topp serve` sets, has a logit of -1e30 stand for -inf. Where
    SGLang reports `log_softmax` (greedy rows), a forbidden token then has a finite log-prob like that.
    """
    return -1e20 if internals().sanitizes_logits() else None


@dataclass(frozen=True)
class GeneratedSets:
    """The generated tokens' sets of one forward pass, on the device and then on the host.

    Attributes:
        rows: the rows as they were when the pass was built.
        sets: by the threshold rule, one per row; None where no row asks by it.
        weight_version: the weights that the pass ran with.
        drawn: what the sampler could draw, one for each of `rows.drawn`; None where there are none.
    """

    rows: Rows
    sets: Sets | None
    weight_version: str
    drawn: Sets | None = None

    def settled(self) -> GeneratedSets:
        """The same with whole sets on the device; waits for them."""
        return replace(
            self, sets=self.sets and self.sets.settled(), drawn=self.drawn and self.drawn.settled()
        )

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> GeneratedSets:
        """Issue the copies; `consume` runs after SGLang has waited for them."""
        return replace(
            self,
            sets=self.sets and self.sets.map(copy_tensor),
            drawn=self.drawn and self.drawn.map(copy_tensor),
        )

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append one entry to `customized_info` of every request that a new token became visible of.

        Whatever does not fit (a row that moved, a token that was replaced after sampling, a position
        that was skipped) becomes an entry that says so: the HTTP process turns it into an error.
        """
        spans, problems = self._by_row()
        for row, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is None or not self.rows.asks(row) or is_refused(req):
                continue
            if req.customized_info is None:
                req.customized_info = {}
            entries = req.customized_info.setdefault(KEY, [])
            # SGLang starts a retracted request over where its prompt came as embeddings.
            del entries[commit.output_index :]
            while len(entries) < commit.output_index:
                entries.append(Entry(None, "a token became visible without passing through the sampler"))
            problem = problems.get(row) or self._problem(row, req.rid, commit.token_ids, spans)
            candidates = None if problem else spans[row]
            entries.append(Entry(candidates, problem, weight_version=self.weight_version))
            charge(req, 0 if problem else len(spans[row][0]) // 4)

    def _by_row(self) -> tuple[dict[int, Span], dict[int, str]]:
        """The sets, and why there is none, by row."""
        spans: dict[int, Span] = {}
        problems: dict[int, str] = {}
        numbered = ((self.sets, range(len(self.rows.thresholds))), (self.drawn, self.rows.drawn))
        for sets, rows in numbered:
            if sets is not None:
                there = sets.on_host()
                spans.update(zip(rows, there.spans(), strict=False))
                problems.update({rows[i]: problem for i, problem in there.problems.items() if i < len(rows)})
        return spans, problems

    def _problem(
        self, row: int, request_id: str, token_ids: tuple[int, ...], spans: Mapping[int, Span]
    ) -> str:
        if row not in spans:
            return "SGLang sampled without reporting log-probs"
        if request_id != self.rows.request_ids[row]:
            return f"row {row} was sampled for request {self.rows.request_ids[row]}"
        if len(token_ids) != 1:
            return f"{len(token_ids)} tokens became visible in one step"
        if token_ids[0] not in np.frombuffer(spans[row][0], np.int32):
            return f"token {token_ids[0]} replaced the sampled one after its set was taken"
        return ""


def let_go_of_what_was_sent(result: Any, self: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `SchedulerOutputStreamer.stream_output`.

    SGLang sends the values from `send_token_offset` on, and keeps all of them as long as it keeps the
    request: until the collector finds it, where that has ended.
    """
    for req in reqs:
        info = req.customized_info
        if not info:
            continue
        entries = info.get(KEY, [])
        last = min(req.send_token_offset, len(entries)) - 1
        while last >= 0 and entries[last] is not None:
            entries[last] = None
            last -= 1
        if req.finished_output or (req.stream and req.send_token_offset):
            info.pop(PROMPT_KEY, None)
