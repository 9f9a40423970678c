"""The prompt positions' sets (`logprob_start_len`), in the scheduler processes.

SGLang scores a prompt in `InputLogprobProcessor.forward`, chunk by chunk, from logits that it asks a
function for; the hook listens to that function. Row `k` is the distribution of the token after it,
so the sets move by one: the first position has none, and the last row, which the first generated
token is drawn from, is left out. Over chunked prefill the rows of one request arrive in several passes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.extract import RowSets, extract
from sglang_topp_patches.payload import KEY, Span
from sglang_topp_patches.rows import Rows, rows_of

__all__ = ["captured", "forward", "note_batch", "take"]

_BATCH = "_sglang_topp_batch"
_CAPTURED = "_sglang_topp_prompt"


def note_batch(metadata: Any, cls: type[Any], forward_batch: Any) -> Any:
    """AFTER hook on `LogitsMetadata.from_forward_batch`."""
    if rows_of(forward_batch) is not None:
        setattr(metadata, _BATCH, forward_batch)
    return metadata


def forward(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """AROUND hook on `InputLogprobProcessor.forward`, which SGLang calls with keywords."""
    metadata = kwargs["logits_metadata"]
    forward_batch = getattr(metadata, _BATCH, None)
    rows = rows_of(forward_batch)
    if rows is None:
        return original(self, **kwargs)

    # One threshold per scored row; the rows of a request stand together.
    counts = metadata.extend_logprob_pruned_lens_cpu
    thresholds = [p for p, count in zip(rows.thresholds, counts, strict=True) for _ in range(count)]
    indices = metadata.input_logprob_indices_cpu
    get_logits = kwargs["get_logits_fn"]
    chunks: list[RowSets] = []
    position = 0

    def listen(states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal position
        logits: torch.Tensor = get_logits(states, *args, **options)
        first, last = bisect_left(indices, position), bisect_left(indices, position + len(states))
        if any(thresholds[first:last]):
            scored = logits[kwargs["input_logprob_indices"][first:last] - position]
            next_ids = metadata.extend_input_logprob_token_ids_gpu[first:last]
            chunks.append(extract(_logprobs(self, scored), thresholds[first:last], next_ids))
        elif last > first:
            chunks.append(_no_sets(last - first, logits.device))
        position += len(states)
        return logits

    result = original(self, **{**kwargs, "get_logits_fn": listen})
    setattr(forward_batch, _CAPTURED, PromptSets(rows, tuple(counts), tuple(chunks)))
    return result


def captured(forward_batch: Any) -> PromptSets | None:
    """What `forward` found in this pass, or None where it scored no prompt."""
    return getattr(forward_batch, _CAPTURED, None)


def take(req: Any) -> tuple[Span | None, ...]:
    """The sets of the whole prompt from `logprob_start_len` on; empty where none were asked for."""
    spans: list[Span | None] = req.__dict__.pop(_CAPTURED, [])
    return (None, *spans[:-1]) if spans else ()


@dataclass(frozen=True)
class PromptSets:
    """The prompt rows of one pass: SGLang's `DeviceAuxiliaryOutput`, and on the host its `HostAuxiliaryOutput`.

    Attributes:
        rows: the requests of the pass.
        counts: how many scored rows each of them has.
        chunks: the sets of all scored rows, in order.
    """

    rows: Rows
    counts: tuple[int, ...]
    chunks: tuple[RowSets, ...]

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> PromptSets:
        """Issue the copies; `consume` runs after SGLang has waited for them."""
        return PromptSets(self.rows, self.counts, tuple(chunk.map(copy_tensor) for chunk in self.chunks))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Keep each request's rows with it until its first generated token takes them along."""
        spans: list[Span | None] = []
        for chunk in self.chunks:
            spans += [None if row in chunk.problems else each for row, each in enumerate(chunk.spans())]
        start = 0
        for req, request_id, p, count in zip(
            batch.reqs, self.rows.request_ids, self.rows.thresholds, self.counts, strict=False
        ):
            own = spans[start : start + count]
            start += count
            # After a retraction the prompt is scored again; its sets have left with the first token.
            if p and own and req.rid == request_id and not (req.customized_info or {}).get(KEY):
                req.__dict__.setdefault(_CAPTURED, []).extend(own)


def _logprobs(processor: Any, logits: torch.Tensor) -> torch.Tensor:
    """The log-probs exactly as SGLang reports them for a prompt, in its own order of operations."""
    if not processor.enable_fast_input_logprobs:
        return torch.nn.functional.log_softmax(logits, dim=-1)
    from sglang.srt.layers.logprob_processor import compute_row_log_normalizer

    row_max, row_log_sum = compute_row_log_normalizer(logits)
    return (logits.float() - row_max[:, None]) - row_log_sum[:, None]


def _no_sets(count: int, device: torch.device) -> RowSets:
    empty = torch.empty(0, device=device)
    return RowSets(empty.int(), empty, torch.zeros(count + 1, dtype=torch.int64, device=device))
