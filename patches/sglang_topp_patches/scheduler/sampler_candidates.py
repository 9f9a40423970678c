"""In the scheduler processes, record the tokens that SGLang's sampler could draw.

The sampler filters the probabilities by top_k, top_p, and min_p. A token can be drawn if its filtered
probability is above 0. SGLang returns filtered probabilities only for requests that set the field
`return_sampling_mask`. For requests with `top_logprobs_source: "sampler"`, the hook `sample_from_probs` makes
SGLang return filtered probabilities even if the request does not set `return_sampling_mask`.

SGLang returns the filtered probabilities from the same call that draws the token. So each set reflects the
filters of the sampling backend, the order in which the filters run, and how the filters treat ties.

With tensor parallelism, every rank computes the filtered probabilities, even if SGLang sends only one rank's
results to the client. If only that rank computed the filtered probabilities, the ranks would call different
sampling functions, and could draw different tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_topp.candidates.torch_tensors import to_device
from sglang_topp_patches.hooks import around
from sglang_topp_patches.scheduler.extraction import Sets, extract_support
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler.requested_rows import ForwardPass

__all__ = [
    "Capture",
    "Drawing",
    "capturing",
    "current_capture",
    "rank_only_top_k",
    "sample_from_probs",
]


@dataclass
class Drawing:
    """The filtered probabilities from one sampler call, for rows with `top_logprobs_source: "sampler"`.

    Attributes:
        rows: the indices of the R rows with `top_logprobs_source: "sampler"`, in ascending order.
        greedy: the indices of the rows that are sampled greedily. A greedy row's set is its sampled token.
        weights: float [R, W], the filtered probabilities, one row for each index in `rows`. `weights` is None
            before the sampler has run. `weights` stays None if SGLang draws without probabilities, for
            example if the whole batch is greedy.
        token_ids: int32 [R, W], the token in each column of `weights`, most likely token first. `token_ids`
            is None if W is the vocabulary size.
    """

    rows: tuple[int, ...]
    greedy: frozenset[int]
    weights: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None

    def sets(
        self,
        process: SchedulerProcess,
        logprobs: torch.Tensor,
        sampled_ids: torch.Tensor,
        *,
        lowest: float | None = None,
    ) -> Sets:
        """Extract the sets of the R rows in `self.rows`, in the order of `self.rows`.

        Args:
            process: as for `extraction.extract`.
            logprobs: float [B, V], as for `extraction.extract`.
            sampled_ids: integer [B], as for `extraction.extract`.
            lowest: as for `extraction.extract`.
        """
        rows = _to_device(self.rows, logprobs.device)
        if self.weights is not None:
            greedy = _to_device([row in self.greedy for row in self.rows], logprobs.device)
            # Pass on the new tensor `is_drawn`, because a replay of a CUDA graph later overwrites `weights`.
            is_drawn = (self.weights > 0) & ~greedy[:, None]
            ids = self.token_ids
            return extract_support(process, logprobs, rows, is_drawn, ids, sampled_ids, lowest=lowest)
        nothing = torch.zeros((len(self.rows), 1), dtype=torch.bool, device=logprobs.device)
        tokens = sampled_ids[rows][:, None].int()
        found = extract_support(process, logprobs, rows, nothing, tokens, sampled_ids, lowest=lowest)
        unknown = [i for i, row in enumerate(self.rows) if row not in self.greedy]
        return found.with_problems(
            dict.fromkeys(unknown, "SGLang sampled in a way that does not show what it could have drawn")
        )


def _to_device(values: Sequence[int] | Sequence[bool], device: torch.device) -> torch.Tensor:
    return to_device(np.asarray(values), device)


@dataclass
class Capture:
    """The sets that the hooks extract during one call of the sampler.

    Attributes:
        forward_pass: the pass whose batch is sampled.
        drawing: the sampler's filtered probabilities; None if no row asks for the tokens that the sampler
            could draw.
        sets: each row's set at its threshold p (`top_logprobs_p`); None if no row has a threshold.
        drawn: the sets of tokens that the sampler could draw; None if no row asks for such a set.
    """

    forward_pass: ForwardPass
    drawing: Drawing | None = None
    sets: Sets | None = None
    drawn: Sets | None = None


# SGLang does not pass the `ForwardPass` (the hooks' record of a forward pass) to `Sampler` and
# `OutputLogprobProcessor`. So the hooks on these two classes read the `Capture` of the current sampler call
# from this context variable.
_capture: ContextVar[Capture | None] = ContextVar("sglang_topp_capture", default=None)


@contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """Make the hooks store their results in `capture` while the `with` block runs."""
    token = _capture.set(capture)
    try:
        yield
    finally:
        _capture.reset(token)


def current_capture() -> Capture | None:
    """Return the `Capture` of the current sampler call, or None if no row asks for sets."""
    return _capture.get()


@around("sglang.srt.layers.sampler.Sampler._sample_from_probs", since="0.5.20")
def sample_from_probs(
    original: Callable[..., tuple[torch.Tensor, Any]],
    self: Any,
    probs: torch.Tensor,
    sampling_info: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Record the filtered probabilities of a sampler call."""
    capture = current_capture()
    drawing = capture.drawing if capture else None
    if drawing is None:
        return original(self, probs, sampling_info, *args, **kwargs)
    native = sampling_info.sampling_mask_batch_indices
    ours = _to_device(drawing.rows, probs.device)
    # SGLang returns the filtered probabilities of the rows in `sampling_mask_batch_indices`. If a request
    # asks for SGLang's own sampling mask, two sets of rows are needed: SGLang's and `ours`. So ask for all
    # rows, and select both sets of rows from the result.
    asked = ours if native is None else torch.arange(len(probs), device=probs.device)
    sampling_info.sampling_mask_batch_indices = asked
    try:
        sampled_ids, captured = original(self, probs, sampling_info, *args, **kwargs)
    finally:
        sampling_info.sampling_mask_batch_indices = native
    drawing.weights, drawing.token_ids = captured.weights, captured.token_ids
    if native is None:
        return sampled_ids, None
    drawing.weights = captured.weights[ours]
    drawing.token_ids = None if captured.token_ids is None else captured.token_ids[ours]
    fields = ("weights", "token_ids", "selected_weight")
    own = {name: None if (each := getattr(captured, name)) is None else each[native] for name in fields}
    return sampled_ids, captured._replace(**own, batch_rows=native)


@around("sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch", since="0.5.22")
def rank_only_top_k(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """Sort only `max_top_k` tokens per row.

    `max_top_k` is the largest top_k in the batch, if every row has a top_k. The sampler can draw only the
    `max_top_k` most likely tokens of each row, so it suffices to sort these tokens. Without this hook, SGLang
    sorts the whole vocabulary for every call with `return_filtered_probs`.

    If the batch has a sampling seed, SGLang sorts the whole vocabulary with or without this hook.
    """
    arguments = (top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions)
    is_wide = max_top_k is None or max_top_k >= probs.shape[-1]
    capture = current_capture()
    is_captured = capture is not None and capture.drawing is not None
    if not is_captured or not return_filtered_probs or sampling_seed is not None or is_wide:
        return original(probs, *arguments, return_filtered_probs=return_filtered_probs, max_top_k=max_top_k)
    assert max_top_k is not None
    highest, names = probs.topk(max_top_k, dim=-1, sorted=True)
    drawn, weights, columns, selected_weight = original(
        highest, *arguments, return_filtered_probs=True, max_top_k=None
    )
    names = names.to(torch.int32)
    token_ids = names.gather(1, columns.long())
    sampled_ids = names.gather(1, drawn.long()[:, None]).squeeze(1)
    return sampled_ids, weights, token_ids, selected_weight
