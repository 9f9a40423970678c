"""Every extracted set passes `CandidateSets.check_kept_mass`, for every kind of row and every p.

`test_triton_kernels` runs this file again with the Triton kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidCandidateSetsError
from sglang_topp.nucleus import extraction_torch
from sglang_topp.nucleus.argument_checks import check_top_p_arguments
from tests.nucleus import reference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
VOCAB = 151_936
FIXED = [1e-12, 6e-6, 1e-5, 1e-3, 0.033, 0.5, 0.9, 0.9666, 0.98, 0.9979, 0.9981, 1 - 1e-6, 1.0]


def by_torch(logprobs, p, sampled_ids):
    return extraction_torch.top_p_candidates(*check_top_p_arguments(logprobs, p, sampled_ids))


def by_triton(logprobs, p, sampled_ids):
    from sglang_topp.nucleus import gpu_extraction

    return gpu_extraction.find_top_p(*check_top_p_arguments(logprobs, p, sampled_ids)).complete()


IMPLEMENTATIONS = (
    {"triton": by_triton} if IS_INTERPRETED else {"torch": by_torch, "reference": reference.top_p_candidates}
)


def rows_of_logits() -> Iterator[tuple[str, Tensor]]:
    """Return rows, float32 [V]: flat to peaked, random and worst, from float32 and bfloat16 heads."""
    generator = torch.Generator().manual_seed(0)
    for std in (0.0, 0.01, 1.0, 3.0, 7.0, 30.0):
        logits = torch.randn(VOCAB, generator=generator) * std
        yield f"normal {std}", logits
        yield f"normal {std} from bfloat16", logits.bfloat16().float()  # ties
    for below in (-0.7, -5.0, -13.3):
        # All rounding errors of the softmax's sum have the same sign.
        logits = torch.full((VOCAB,), below)
        logits[17] = 0.0
        yield f"one above {below}", logits
    # Each lane's sum is 1, and every further addend is lost to rounding. This is the largest possible error.
    logits = torch.full((VOCAB,), float(np.log(2.0**-24)))
    logits[:8] = 0.0
    yield "lost additions", logits
    grammar = torch.full((VOCAB,), -torch.inf)
    grammar[:3] = torch.randn(3, generator=generator)
    yield "three tokens allowed", grammar


LOGITS = dict(rows_of_logits())
SOFTMAXES = {
    "log_softmax": lambda logits: torch.log_softmax(logits, -1),
    "log of softmax": lambda logits: torch.softmax(logits, -1).log(),
    "bfloat16 log_softmax": lambda logits: torch.log_softmax(logits.bfloat16(), -1),
}


def thresholds(logprobs: Tensor) -> list[float]:
    """Return fixed thresholds, and some that equal a cumulative mass of the row in float64."""
    masses = np.cumsum(np.sort(logprobs.double().exp().numpy())[::-1])
    at = masses[[0, 1, 2, 10, 1000]].tolist()
    near = [float(np.nextafter(p, to)) for p in at for to in (0, 1)]
    return [p for p in [*FIXED, *at, *near] if 0 < p <= 1]


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("row", LOGITS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extracted_sets_pass(implementation, row, softmax):
    logprobs = SOFTMAXES[softmax](LOGITS[row])
    all_p = thresholds(logprobs)
    if implementation != "torch":  # the kernels are slow: one row of each kind
        all_p = all_p[len(row + softmax) % 3 :: 9]
    # All rows in one call, so that sums run over many rows.
    extracted = IMPLEMENTATIONS[implementation](logprobs.expand(len(all_p), -1), all_p, [2] * len(all_p))
    sets = CandidateSets(*(part.numpy() for part in extracted), [2] * len(all_p))
    for t, p in enumerate(all_p):
        sets[t : t + 1].check_kept_mass(p)


def test_sets_of_a_lower_threshold_do_not():
    logprobs = torch.log_softmax(LOGITS["normal 1.0"], -1)[None]
    for p in (1e-3, 0.033, 0.5, 0.9, 0.99, 0.9979):
        ids, values, _ = by_torch(logprobs, p, None)
        mass = np.cumsum(values.double().exp().numpy())
        size = int(np.searchsorted(mass, p * (1 - 1.01e-6)))  # the largest mass that must not pass
        part = CandidateSets(ids[:size], values[:size], [0, size], ids[:1])
        part.check_kept_mass(mass[size - 1])
        with pytest.raises(InvalidCandidateSetsError, match=f"at position 0, expected at least {p:.9g}"):
            part.check_kept_mass(p)
