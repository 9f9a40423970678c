"""Candidate sets of a sampler's support equal the reference.

`test_triton_kernels` runs this file again with the Triton kernels.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus import extraction_torch
from sglang_topp.nucleus.argument_checks import check_support_arguments
from tests.fake_gpu import gpu
from tests.nucleus import reference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def support_candidates(logprobs, weights, token_ids=None, *, sampled_ids):
    arguments = check_support_arguments(logprobs, weights, token_ids, sampled_ids)
    if not IS_INTERPRETED:
        return extraction_torch.support_candidates(*arguments)
    from sglang_topp.nucleus import gpu_extraction

    return gpu_extraction.find_support(*arguments).complete()


def filtered(rows: int, vocab: int, *, seed: int, keep: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log-probs with ties and impossible tokens, and weights of which a random filter zeroed some."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).round(decimals=1)
    logits[torch.rand(rows, vocab, generator=generator) < 0.1] = -torch.inf
    logits[:, 0] = 1.0
    logprobs = torch.log_softmax(logits, -1)
    kept = torch.rand(rows, vocab, generator=generator) < keep
    return logprobs.to(dtype), logprobs.exp() * kept


def shuffled(weights: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the weights with shuffled columns, and the token ids of the columns."""
    order = torch.randperm(weights.shape[1], generator=torch.Generator().manual_seed(seed))
    return weights[:, order], order.int().expand(len(weights), -1)


def assert_parity(logprobs: Tensor, weights: Tensor, token_ids: Tensor | None, sampled: Tensor) -> None:
    expected = reference.support_candidates(logprobs, weights, token_ids, sampled_ids=sampled)
    got = support_candidates(logprobs, weights, token_ids, sampled_ids=sampled)
    for name, mine, theirs in zip(("token_ids", "logprobs", "offsets"), got, expected, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    CandidateSets(*(each.cpu().numpy() for each in got), sampled.cpu().numpy())  # checks order and duplicates


@pytest.mark.parametrize("device", [nullcontext, gpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("keep", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("vocab", [1, 7, 513])
def test_parity(vocab, keep, dtype, device):
    logprobs, weights = filtered(5, vocab, seed=vocab, keep=keep, dtype=dtype)
    sampled = torch.zeros(5, dtype=torch.int64)
    with device():
        if device is gpu:
            logprobs, weights, sampled = (each.to("cuda") for each in (logprobs, weights, sampled))
        assert_parity(logprobs, weights, None, sampled)
        if device is nullcontext:
            assert_parity(logprobs, *shuffled(weights, 3), sampled)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 6), st.integers(1, 40), st.integers(0, 10**6), st.floats(0, 1))
def test_parity_for_any_shape(rows, vocab, seed, keep):
    logprobs, weights = filtered(rows, vocab, seed=seed, keep=keep, dtype=torch.float32)
    # The sampled token is added even if the filter removed it or every other token.
    sampled = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    sampled[logprobs.gather(1, sampled[:, None]).squeeze(1).isinf()] = 0
    assert_parity(logprobs, *shuffled(weights, seed), sampled)


def test_impossible_sampled_token_is_the_last_of_its_set():
    logprobs = torch.tensor([[-0.1, -torch.inf, -2.5]])
    ids, values, offsets = support_candidates(logprobs, logprobs.exp(), sampled_ids=[1])
    assert (ids.tolist(), offsets.tolist()) == ([0, 2, 1], [0, 3])
    assert values[-1] == -torch.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.ones(2)}, r"weights: got float32 \[2\], expected a tensor \[2, W\]"),
        ({"weights": torch.ones(2, 3)}, r"without token_ids, expected \[2, 4\]"),
        ({"weights": torch.ones(1, 4)}, r"expected a tensor \[2, W\]"),
        ({"token_ids": torch.zeros(2, 4)}, "token_ids: got float32"),
        ({"token_ids": torch.zeros(2, 3, dtype=torch.int64)}, "token_ids: got int64"),
        ({"token_ids": torch.full((2, 4), 4)}, "ids outside of 0 to 3"),
        ({"token_ids": torch.full((2, 4), -1)}, "ids outside of 0 to 3"),
        ({"sampled_ids": [0, 4]}, "sampled_ids: got 4 for row 1, expected 0 to 3"),
        ({"sampled_ids": [0]}, r"expected integers \[2\]"),
        ({"logprobs": torch.full((2, 4), torch.nan)}, "row 0 holds NaN"),
        ({"logprobs": torch.full((2, 4), 3.0)}, "row 0 holds 3, which is above 0"),
        ({"logprobs": torch.full((2, 4), -torch.inf)}, "row 0 can draw token 1, whose log-prob is -inf"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    given = {
        "logprobs": torch.full((2, 4), -1.4),
        "weights": torch.ones(2, 4),
        "token_ids": None,
        "sampled_ids": [0, 1],
    }
    for one in (support_candidates, reference.support_candidates):
        with pytest.raises(InvalidInputError, match=message if one is support_candidates else None):
            one(**(given | change))
