"""The rollout's own log-probs under the replayed distribution: what importance ratios divide by."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sglang_topp._tensors import to_numpy
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError

__all__ = ["replayed_old_logprobs"]


def replayed_old_logprobs(
    candidates: CandidateSets, *, output_ids: ArrayLike | None = None, logprobs: ArrayLike | None = None
) -> Tensor:
    """float32 [T] on the CPU: `logprob[t] - logprob_sum[t]`, the log-prob of the sampled token in its set.

    Exactly 0 where the set has one candidate, and where it is empty: there `candidate_logprobs` and
    `masked_logprobs` give 0 too, so the ratio is 1.

    Args:
        candidates: the sets of the T response tokens.
        output_ids: integers [T], the response's ids; when given, they must be the sampled tokens.
        logprobs: floats [T], the rollout's reported log-probs over the whole vocabulary; by default
            those in the sets.

    Raises:
        InvalidInputError: the sets have no log-probs (they come from a mask without; what the engine
            reports beside it are old log-probs already), a length is not T, an id is not the sampled
            one, a log-prob is NaN or above 0.
    """
    if not candidates.has_logprobs:
        raise InvalidInputError(
            "candidates: these sets have no log-probs, so their kept mass is not known; with SGLang's"
            " sampling mask, its `output_token_sampling_logprobs` (one per token) are the old log-probs"
        )
    has_set = candidates.sizes > 0
    if output_ids is not None:
        ids = _of_length("output_ids", output_ids, len(candidates))
        differs = has_set & (ids != candidates.sampled_ids)
        if differs.any():
            t = int(differs.argmax())
            raise InvalidInputError(
                f"output_ids: got {ids[t]} at position {t}, and the sets say that"
                f" {candidates.sampled_ids[t]} was sampled; they are of another response, or shifted"
            )
    sampled = candidates.sampled_logprobs
    if logprobs is not None:
        sampled = _of_length("logprobs", logprobs, len(candidates)).astype(np.float32)
        # Float32 softmaxes round to just above 0.
        wrong = has_set & ~(sampled <= 1e-3)
        if wrong.any():
            t = int(wrong.argmax())
            raise InvalidInputError(f"logprobs: got {sampled[t]} at position {t}, expected at most 0")
    return torch.from_numpy(np.where(candidates.sizes > 1, sampled - candidates.logprob_sum, np.float32(0)))


def _of_length(name: str, values: ArrayLike, length: int) -> np.ndarray:
    array = to_numpy(values)
    if array.shape != (length,):
        raise InvalidInputError(f"{name}: got shape {array.shape}, expected [{length}], one per position")
    return array
