"""Staged extraction: rows that fit and rows that do not, device errors, and no waits.

`test_triton_kernels` runs this file on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_topp.nucleus import gpu_extraction, support_candidates, top_p_candidates, top_p_triton
from tests.fake_gpu import forbid_waits, gpu
from tests.nucleus import reference

VOCAB = 200


def rows_of_sizes(sizes: list[int]) -> Tensor:
    """Return log-probs whose nuclei at p = 0.9 have these sizes, at random token ids."""
    logprobs = torch.full((len(sizes), VOCAB), -20.0)
    generator = torch.Generator().manual_seed(1)
    for row, size in enumerate(sizes):
        logprobs[row, torch.randperm(VOCAB, generator=generator)[:size]] = -float(np.log(size))
    return logprobs


def on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


def take(
    logprobs: Tensor, p: list[float], sampled: list[int] | None, capacity: int
) -> gpu_extraction.StagingArea:
    """Stage the candidates on the GPU without a wait, and copy them to the host."""
    with gpu():
        on_gpu = logprobs.to("cuda")
        drawn = None if sampled is None else torch.tensor(sampled).to("cuda")
        with forbid_waits():
            found = gpu_extraction.find_top_p(on_gpu, np.array(p, np.float64), drawn)
            sets = found.stage(capacity).map(on_host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return sets


def assert_exact(
    got: gpu_extraction.StagingArea, logprobs: Tensor, p: list[float], sampled: list[int] | None
) -> None:
    """Check that every row that fits has its exact set, and that every other row is left out."""
    token_ids, values, offsets = got.sets()
    p = reference.settled(logprobs, p, sampled, got.sizes, 3.1e-7).tolist()
    for row in range(len(logprobs)):
        one = slice(row, row + 1)
        ids, expected, _ = reference.top_p_candidates(logprobs[one], p[one], sampled and sampled[one])
        assert got.sizes[row] == len(ids)
        assert (row in got.left_out) == (len(ids) > 0 and got.rows[row, 1] < 0)
        own = slice(offsets[row], offsets[row + 1])
        if row in got.left_out:
            assert not len(token_ids[own])
        else:
            assert token_ids[own].tolist() == ids.tolist()
            assert values[own].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("sizes", "capacity", "left_out"),
    [
        ([5], 5, []),
        ([6], 5, [0]),
        ([3, 2], 5, []),
        ([3, 3], 5, [1]),
        ([9, 3, 9, 2], 5, [0, 2]),
        ([7, 8, 9], 5, [0, 1, 2]),
        ([1] * 5, 5, []),
        ([1] * 7, 5, [5, 6]),
        ([3], 0, [0]),
    ],
)
def test_rows_that_do_not_fit_are_left_out(sizes, capacity, left_out):
    logprobs, p = rows_of_sizes(sizes), [0.9] * len(sizes)
    got = take(logprobs, p, None, capacity)
    assert got.left_out.tolist() == left_out
    assert_exact(got, logprobs, p, None)


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.0, 0.9])), max_size=9), st.integers(0, 40))
@settings(max_examples=15, deadline=None)
def test_any_sizes_and_any_capacity(rows, capacity):
    logprobs, p = rows_of_sizes([size for size, _ in rows]), [p for _, p in rows]
    sampled = [7 * row for row in range(len(rows))]
    got = take(logprobs, p, sampled, capacity)
    assert_exact(got, logprobs, p, sampled)


def test_no_rows_and_no_requesting_rows():
    for logprobs, p in ((torch.empty(0, VOCAB), []), (torch.full((3, VOCAB), torch.nan), [0.0] * 3)):
        got = take(logprobs, p, [0] * len(p), 4)
        assert not got.left_out.size
        assert not got.problems(VOCAB)
        assert got.sets()[2].tolist() == [0] * (len(p) + 1)


def test_a_bad_row_fails_alone():
    logprobs = rows_of_sizes([3] * 5)
    logprobs[0, VOCAB - 1], logprobs[2, 1] = torch.nan, 4.5
    p, sampled = [0.9] * 5, [0, 1, 2, VOCAB, 4]
    got = take(logprobs, p, sampled, 100)
    problems = got.problems(VOCAB)
    assert {row: str(problem) for row, problem in problems.items()} == {
        0: "logprobs: row 0 holds NaN; expected natural log-probs, at most 0",
        2: "logprobs: row 2 holds 4.5, which is above 0; expected natural log-probs, at most 0",
        3: f"sampled_ids: got {VOCAB} for row 3, expected 0 to {VOCAB - 1}",
    }
    assert got.sets()[2].tolist() == [0, 0, 4, 4, 4, 8]


def test_lowest_value_counts_as_zero_probability():
    logprobs = rows_of_sizes([3])
    logprobs[0, logprobs[0] == -20] = -1e30
    got = take(logprobs, [1.0], [int(logprobs[0].argmin())], VOCAB)
    assert got.sizes[0] == VOCAB
    with gpu():
        found = gpu_extraction.find_top_p(logprobs.to("cuda"), np.ones(1), None, lowest=-1e20)
        few = found.stage(9).map(on_host)
    assert few.sets()[2].tolist() == [0, 3]


def test_results_are_identical_from_run_to_run():
    logprobs = torch.log_softmax(torch.randn(4, VOCAB), -1)
    first, second = (take(logprobs, [0.95] * 4, [1] * 4, 4 * VOCAB) for _ in range(2))
    assert (first.rows == second.rows).all()
    filled = first.sizes.sum()
    assert (first.entries[:, :filled] == second.entries[:, :filled]).all()


def test_rows_are_processed_in_several_tiles():
    logprobs = torch.log_softmax(torch.randn(20, 50), -1)
    with contextlib.ExitStack() as stack:
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        patch.setattr("sglang_topp.nucleus.top_p_triton._LANES", 2)
        patch.setattr("sglang_topp.nucleus.top_p_triton._FEW_BLOCKS", 2)
        patch.setattr("sglang_topp.nucleus.top_p_triton._BLOCK", 4)
        got = take(logprobs, [0.9] * 20, list(range(20)), 1 << 12)
    assert_exact(got, logprobs, [0.9] * 20, list(range(20)))


def random_support(rows: int, width: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, a mask of the columns that could be drawn, and the token ids of the columns."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(torch.randn(rows, VOCAB, generator=generator), -1)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:width] for _ in range(rows)]).int()
    return logprobs, torch.rand(rows, width, generator=generator) < 0.2, ids


@pytest.mark.parametrize("capacity", [0, 1, 10_000])
@pytest.mark.parametrize("width", [40, VOCAB])
def test_sampler_support_equals_the_reference(width, capacity):
    logprobs, is_drawn, ids = random_support(4, width)
    rows, sampled = [1, 3], [5, 6]
    names = None if width == VOCAB else ids[rows]
    with gpu():
        arguments = [each.to("cuda") for each in (logprobs[rows], is_drawn[rows])]
        names_there = None if names is None else names.to("cuda")
        sampled_there = torch.tensor(sampled).to("cuda")
        with forbid_waits():
            sets = gpu_extraction.find_support(*arguments, names_there, sampled_there)
            found = sets.stage(capacity).map(on_host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    want = reference.support_candidates(
        logprobs[rows], is_drawn[rows].float(), names, sampled_ids=torch.tensor(sampled)
    )
    assert found.sizes.tolist() == want[2].diff().tolist()
    sizes = want[2].diff().tolist()
    assert found.left_out.tolist() == [row for row in range(2) if sum(sizes[: row + 1]) > capacity]
    if capacity == 10_000:
        for mine, theirs in zip(found.sets(), want, strict=True):
            assert mine.tolist() == theirs.tolist()


def test_invalid_sampler_support_is_named_per_row():
    logprobs, is_drawn, ids = random_support(5, 40)
    logprobs[0, ids[0, 0]], logprobs[1, ids[1, 0]] = torch.nan, -torch.inf
    is_drawn[:, 0] = True
    ids[2, 0] = VOCAB + 3
    sampled = torch.tensor([0, 0, 0, -1, 0])
    with gpu():
        there = [each.to("cuda") for each in (logprobs, is_drawn, ids, sampled)]
        found = gpu_extraction.find_support(*there).stage(10_000).map(on_host)
    problems = found.problems(VOCAB)
    assert [str(problems[row]) for row in range(4)] == [
        "logprobs: row 0 holds NaN; expected natural log-probs, at most 0",
        f"weights: row 1 can draw token {int(ids[1, 0])}, whose log-prob is -inf; expected one above zero"
        " probability",
        f"token_ids: got {VOCAB + 3} in row 2, outside of 0 to {VOCAB - 1}",
        f"sampled_ids: got -1 for row 3, expected 0 to {VOCAB - 1}",
    ]
    assert 4 not in problems


def test_public_functions_accept_gpu_tensors():
    logprobs = rows_of_sizes([3, 70])
    with gpu():
        there = logprobs.to("cuda")
        for got, want in (
            (top_p_candidates(there, 0.9, [1, 2]), reference.top_p_candidates(logprobs, 0.9, [1, 2])),
            (
                support_candidates(there, (there > -19).float(), sampled_ids=[1, 2]),
                reference.support_candidates(logprobs, (logprobs > -19).float(), sampled_ids=[1, 2]),
            ),
        ):
            assert [each.cpu().tolist() for each in got] == [each.tolist() for each in want]


def test_forbid_waits_detects_waits():
    """The unstaged extraction waits for the device, so the check can fail."""
    from sglang_topp.nucleus import extraction_torch
    from sglang_topp.nucleus.argument_checks import check_top_p_arguments

    with gpu():
        if torch.cuda.is_available():
            return
        there = rows_of_sizes([3]).to("cuda")
        with forbid_waits(), pytest.raises(AssertionError, match="the host would wait"):
            extraction_torch.top_p_candidates(*check_top_p_arguments(there, 0.9, None))
        for waits in (
            lambda: bool(there.any()),
            lambda: there[there > 0],
            lambda: there.to("cpu"),
            lambda: torch.zeros(3).to(there.device),
            lambda: torch.repeat_interleave(torch.ones(2, dtype=torch.int64, device="cuda")),
        ):
            with forbid_waits(), pytest.raises(AssertionError, match="the host would wait"):
                waits()


@triton.jit
def store_masses(values_ptr, masses_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(masses_ptr + at, top_p_triton._mass(tl.load(values_ptr + at)))


def test_probabilities_are_as_accurate_as_proven() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.cat(
        [1e-3 - torch.rand(1 << 15, generator=generator) * most for most in (0.7, 13, 60, 3e38)]
    )
    logprobs[:3] = torch.tensor([-torch.inf, torch.finfo(torch.float32).min, 0.0])
    with gpu():
        masses = torch.empty(len(logprobs), dtype=torch.int64, device="cuda")
        store_masses[(1,)](logprobs.to("cuda"), masses, SIZE=len(logprobs))
        got = masses.cpu()
    exact = logprobs.double().exp() * 2.0**top_p_triton.UNIT_BITS
    assert got[2] == 2**top_p_triton.UNIT_BITS
    assert ((got - exact).abs() <= 3e-7 * exact + 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_likely_neighbors_need_few_blocks(dtype: torch.dtype) -> None:
    """The maxima of the blocks alone do not reach p, because likely tokens are in the same block."""
    generator = torch.Generator().manual_seed(3)
    vocab, block = 150 * 64 - 7, 64
    logits = torch.randn(7, vocab, generator=generator)
    logits[0, 11], logits[0, 13] = 17.0, 16.9
    logits[1, 640:704] = 14.0  # one whole block of ties
    logits[2, ::block] = 9.0  # as many equal maxima as blocks
    logits[2, 1::block] = 9.0
    logits[3, 64:128] = 16.0 - torch.arange(64) / 8
    logits[3, 4096:4128] = 15.0 - torch.arange(32) / 8
    logits[4] *= 0.01  # the nucleus needs nearly all blocks
    logits[5, 300:310], logits[5, 9000] = 12.0, 11.0  # 64 blocks reach 0.95, but not 0.9999
    logits[6, 5], logits[6, 6] = 30.0, 29.9
    logprobs = torch.log_softmax(logits, 1).to(dtype)
    for p in (0.5, 0.95, 0.9999, 1.0):
        got = take(logprobs, [p] * 7, list(range(7)), 7 * vocab)
        assert_exact(got, logprobs, [p] * 7, list(range(7)))
    with gpu():
        limits = torch.full((7,), int(0.95 * 2**top_p_triton.UNIT_BITS)).to("cuda")
        cuts = top_p_triton.find_cuts(logprobs.to("cuda"), limits, None, torch.finfo(dtype).min)
        active = cuts.cuts[:, 1].cpu().tolist()
    assert cuts.block == block
    assert [count <= block for count in active] == [True, True, False, True, False, True, True], active
