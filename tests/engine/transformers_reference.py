"""Reference sets: the definition of a candidate set, applied to distributions from transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["MODEL_TOLERANCE", "is_robust", "nucleus", "reference_logprobs"]

# The largest difference between SGLang's and transformers' float32 log-probs, up to position 300 (measured:
# 7e-6). It grows with the position.
MODEL_TOLERANCE = 1.2e-5


def reference_logprobs(
    model: Any, prompt_ids: list[int], output_ids: list[int], temperature: float
) -> np.ndarray:
    """Return the distribution that each output token was drawn from, float64 [T, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + output_ids])).logits[0].double()
    drawn_from = logits[len(prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(drawn_from, -1).numpy()


def nucleus(logprobs: np.ndarray, p: float) -> set[int]:
    """Return the ids whose strictly more likely tokens have a mass below p."""
    mass = np.exp(logprobs)
    above = (mass > mass[:, None]) @ mass
    return set(np.flatnonzero(above < p).tolist())


def is_robust(logprobs: np.ndarray, p: float, tolerance: float = MODEL_TOLERANCE) -> bool:
    """Return whether the nucleus is the same for every log-prob error up to the tolerance.

    It is not if the mass above some token is near p, or if the two tokens beside the cutoff are so close that
    they may swap.
    """
    order = np.sort(logprobs)[::-1]
    above = np.concatenate([[0.0], np.cumsum(np.exp(order))[:-1]])
    size = int((above < p).sum())
    slack = 2 * tolerance
    near = (np.abs(above[max(size - 1, 0) : size + 1] - p) < slack * p).any()
    close = size < len(order) and order[size - 1] - order[size] < slack
    return not near and not close
