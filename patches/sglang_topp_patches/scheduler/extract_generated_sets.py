"""Extract, in the scheduler processes, the candidate sets of generated tokens.

In each forward pass, SGLang calls `ModelRunner.sample`, which draws the tokens and computes the log-probs
that SGLang reports. Two hooks extract the sets in this order:

1. The hook `compute_logprobs` extracts the sets from the log-probs of the whole vocabulary. The hook wraps
   the SGLang function that looks up the reported log-probs in the log-probs of the whole vocabulary. On
   SGLang before 0.5.16, the hook `attach_logprobs` extracts the sets instead.
2. The hook `sample` wraps `ModelRunner.sample`. After `ModelRunner.sample` returns, the hook attaches the
   extracted sets to the output of the forward pass.

A request asks for one of two kinds of sets. With the field `top_logprobs_p`, a token is in the set if all
more probable tokens have a total probability below `top_logprobs_p`. With the field `top_logprobs_source` set
to `"sampler"`, the set consists of the tokens that the sampler could draw. The hooks in `sampler_candidates`
record these tokens while the sampler runs. Every set also contains the sampled token.

The sets are copied to the host together with SGLang's own results. SGLang then drops invalid tokens, such as
tokens after a stop condition and tokens of a retracted request. `GeneratedSets.consume` runs afterwards, and
adds the set of each remaining token to the token's request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_topp.malloc_trim import LARGE_BYTES
from sglang_topp_patches.hooks import Seam, after, around
from sglang_topp_patches.releases import internals
from sglang_topp_patches.scheduler import gpu_staging, sampler_candidates
from sglang_topp_patches.scheduler.customized_info import (
    STREAM_OUTPUT,
    STREAM_OUTPUT_BEFORE_0_5_13,
    add_sets,
    lowest_logprob,
)
from sglang_topp_patches.scheduler.extraction import Sets, extract
from sglang_topp_patches.scheduler.pipeline_parallel import PassSets
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler.request_budget import is_refused
from sglang_topp_patches.scheduler.requested_rows import RequestedRows, forward_pass_of
from sglang_topp_patches.set_buffer import KEY, PackedSet

__all__ = ["CALLED", "GeneratedSets", "attach_logprobs", "compute_logprobs", "sample", "trim_after_sending"]

CALLED = (
    Seam(
        "sglang.srt.managers.auxiliary_output.CommittedTokens",
        "Know which tokens became visible.",
        keywords=("output_index", "token_ids"),
        since="0.5.20",
    ),
)


@around("sglang.srt.model_executor.model_runner.ModelRunner.sample")
def sample(
    original: Callable[..., torch.Tensor], self: Any, logits_output: Any, forward_batch: Any
) -> torch.Tensor:
    """Extract a pass's sets and attach them to its output."""
    logits = logits_output.next_token_logits
    if logits is not None and gpu_staging.is_staged(logits):
        gpu_staging.warm_up(logits.shape[1], logits.dtype, logits.device)
    internals().begin_pass(logits_output)
    forward_pass = forward_pass_of(forward_batch.top_logprobs_nums)
    if forward_pass is None:
        return original(self, logits_output, forward_batch)
    rows = forward_pass.rows
    drawing = sampler_candidates.Drawing(rows.drawn, rows.greedy) if rows.drawn else None
    capture = sampler_candidates.Capture(forward_pass, drawing)
    with sampler_candidates.capturing(capture):
        next_token_ids = original(self, logits_output, forward_batch)
    if not rows.answers:
        return next_token_ids
    prompt = () if forward_pass.prompt is None else (forward_pass.prompt,)
    version = internals().weight_version()
    generated = GeneratedSets(rows, capture.sets, version, capture.drawn)
    internals().attach(logits_output, PassSets((*prompt, generated)))
    return next_token_ids


@around("sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs", since="0.5.16")
def compute_logprobs(
    original: Callable[..., Any],
    self: Any,
    logprobs: torch.Tensor,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[Any],
    batch_next_token_ids: torch.Tensor,
) -> Any:
    """Extract the sets of a pass.

    The hook extracts the sets before it calls the hooked function, because the hooked function replaces
    log-probs of -inf in place.
    """
    _take(logprobs, batch_next_token_ids)
    return original(self, logprobs, top_logprobs_nums, token_ids_logprobs, batch_next_token_ids)


@around("sglang.srt.layers.sampler.Sampler._attach_logprobs_to_output", until="0.5.16")
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
    """Extract a pass's sets on SGLang before 0.5.16."""
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
    capture = sampler_candidates.current_capture()
    if capture is None or not capture.forward_pass.rows.answers:
        return
    process, thresholds = capture.forward_pass.process, capture.forward_pass.rows.thresholds
    # Rows at the end of `logprobs` that only pad the batch get no sets.
    thresholds += (0.0,) * (len(logprobs) - len(thresholds))
    lowest = lowest_logprob()
    if any(thresholds):
        capture.sets = extract(process, logprobs, thresholds, sampled_ids, lowest=lowest)
    if capture.drawing is not None:
        capture.drawn = capture.drawing.sets(process, logprobs, sampled_ids, lowest=lowest)


@dataclass(frozen=True)
class GeneratedSets:
    """The sets of the tokens that one forward pass generated, first on the device and later on the host.

    Attributes:
        rows: the pass's rows, as recorded when SGLang built the pass's `ForwardBatch`.
        sets: each row's set at its threshold p (`top_logprobs_p`); None if no row has a threshold.
        weight_version: the version of the weights that the pass used.
        drawn: for each row with `top_logprobs_source: "sampler"` (`rows.drawn`), the set of tokens that the
            sampler could draw; None if there is no such row.
    """

    rows: RequestedRows
    sets: Sets | None
    weight_version: str
    drawn: Sets | None = None

    def settled(self) -> GeneratedSets:
        """Return a copy of this object in which no set is in a staging area (`scheduler.gpu_staging`).

        If the sets are in a staging area, this method waits for the device. If a set did not fit into the
        staging area, this method extracts the set again.
        """
        return replace(
            self, sets=self.sets and self.sets.settled(), drawn=self.drawn and self.drawn.settled()
        )

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> GeneratedSets:
        """Start copying the sets to the host. SGLang waits for these copies before `consume` runs."""
        return replace(
            self,
            sets=self.sets and self.sets.map(copy_tensor),
            drawn=self.drawn and self.drawn.map(copy_tensor),
        )

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append the set of each new token to its request's `SetBuffer`.

        A row's set does not match the new token in three cases: the row now belongs to another request,
        SGLang replaced the sampled token, or the scheduler step added several tokens. The request then ends
        with an error.
        """
        drawn = [-1 if commit is None else commit.token_ids[0] for commit in commits]
        found: dict[int, tuple[PackedSet | None, str]] = {}
        for sets, rows in ((self.sets, range(len(self.rows.thresholds))), (self.drawn, self.rows.drawn)):
            if sets is None:
                continue
            on_host = sets.on_host()
            tokens = [drawn[row] if row < len(drawn) else -1 for row in rows]
            is_member = on_host.contains(tokens)
            for i, (row, packed) in enumerate(zip(rows, on_host.packed_sets(), strict=False)):
                if i in on_host.problems:
                    found[row] = None, on_host.problems[i]
                elif is_member[i]:
                    found[row] = packed, ""
                elif row in self.rows.drawn or self.rows.thresholds[row]:
                    found[row] = None, f"token {tokens[i]} replaced the sampled one after its set was taken"
        missing = (None, "SGLang sampled without reporting log-probs")
        for row, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is None or not self.rows.asks(row) or is_refused(req):
                continue
            one = found.get(row, missing)
            if req.rid != self.rows.request_ids[row]:
                one = None, f"row {row} was sampled for request {self.rows.request_ids[row]}"
            elif len(commit.token_ids) != 1:
                one = None, f"{len(commit.token_ids)} tokens became visible in one step"
            add_sets(req, commit.output_index, (one,), self.weight_version)


@after(STREAM_OUTPUT, since="0.5.13", state=SchedulerProcess)
@after(STREAM_OUTPUT_BEFORE_0_5_13, until="0.5.13", state=SchedulerProcess)
def trim_after_sending(
    process: SchedulerProcess, result: Any, self: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any
) -> None:
    """Return memory to the OS after a request with large sets was sent."""
    for req in reqs:
        buffer = (req.customized_info or {}).get(KEY) if req.finished_output else None
        if buffer is not None and buffer.num_candidates * 8 >= LARGE_BYTES:
            process.trimmer.trim_soon()
