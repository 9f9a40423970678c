"""Every implementation of the top-p extraction equals the reference.

A threshold `p` within rounding of a cumulative mass has two correct results (`reference.settled`).

`test_triton_kernels` runs this file again with the Triton kernels.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.candidates.validation import MAX_LOGPROB
from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus import extraction_torch, top_p_candidates
from sglang_topp.nucleus.argument_checks import check_top_p_arguments
from tests.fake_gpu import gpu
from tests.nucleus import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter is about 1000 times slower than the CPU implementation.
LARGE = 8_257 if IS_INTERPRETED else 70_001
# Vocabularies below and above the size at which extraction works in blocks, with and without a partial block.
VOCABS = sorted({1, 7, 512, 8_191, 8_256, 8_257, LARGE} | (set() if IS_INTERPRETED else {32_000}))


def by_torch(logprobs, p, sampled_ids=None):
    return extraction_torch.top_p_candidates(*check_top_p_arguments(logprobs, p, sampled_ids))


def by_triton(logprobs, p, sampled_ids=None):
    from sglang_topp.nucleus import gpu_extraction

    return gpu_extraction.find_top_p(*check_top_p_arguments(logprobs, p, sampled_ids)).complete()


IMPLEMENTATIONS = {"triton": by_triton} if IS_INTERPRETED else {"torch": by_torch}
# How close to p a cumulative mass may decide. Plain torch sums in float64, `top_p_triton` as it proves.
TOLERANCES = {"torch": 1e-9, "triton": 3.1e-7}


def assert_parity(implementation, logprobs, p, sampled_ids=None):
    got = (IMPLEMENTATIONS | {"dispatch": top_p_candidates})[implementation](logprobs, p, sampled_ids)
    sizes = got[2].diff().tolist()
    p = reference.settled(logprobs, p, sampled_ids, sizes, TOLERANCES.get(implementation, 1e-9))
    expected = reference.top_p_candidates(logprobs, p, sampled_ids)
    for name, mine, theirs in zip(("token_ids", "logprobs", "offsets"), got, expected, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert mine.device == logprobs.device, name
        assert torch.equal(mine, theirs), name
    return got


def model_like(rows: int, vocab: int, *, std: float = 7.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(rows, vocab, generator=generator) * std, -1)


def uniform(vocab: int) -> list[float]:
    return [-float(np.log(vocab))] * vocab


# -- parity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [nullcontext] * (not IS_INTERPRETED) + [gpu])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_model_like_rows(implementation, vocab, dtype, device):
    # Rounding to half precision creates many ties.
    logprobs = model_like(3, vocab).to(dtype)
    sampled = torch.randint(0, vocab, (3,), generator=torch.Generator().manual_seed(1))
    with device():
        if device is gpu:
            logprobs, sampled = logprobs.to("cuda"), sampled.to("cuda")
        for p in (0.05, 0.95, 1.0):
            assert_parity(implementation, logprobs, p)
            assert_parity(implementation, logprobs, p, sampled)


@pytest.mark.parametrize("std", [0.0, 0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("p", [1e-9, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_from_flat_to_peaked(implementation, p, std):
    # From uniform rows (std 0) to one-hot rows, so that every stage of the algorithm finishes some rows.
    logprobs = model_like(3, LARGE, std=std)
    assert_parity(implementation, logprobs, p, [0, LARGE - 1, LARGE // 2])


@pytest.mark.parametrize("vocab", [50, 20_000])
@pytest.mark.parametrize("p", [5e-324, 1e-300, 1e-16, 1e-12])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_most_likely_token_is_kept_for_tiny_p(implementation, p, vocab):
    # p is smaller than the rounding error of the masses. With std 30, most masses are even smaller.
    logprobs = torch.cat([model_like(2, vocab, std=std) for std in (30.0, 1.0, 30.0)])
    logprobs[3] = logprobs[3].round()
    assert_parity(implementation, logprobs, p)
    assert_parity(implementation, logprobs, p, [3] * 6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_one_batch_may_finish_in_different_stages(implementation):
    logprobs = torch.cat([model_like(1, LARGE, std=std, seed=9) for std in (0.1, 7, 0.0, 2.5, 7, 1.0)])
    _, _, offsets = assert_parity(implementation, logprobs, 0.95, [5, 4, 3, 2, 1, 0])
    sizes = offsets.diff().tolist()
    assert max(sizes) > LARGE * 6 / 7
    assert min(sizes) < 100


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_one_batch_may_have_different_thresholds(implementation):
    # With p = 1, no block is tried, and these rows' sets come last.
    logprobs = torch.cat([model_like(1, LARGE, std=std, seed=9) for std in (7, 0.1, 7, 0.0, 7)])
    assert_parity(implementation, logprobs, [1.0, 0.95, 0.95, 1.0, 0.0], [5, 4, 3, 2, 1])


@pytest.mark.parametrize("vocab", [512, LARGE])
def test_a_set_does_not_hold_the_sorted_row_in_memory(vocab):
    token_ids, logprobs, _ = by_torch(model_like(1, vocab), 0.95)
    for values in (token_ids, logprobs):
        assert values.untyped_storage().nbytes() == values.nbytes


@pytest.mark.parametrize("vocab", sorted({512, 8_257, LARGE}))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_are_mostly_impossible(implementation, vocab):
    logprobs = torch.full((5, vocab), -torch.inf)
    logprobs[0, vocab - 1] = 0.0  # one-hot at the last id
    logprobs[1, [3, 5, vocab // 2]] = torch.tensor([0.5, 0.25, 0.25]).log()
    logprobs[2, 100:400] = -float(np.log(300))  # more ties than one pass examines; no other token is possible
    logprobs[3] = torch.finfo(torch.float32).min  # SGLang's value for -inf
    logprobs[3, 7] = 0.0
    for p in (0.4, 0.5 + 1e-5, 0.95, 1.0):
        _, values, _ = assert_parity(implementation, logprobs, p)
        assert values.min() > torch.finfo(torch.float32).min
        assert_parity(implementation, logprobs, p, [0, 0, 0, 0, 0])
    ids, _, offsets = IMPLEMENTATIONS[implementation](logprobs, 1.0, [9, 9, 9, 9, 9])
    assert offsets.tolist() == [0, 2, 6, 307, 309, 310]
    assert ids[[0, 1]].tolist() == [vocab - 1, 9]
    assert ids[307:].tolist() == [7, 9, 9]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_at_the_cutoff_are_all_kept(implementation):
    vocab = 20_000
    weights = torch.full((1, vocab), 0.0)
    weights[0, [11, 17_000]] = 0.3
    weights[0, [19_999, 4, 9_000, 12]] = 0.1
    for p, expected in ((0.2, [11, 17_000]), (0.7, [11, 17_000, 4, 12, 9_000, 19_999])):
        ids, _, _ = IMPLEMENTATIONS[implementation](weights.log(), p)
        assert ids.tolist() == expected


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_uniform_row_is_kept_whole(implementation):
    logprobs = torch.tensor([uniform(20_000)])
    ids, _, _ = IMPLEMENTATIONS[implementation](logprobs, 0.1)
    assert torch.equal(ids, torch.arange(20_000, dtype=torch.int32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_are_not_normalized(implementation):
    # The rows sum to less and to more than 1. p = 1 keeps every token of both.
    logprobs = model_like(2, 9_000) + torch.tensor([[-0.5], [1e-3]])
    for p in (0.5, 0.7, 0.95, 1.0):
        assert_parity(implementation, logprobs, p)
    _, _, offsets = IMPLEMENTATIONS[implementation](logprobs, [0.7, 1.0])
    assert offsets.tolist() == [0, 9_000, 18_000]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_sums_do_not_overflow(implementation):
    logprobs = torch.zeros(1, 151_936)
    logprobs[0, -500:] = -1.0
    for p in (1e-9, 0.9999):
        _, _, offsets = IMPLEMENTATIONS[implementation](logprobs, p)
        assert offsets.tolist() == [0, 151_436]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zeros_of_both_signs_are_tied(implementation):
    logprobs = torch.full((2, 9_000), -torch.inf)
    logprobs[0, [5, 8]] = torch.tensor([0.0, -0.0])
    logprobs[1, [5, 8]] = torch.tensor([-0.0, 0.0])
    ids, _, _ = assert_parity(implementation, logprobs, 0.9)
    assert ids.tolist() == [5, 8, 5, 8]


@pytest.mark.parametrize("vocab", [100, 9_000])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_thresholds_per_row(implementation, vocab):
    logprobs = model_like(7, vocab, std=3)
    p = [0.0, 0.95, 0.3, 0.0, 0.0, 1.0, 0.0]
    sampled = torch.tensor([-5, 0, 1, vocab, 2, 3, 4])  # ignored for rows with p = 0
    assert_parity(implementation, logprobs, p, sampled)
    _, _, offsets = assert_parity(implementation, logprobs, torch.tensor(p, dtype=torch.float64))
    assert (offsets.diff() == 0).tolist() == [at == 0 for at in p]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_with_p_zero_are_not_read(implementation):
    logprobs = model_like(4, 9_000)
    logprobs[[0, 2]] = torch.nan
    assert_parity(implementation, logprobs, [0.0, 0.5, 0.0, 0.5])


@pytest.mark.parametrize("shape", [(0, 512), (0, LARGE), (1, 1), (1, LARGE)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_smallest_batches(implementation, shape):
    logprobs = torch.log_softmax(torch.zeros(shape), -1)
    _, _, offsets = assert_parity(implementation, logprobs, 0.9, [0] * shape[0])
    assert offsets.shape == (shape[0] + 1,)
    assert_parity(implementation, logprobs, 0.0)
    assert_parity(implementation, logprobs, [0.9] * shape[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_strides_are_accepted_and_input_is_not_modified(implementation):
    padded = model_like(3, 9_100)
    before = padded.clone()
    for view in (padded[:, :9_001], padded[:, 50:], padded[::2], padded[:, :9_001].t().contiguous().t()):
        assert_parity(implementation, view, 0.9, [8_000] * len(view))
    assert torch.equal(padded, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_do_not_require_grad(implementation):
    logprobs = model_like(2, 9_000).requires_grad_()
    _, values, _ = IMPLEMENTATIONS[implementation](logprobs, 0.9, [1, 2])
    assert not values.requires_grad


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_full_model_vocabulary(implementation):
    logprobs = model_like(2, 151_936)
    assert_parity(implementation, logprobs, 0.95, [0, 151_935])


@st.composite
def batches(draw):
    """Draw small rows from integer weights, with many ties and impossible tokens."""
    vocab = draw(st.integers(1, 70))
    weight = st.one_of(st.sampled_from([0, 0, 1, 1, 1, 2, 3]), st.integers(0, 1000))
    rows = draw(st.lists(st.lists(weight, min_size=vocab, max_size=vocab), max_size=6))
    weights = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), vocab)
    logprobs = (weights / weights.sum(1, keepdim=True).clamp(min=1)).log().to(draw(st.sampled_from(DTYPES)))
    levels = st.sampled_from([0.0, 1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999, 1.0])
    p = draw(levels | st.lists(levels, min_size=len(rows), max_size=len(rows)))
    ids = st.lists(st.integers(0, vocab - 1), min_size=len(rows), max_size=len(rows))
    return logprobs, p, draw(st.none() | ids)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(batch=batches())
@settings(max_examples=30 if IS_INTERPRETED else 400, deadline=None)
def test_any_small_batch(implementation, batch):
    assert_parity(implementation, *batch)


@contextmanager
def small_blocks(implementation):
    if implementation == "torch":
        with mock.patch.multiple(extraction_torch, _BLOCK=4, _ATTEMPTS=(2, 5), _WHOLE_VALUES=100):
            yield
    else:
        from sglang_topp.nucleus import top_p_triton

        with mock.patch.multiple(top_p_triton, _BLOCK=4, _LANES=1, _FEW_BLOCKS=2):
            yield


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(batch=batches())
@settings(max_examples=30 if IS_INTERPRETED else 600, deadline=None)
def test_any_small_batch_in_small_blocks(implementation, batch):
    # With blocks this small, rows pass through different combinations of the stages.
    with small_blocks(implementation):
        assert_parity(implementation, *batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    torch.set_default_dtype(dtype)
    try:
        ids, _, _ = top_p_candidates(torch.tensor([[-0.1, -3.0]], dtype=torch.float32), 0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ids.tolist() == [0]


def test_result_constructs_candidate_sets():
    sampled = torch.tensor([5, 6, 7], dtype=torch.int32)
    ids, values, offsets = top_p_candidates(model_like(3, 9_000), 0.9, sampled)
    sets = CandidateSets(ids.numpy(), values.numpy(), offsets.numpy(), sampled.numpy())
    assert sets.sampled_ids.tolist() == [5, 6, 7]
    assert (sets.log_kept_mass >= np.log(np.float32(0.9))).all()


# -- invalid input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 50, 9_000, 9_001] + [151_936] * (not IS_INTERPRETED))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_is_refused_at_any_position(implementation, vocab, dtype):
    for place in {0, vocab // 2, vocab - 1}:
        logprobs = torch.log_softmax(torch.zeros(3, vocab), -1).to(dtype)
        logprobs[1, place] = torch.nan
        with pytest.raises(InvalidInputError, match="logprobs: row 1 holds NaN"):
            IMPLEMENTATIONS[implementation](logprobs, 0.9)
        logprobs[1] = torch.nan
        with pytest.raises(InvalidInputError, match="logprobs: row 1 holds NaN"):
            IMPLEMENTATIONS[implementation](logprobs, [0.0, 0.9, 1.0])


@pytest.mark.parametrize("vocab", [50, 9_000])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_are_refused(implementation, vocab):
    logprobs = model_like(3, vocab)
    logprobs[2, vocab - 1] = 1.5
    with pytest.raises(InvalidInputError, match=r"row 2 holds 1\.5, which is above 0"):
        IMPLEMENTATIONS[implementation](logprobs, 0.9)
    logprobs[2, vocab - 1] = torch.inf
    with pytest.raises(InvalidInputError, match="row 2 holds inf"):
        IMPLEMENTATIONS[implementation](logprobs, 0.9)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_highest_log_prob_that_is_accepted(implementation, dtype):
    logprobs = torch.full((2, 50), -torch.inf, dtype=dtype)
    logprobs[:, 7] = MAX_LOGPROB
    ids, values, offsets = assert_parity(implementation, logprobs, 0.9)
    CandidateSets(ids.numpy(), values.numpy(), offsets.numpy(), ids.numpy())
    logprobs[1, 7] *= 1 + torch.finfo(dtype).eps
    with pytest.raises(InvalidInputError, match=r"row 1 holds .*, which is above 0"):
        IMPLEMENTATIONS[implementation](logprobs, 0.9)


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (float("nan"), "p: got nan"),
        (-0.1, "p: got -0.1, expected 0 to 1"),
        (1.0000001, "p: got 1.0000001, expected 0 to 1"),
        (2, "p: got 2"),
        (True, "p: got bool"),
        ("0.9", "p: got "),
        (None, "p: got object"),
        ([0.5, float("nan"), 0.5], "p: got nan for row 1"),
        ([0.5, 0.5, -1.0], "p: got -1.0 for row 2"),
        ([0.5, None, 0.5], "p: got object"),
        ([0.5, [0.5], 0.5], "p: expected a float or 3 floats"),
        ([0.5, 0.5], r"p: got shape \[2\], expected a float or \[3\]"),
        (torch.full((3, 1), 0.5), r"p: got shape \[3, 1\]"),
        (torch.tensor([0.5, 0.5, torch.nan]), "p: got nan for row 2"),
    ],
)
def test_invalid_thresholds_are_refused(p, message):
    with pytest.raises(InvalidInputError, match=message):
        top_p_candidates(model_like(3, 50), p)


@pytest.mark.parametrize(
    "p", [1, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), (0.5, 0.5), np.array([0.5, 1])]
)
def test_valid_thresholds_are_accepted(p):
    assert_parity("dispatch", model_like(2, 50), p)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([0, 50, 1], "sampled_ids: got 50 for row 1, expected 0 to 49"),
        ([0, 1, -1], "sampled_ids: got -1 for row 2, expected 0 to 49"),
        ([0, 1], r"sampled_ids: got int64 \[2\], expected integers \[3\]"),
        ([0.0, 1.0, 2.0], r"sampled_ids: got float32 \[3\]"),
        ([True, False, True], r"sampled_ids: got bool \[3\]"),
        (torch.zeros(3, 1, dtype=torch.int64), r"sampled_ids: got int64 \[3, 1\]"),
        (["a", "b", "c"], "sampled_ids: expected 3 integers"),
        ([0, 1, 2**70], "sampled_ids: expected 3 integers"),
    ],
)
def test_invalid_sampled_ids_are_refused(sampled, message):
    with pytest.raises(InvalidInputError, match=message):
        top_p_candidates(model_like(3, 50), 0.9, sampled)


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (torch.zeros(5), r"logprobs: got float32 \[5\], expected a float tensor \[B, V\]"),
        (torch.zeros(1, 2, 3), r"logprobs: got float32 \[1, 2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.int64), r"logprobs: got int64 \[2, 3\]"),
        (torch.zeros(2, 0), "logprobs: got a vocabulary of 0"),
        (torch.zeros(1).expand(2, (1 << 24) + 1), "got a vocabulary of 16777217, expected 1 to 2"),
        ([[0.0]], "logprobs: got list"),
    ],
)
def test_invalid_logprobs_are_refused(logprobs, message):
    with pytest.raises(InvalidInputError, match=message):
        top_p_candidates(logprobs, 0.9)
