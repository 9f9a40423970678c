"""Old log-probs for importance ratios: the rollout's log-probs, renormalized over its candidate sets."""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import first_true
from sglang_topp.errors import InvalidInputError
from sglang_topp.to_numpy import to_numpy

__all__ = ["replayed_old_logprobs"]


def replayed_old_logprobs(candidates: CandidateSets, *, output_ids: ArrayLike | None = None) -> Tensor:
    """Return the old log-probs, `candidates.masked_logprobs`, as a float32 tensor [T] on the CPU.

    The old log-prob is exactly 0 at a position whose set is empty or has one candidate. The policy's log-prob
    over the candidate set is 0 at such a position too, so the importance ratio of the position is 1.

    Args:
        candidates: the sets of the T response tokens.
        output_ids: integers [T], the response's token ids. If given, `output_ids` must equal the sampled
            tokens.

    Raises:
        InvalidInputError: the sets have no log-probs, or `output_ids` differ from the sampled tokens. Sets
            from a sampling mask of unpatched SGLang may have no log-probs. For such sets, use SGLang's
            `output_token_sampling_logprobs` as old log-probs.
    """
    if not candidates.has_logprobs:
        raise InvalidInputError(
            "candidates: these sets have no log-probs, so their kept mass is not known; with SGLang's"
            " sampling mask, its `output_token_sampling_logprobs` (one per token) are the old log-probs"
        )
    if output_ids is not None:
        ids = to_numpy(output_ids)
        if ids.shape != (len(candidates),):
            raise InvalidInputError(
                f"output_ids: got shape {ids.shape}, expected [{len(candidates)}], one per position"
            )
        if (t := first_true((candidates.sizes > 0) & (ids != candidates.sampled_ids))) is not None:
            raise InvalidInputError(
                f"output_ids: got {ids[t]} at position {t}, and the sets say that"
                f" {candidates.sampled_ids[t]} was sampled; they are of another response, or shifted"
            )
    return torch.tensor(candidates.masked_logprobs)
