"""Extract the candidate sets of prompt positions, in the scheduler processes.

A request with `top_logprobs_p` asks for these sets with SGLang's field `logprob_start_len`.

SGLang may compute the logits of a forward pass in chunks, and the hooks extract the sets from each chunk of
logits. The logits at prompt position `k` score the token at position `k + 1`. With chunked prefill, several
forward passes compute the logits of one prompt. If weights are pushed between two forward passes of a prompt,
the prompt's request ends with an error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_topp_patches.hooks import Seam, after, around, before
from sglang_topp_patches.memory import budget, busy_refusal, prompt_refusal
from sglang_topp_patches.releases import internals
from sglang_topp_patches.scheduler.requests import (
    SchedulerProcess,
    Weights,
    buffer_of,
    is_refused,
    refuse,
    refuse_too_many,
    weights_of,
)
from sglang_topp_patches.scheduler.sets import ExtractedSets, PassSets, Sets, StagedSets, extract
from sglang_topp_patches.scheduler.step import ForwardPass, RequestedRows, forward_pass_of
from sglang_topp_patches.set_buffer import KEY, PackedSets, SetBuffer

# The maximum number of log-probs (rows times vocabulary) that one call of `extract` reads.
_VALUES_AT_ONCE = 1 << 25
_MAX_UNSETTLED_CHUNKS = 2
_EXTRACTION = "sglang_topp_prompts"

CALLED = (
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        "Read which rows of a pass score which prompt tokens.",
        keywords=(
            "extend_logprob_pruned_lens_cpu",
            "top_logprobs_nums",
            "extend_input_logprob_token_ids_gpu",
        ),
    ),
)


@around(
    "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward",
    since="0.5.16",
    state=SchedulerProcess,
)
def forward(
    process: SchedulerProcess,
    original: Callable[..., Any],
    self: Any,
    *,
    input_logprob_indices: Tensor,
    get_logits_fn: Callable[..., Tensor],
    logits_metadata: Any,
    **kwargs: Any,
) -> Any:
    """Extract sets from the logits that SGLang computes.

    SGLang passes all arguments of the hooked function by keyword.
    """
    kwargs |= {"input_logprob_indices": input_logprob_indices, "logits_metadata": logits_metadata}
    extraction = _begin(process, self, logits_metadata, input_logprob_indices)
    if extraction is None:
        return original(self, get_logits_fn=get_logits_fn, **kwargs)

    def get_logits(*args: Any, **options: Any) -> Tensor:
        logits = get_logits_fn(*args, **options)
        extraction.extract(logits)
        return logits

    result = original(self, get_logits_fn=get_logits, **kwargs)
    extraction.finish()
    return result


@before(
    "sglang.srt.layers.logits_processor.LogitsProcessor.process_input_logprobs",
    until="0.5.16",
    state=SchedulerProcess,
)
def process_whole(process: SchedulerProcess, self: Any, input_logits: Tensor, logits_metadata: Any) -> None:
    """Extract all prompt sets of a pass together."""
    rows = torch.arange(len(input_logits), device=input_logits.device)
    extraction = _begin(process, self, logits_metadata, rows)
    if extraction is not None:
        extraction.extract(input_logits)
        extraction.finish()


@around(
    "sglang.srt.layers.logits_processor.LogitsProcessor.process_input_logprobs_by_chunk",
    until="0.5.16",
    state=SchedulerProcess,
)
def process_by_chunk(
    process: SchedulerProcess,
    original: Callable[..., Any],
    self: Any,
    pruned_states: Tensor,
    sample_indices: Tensor,
    input_logprob_indices: Tensor,
    token_to_seq_idx: list[int],
    lm_head: Any,
    logits_metadata: Any,
) -> Any:
    """Extract prompt sets in chunks."""
    extraction = _begin(process, self, logits_metadata, input_logprob_indices)
    setattr(self, _EXTRACTION, extraction)
    arguments = (pruned_states, sample_indices, input_logprob_indices, token_to_seq_idx, lm_head)
    try:
        result = original(self, *arguments, logits_metadata)
    finally:
        setattr(self, _EXTRACTION, None)
    if extraction is not None:
        extraction.finish()
    return result


@after("sglang.srt.layers.logits_processor.LogitsProcessor._get_logits", until="0.5.16")
def extract_chunk(result: Tensor, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extract the prompt sets from a chunk of logits."""
    if (extraction := getattr(self, _EXTRACTION, None)) is not None:
        extraction.extract(result)


def _begin(
    process: SchedulerProcess, processor: Any, metadata: Any, indices: Tensor
) -> PromptExtraction | None:
    """Begin to extract the prompt sets of a pass, or return None if no request of it has a threshold.

    A request for the sets of tokens that the sampler could draw (`top_logprobs_source: "sampler"`) has no
    threshold, so its prompt gets no sets.
    """
    forward_pass = forward_pass_of(metadata.top_logprobs_nums)
    if forward_pass is None or not any(forward_pass.rows.thresholds):
        return None
    return PromptExtraction(process, forward_pass, processor, metadata, indices)


class PromptExtraction:
    """The extraction of the prompt sets of one forward pass.

    The hooks call `extract` for each chunk of logits right after SGLang has computed the chunk. After the
    last chunk, the hooks call `finish`.

    At p = 1, the prompt sets of one forward pass may hold more candidates than any device can store. So this
    class checks the limits (`memory`) during the pass. A prompt that exceeds the limit per sample gets no
    more sets. Once the scheduler holds more candidates than fit, neither do the prompts that are not
    completely extracted yet.

    Attributes:
        thresholds: float64, one for each scored row of the pass; 0 if the row gets no set.
        chunks: the prompt sets of the pass, in the order of the rows.
        refused: the message and the HTTP status of each request that gets an error instead of sets, by the
            request's index.
    """

    def __init__(
        self,
        process: SchedulerProcess,
        forward_pass: ForwardPass,
        processor: Any,
        metadata: Any,
        indices: Tensor,
    ) -> None:
        """Begin a pass.

        Args:
            process: the state of this scheduler process.
            forward_pass: the pass.
            processor: SGLang's object that computes log-probs (`Internals.input_logprobs`).
            metadata: SGLang's `LogitsMetadata` of the pass.
            indices: int64, the indices of the logits rows that score prompt tokens, ascending.
        """
        self._process, self._processor, self._pass = process, processor, forward_pass
        self._indices, self._scored = indices, internals().scored_rows(metadata, indices)
        self._next_ids = metadata.extend_input_logprob_token_ids_gpu
        self._counts = tuple(metadata.extend_logprob_pruned_lens_cpu)
        self._in_flight = process.candidates_in_flight
        self._owners = np.repeat(np.arange(len(self._counts)), self._counts)
        self._candidates = np.zeros(len(self._counts), np.int64)
        self.thresholds = np.repeat(np.array(forward_pass.rows.thresholds, np.float64), self._counts)
        self.chunks: list[Sets] = []
        self.refused: dict[int, tuple[str, HTTPStatus]] = {}
        self._position = self._num_rows = self._num_settled = 0

    def extract(self, logits: Tensor) -> None:
        """Extract the sets of the next rows of the pass.

        Args:
            logits: float [rows, V], the next rows of the pass, after the rows of the previous call. A row
                that scores no prompt token gets no set.
        """
        position = self._position
        self._position += len(logits)
        first, last = bisect_left(self._scored, position), bisect_left(self._scored, self._position)
        at_once = max(1, _VALUES_AT_ONCE // logits.shape[1])
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            thresholds = self.thresholds[start:stop].tolist()
            if any(thresholds):
                scored = logits[self._indices[start:stop] - position]
                logprobs = internals().input_logprobs(self._processor, scored)
                self.add(extract(logprobs, thresholds, self._next_ids[start:stop].clone()))
            else:
                self.add(_no_sets(stop - start, logits.device))

    def add(self, chunk: Sets) -> None:
        """Append `chunk`, the sets of the scored rows that follow the previous chunk in the forward pass.

        A chunk may be in a staging area, a GPU buffer of fixed size. Such a chunk keeps its log-probs in GPU
        memory until the host reads the chunk. To limit this memory, `add` leaves at most two chunks in
        staging areas. From the third chunk on, the host waits for the oldest chunk while the GPU computes the
        newest. If a pass has at most two chunks, `add` never waits for the GPU.

        `add` checks a chunk's candidates against the limits only after the host has read the chunk. Later,
        `PromptSets.consume` counts the candidates of all chunks, and checks the limits again.
        """
        self.chunks.append(chunk)
        while self._num_settled < len(self.chunks):
            oldest = self.chunks[self._num_settled]
            if isinstance(oldest, StagedSets):
                if len(self.chunks) - self._num_settled <= _MAX_UNSETTLED_CHUNKS:
                    return
                oldest = oldest.settled()
            self.chunks[self._num_settled] = self._counted(oldest)
            self._num_settled += 1

    def _counted(self, chunk: ExtractedSets) -> ExtractedSets:
        num_rows = chunk.num_rows
        if len(chunk.token_ids):
            sizes = chunk.offsets.diff().cpu().numpy()
            np.add.at(self._candidates, self._owners[self._num_rows :][:num_rows], sizes)
            limits, total = budget(), int(self._candidates.sum())
            for owner in np.flatnonzero(self._candidates > limits.max_candidates_per_sample):
                self._refuse(int(owner), prompt_refusal(limits), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            if busy := busy_refusal(self._in_flight + total, limits.max_candidates_in_flight):
                for owner in np.unique(self._owners[self._num_rows + num_rows :]):
                    self._refuse(int(owner), busy, HTTPStatus.TOO_MANY_REQUESTS)
            if total > _VALUES_AT_ONCE:
                # Move the sets to the host, because the device may have less memory than the host. The limits
                # on candidates are derived from the host's memory.
                chunk = chunk.map(lambda tensor: tensor.cpu())
        self._num_rows += num_rows
        return chunk

    def _refuse(self, owner: int, reason: str, status: HTTPStatus) -> None:
        self.refused.setdefault(owner, (reason, status))
        self.thresholds[self._owners == owner] = 0

    def finish(self) -> None:
        """Store the prompt sets in the `ForwardPass`.

        A later hook (`step.sample` or `compute_logprobs_only`) attaches the sets to the pass's output.
        """
        self._pass.prompt = PromptSets(
            self._pass.rows,
            self._counts,
            self.chunks,
            self._process.current_weights(),
            self.refused,
        )


@around("sglang.srt.model_executor.model_runner.ModelRunner.compute_logprobs_only")
def compute_logprobs_only(
    original: Callable[..., None], self: Any, logits_output: Any, forward_batch: Any
) -> None:
    """Attach a pass's prompt sets to its output.

    SGLang calls `compute_logprobs_only` instead of `sample` if `max_new_tokens` is 0, because such a pass
    samples no token.
    """
    internals().begin_pass(logits_output)
    original(self, logits_output, forward_batch)
    forward_pass = forward_pass_of(forward_batch.top_logprobs_nums)
    if forward_pass is not None and forward_pass.prompt is not None:
        internals().attach(logits_output, forward_pass.prompt)


@after("sglang.srt.managers.schedule_batch.Req.reset_for_retract")
def forget_rows(result: None, self: Any) -> None:
    """Free the sets of a partly scored prompt after a retraction.

    After a retraction, SGLang drops the log-probs of a partly scored prompt, and scores the prompt again. A
    request with an output token has a completely scored prompt, so the hook keeps the sets of this prompt.

    The hook refuses a request that has an output token and a prompt of embeddings (`input_embeds`). If the
    prompt consists of embeddings, SGLang generates the output again from the start after a retraction, but
    keeps the log-probs of the first attempt.
    """
    buffer: SetBuffer | None = (self.customized_info or {}).get(KEY)
    if buffer is None or buffer.problem is not None:
        return
    if not buffer.end:
        buffer.prompt = PackedSets()
    elif self.input_embeds is not None:
        refuse(
            self,
            "the engine ran out of memory and generated the answer to input_embeds again from the start, but"
            " kept the log-probs of the first attempt; send the request again",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


@dataclass(frozen=True)
class PromptSets(PassSets):
    """The prompt sets of one forward pass, first on the device and later on the host.

    Attributes:
        rows: the requests of the pass, and their thresholds.
        counts: for each request, the number of prompt positions that the pass scores.
        chunks: the sets of all scored prompt positions, request after request, split into chunks.
        weights: the weights with which the pass ran.
        refused: the requests that get an error instead of sets, as in `PromptExtraction`.
    """

    rows: RequestedRows
    counts: tuple[int, ...]
    chunks: list[Sets]
    weights: Weights
    refused: Mapping[int, tuple[str, HTTPStatus]] = field(default_factory=dict)

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append the sets of each request's scored positions to the request's `SetBuffer`."""
        packed = [each for chunk in self.chunks for each in chunk.on_host()]
        start = 0
        for row, (req, count) in enumerate(zip(batch.reqs, self.counts, strict=False)):
            own = packed[start : start + count]
            start += count
            # Skip a request that SGLang has retracted since the pass began, because SGLang scores the prompt
            # of a retracted request again.
            is_moved = req.rid != self.rows.request_ids[row] or req.is_retracted
            if not self.rows.thresholds[row] or not own or is_moved or is_refused(req):
                continue
            if row in self.refused:
                refuse(req, *self.refused[row])
                continue
            buffer = buffer_of(req)
            # If a request has an output token's set, earlier passes already added all sets of the request's
            # prompt. SGLang scored the prompt again because of a retraction, so drop the new sets.
            if buffer.end:
                continue
            # A trainer can push weights during a prefill, even before SGLang scores the first position. The
            # scored positions then attend to KV that the old weights computed, so refuse the request.
            if (began := weights_of(req)) != self.weights:
                versions = (began and began.version, self.weights.version)
                names = "" if len({*versions}) == 1 else f", {versions[0]!r} and then {versions[1]!r}"
                refuse(
                    req,
                    f"weights were pushed while the prompt was scored{names}; send the request again",
                    HTTPStatus.SERVICE_UNAVAILABLE,
                )
                continue
            buffer.prompt_version = self.weights.version
            for position, one in enumerate(own, req.logprob_start_len + len(buffer.prompt)):
                if not _scores_token(req, position):
                    buffer.prompt.append(None)
                elif isinstance(one, str):
                    index = position - req.logprob_start_len + 1
                    refuse(req, f"no candidate set at prompt position {index}: {one}")
                    break
                else:
                    buffer.prompt.append(one)
            else:
                refuse_too_many(req)


def _scores_token(req: Any, position: int) -> bool:
    """Return whether the row at a prompt position scores a token, and not an image's or an embedding's place.

    A row scores the token at the next position. For an image, SGLang has placeholders there that are no token
    ids; for `input_embeds`, it makes ids up.
    """
    ids, scored = req.origin_input_ids, position + 1
    return scored >= len(ids) or (req.input_embeds is None and 0 <= ids[scored] < req.vocab_size)


def _no_sets(count: int, device: torch.device) -> ExtractedSets:
    empty = torch.empty(0, device=device)
    return ExtractedSets(empty.int(), empty, torch.zeros(count + 1, dtype=torch.int64, device=device))
