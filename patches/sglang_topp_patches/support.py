"""What the running sampler could draw, in the scheduler processes.

SGLang's sampler can hand out its weights as they are after its filters: it does so for the rows of its own
`return_sampling_mask`. The hook asks for the rows that ask for sets as well, and keeps what is theirs. So a
set follows the filters, the order and the tie rule of whichever backend samples, because it comes out of the
very call that draws. Every rank samples so, also those that answer nobody: they have to draw the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_topp.nucleus.host import to_device
from sglang_topp_patches.extract import Sets, extract_support

__all__ = ["Drawing", "capture", "sample_from_probs", "sample_of_the_highest"]


@dataclass
class Drawing:
    """One sampling of a batch, and the weights of the rows that ask.

    Attributes:
        rows: which ask, rising.
        greedy: those of them that are drawn greedily: their set is their token.
        weights: float [R, W] once it has been drawn, one row for each of `rows`; None while SGLang draws
            without probabilities, as it does where all of a batch is greedy.
        token_ids: int32 [R, W], whose weights they are, highest first; None where W is the vocabulary.
    """

    rows: tuple[int, ...]
    greedy: frozenset[int]
    weights: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None

    def sets(self, logprobs: torch.Tensor, sampled_ids: torch.Tensor, *, lowest: float | None = None) -> Sets:
        """The sets of `rows`, in their order.

        Args:
            logprobs: float [B, V].
            sampled_ids: integer [B].
            lowest: as for `extract`.
        """
        rows = _to_device(self.rows, logprobs.device)
        if self.weights is not None:
            greedy = _to_device([row in self.greedy for row in self.rows], logprobs.device)
            # A copy, also of what a CUDA graph writes to again.
            is_drawn = (self.weights > 0) & ~greedy[:, None]
            return extract_support(logprobs, rows, is_drawn, self.token_ids, sampled_ids, lowest=lowest)
        nothing = torch.zeros((len(self.rows), 1), dtype=torch.bool, device=logprobs.device)
        tokens = sampled_ids[rows][:, None].int()
        found = extract_support(logprobs, rows, nothing, tokens, sampled_ids, lowest=lowest)
        unknown = [i for i, row in enumerate(self.rows) if row not in self.greedy]
        return found.with_problems(
            dict.fromkeys(unknown, "SGLang sampled in a way that does not show what it could have drawn")
        )


def _to_device(values: Sequence[int] | Sequence[bool], device: torch.device) -> torch.Tensor:
    return to_device(np.asarray(values), device)


_drawing: Drawing | None = None  # a scheduler process samples one batch at a time


@contextmanager
def capture(drawing: Drawing | None) -> Iterator[None]:
    """Fill `drawing` by what SGLang samples within the block; None captures nothing."""
    global _drawing
    _drawing = drawing
    try:
        yield
    finally:
        _drawing = None


def sample_from_probs(
    original: Callable[..., tuple[torch.Tensor, Any]],
    self: Any,
    probs: torch.Tensor,
    sampling_info: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """AROUND hook on `Sampler._sample_from_probs`."""
    drawing = _drawing
    if drawing is None:
        return original(self, probs, sampling_info, *args, **kwargs)
    native = sampling_info.sampling_mask_batch_indices
    ours = _to_device(drawing.rows, probs.device)
    # With both, the rows of the whole batch: SGLang copies none of them then.
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


def sample_of_the_highest(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    *args: Any,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
    **kwargs: Any,
) -> Any:
    """AROUND hook on `top_k_top_p_min_p_sampling_from_probs_torch`.

    To hand out its weights it sorts whole rows. Where every row has a top_k, what is beyond the largest
    of them is drawn by nobody, and SGLang's own way without the weights is to rank that many alone; so is
    ours. With a seed it always sorts whole rows, and so it does here.
    """
    seed = kwargs.get("sampling_seed", args[3] if len(args) > 3 else None)
    is_wide = max_top_k is None or max_top_k >= probs.shape[-1]
    if _drawing is None or not return_filtered_probs or seed is not None or is_wide:
        return original(
            probs,
            top_ks,
            *args,
            return_filtered_probs=return_filtered_probs,
            max_top_k=max_top_k,
            **kwargs,
        )
    assert max_top_k is not None
    highest, names = probs.topk(max_top_k, dim=-1, sorted=True)
    drawn, weights, columns, selected_weight = original(
        highest, top_ks, *args, return_filtered_probs=True, max_top_k=None, **kwargs
    )
    names = names.to(torch.int32)
    token_ids = names.gather(1, columns.long())
    sampled_ids = names.gather(1, drawn.long()[:, None]).squeeze(1)
    return sampled_ids, weights, token_ids, selected_weight
