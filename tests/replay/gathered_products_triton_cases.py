"""The Triton kernels give the sums of the plain torch products.

`test_gathered_products_triton` runs this file, on a GPU or in the interpreter.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from replay_oracle import EMPTY, SINGLE, error, leaves, mixed, random_sets, targets_of

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import candidate_index, gathered_products_triton, lm_head, score
from sglang_topp.replay.candidate_index import DenseShare, Entries, Segments
from tests.fake_gpu import forbid_waits, gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def no_dense_positions(monkeypatch):
    """The products over the whole vocabulary are no kernels of ours."""
    monkeypatch.setitem(candidate_index.DENSE_SHARES, "head", DenseShare(2, 0))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def indices(high: int, length: int) -> torch.Tensor:
    return torch.randint(high, (length,), generator=torch.Generator().manual_seed(length)).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("entries", "width"), [(0, 5), (1, 1), (9, 33), (13, 1500)])
def test_gathered_dot(entries, width, dtype):
    left, right = draw(7, width, dtype=dtype), draw(11, width, dtype=dtype)
    rows = indices(7, entries).sort().values, indices(11, entries)
    pairs = Entries(*rows, num_positions=7, num_ids=11)
    got = gathered_products_triton.gathered_dot(left, right, pairs, out_dtype=torch.float32)
    exact = (left.double()[rows[0]] * right.double()[rows[1]]).sum(1)
    assert got.dtype == torch.float32
    assert error(got, exact) < 1e-6


def segments_of(segment: torch.Tensor, num_segments: int, rows: torch.Tensor) -> Segments:
    """Return segments whose entries read `rows`. `segment` is ascending."""
    return Segments(rows, torch.searchsorted(segment, torch.arange(num_segments + 1, device=DEVICE)))


def check_sum(segments: torch.Tensor, num_segments: int, width: int, dtype: torch.dtype) -> None:
    source, rows, weights = draw(6, width, dtype=dtype), indices(6, len(segments)), draw(len(segments))
    got = gathered_products_triton.segment_sum(
        source, segments_of(segments, num_segments, rows), weights, out_dtype=dtype
    )
    exact = torch.zeros(num_segments, width, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, segments, weights.double()[:, None] * source.double()[rows])
    assert got.dtype == dtype
    assert error(got, exact) < max(2e-6, torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 1500])
def test_segment_sum(width, dtype):
    check_sum(torch.tensor([0, 0, 2, 3, 3, 3, 7], device=DEVICE), 9, width, dtype)


@pytest.mark.parametrize("piece", [1, 2, 3, 5])
def test_segment_sum_cuts_long_segments(piece, monkeypatch):
    """Segment lengths around the size of a piece: shorter, equal, one more, and many pieces."""
    monkeypatch.setattr(gathered_products_triton, "_PIECE", piece)
    counts = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 11, 1, 10, 0])
    segments = torch.repeat_interleave(counts).to(DEVICE)
    check_sum(segments, len(counts), 5, torch.float32)
    check_sum(segments[:0], 3, 5, torch.float32)
    check_sum(torch.full((23,), 1, device=DEVICE), 2, 5, torch.float32)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece", [1, 3, 128])
def test_segment_add(piece, out_dtype, monkeypatch):
    """Rows without an entry stay unchanged to the last bit. The others are rounded once."""
    monkeypatch.setattr(gathered_products_triton, "_PIECE", piece)
    counts = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 11, 1, 10, 0])
    segments = torch.repeat_interleave(counts).to(DEVICE)
    source, rows, weights = draw(6, 5), indices(6, len(segments)), draw(len(segments))
    for before in (draw(12, 5, dtype=out_dtype), draw(5, 12, dtype=out_dtype).t()):
        out, exact = before.clone(), before.double()
        few = Entries(rows, segments, num_positions=6, num_ids=12).by_distinct_id
        gathered_products_triton.segment_add(out, source, few, weights)
        exact.index_add_(0, segments, weights.double()[:, None] * source.double()[rows])
        assert error(out, exact) < max(2e-6, torch.finfo(out_dtype).eps)
        assert torch.equal(out[counts == 0], before[counts == 0])
        none = Entries(rows[:0], segments[:0], num_positions=6, num_ids=12).by_distinct_id
        gathered_products_triton.segment_add(out, source, none, weights[:0])
        assert error(out, exact) < max(2e-6, torch.finfo(out_dtype).eps)


def test_rows_far_apart_in_memory():
    wide = draw(5, 12)[:, ::2]
    assert wide.stride() == (12, 2)
    segments = segments_of(torch.tensor([0, 0, 1, 1], device=DEVICE), 2, indices(5, 4))
    got = gathered_products_triton.segment_sum(wide, segments, draw(4), out_dtype=torch.float32)
    want = lm_head.segment_sum(wide, segments, draw(4), out_dtype=torch.float32)
    assert error(got, want) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_grad", ["dense", "buffer"])
def test_the_head_on_triton_equals_the_plain_one(weight_grad, dtype, monkeypatch):
    monkeypatch.setattr(gathered_products_triton, "_PIECE", 4)
    sets = random_sets([3, SINGLE, 7, EMPTY, 30, 2, 12], 30)
    targets = targets_of(sets).to(DEVICE)

    def run(backend):
        hidden, weight, bias = leaves(
            draw(len(sets), 20, dtype=dtype), draw(30, 20, dtype=dtype), draw(30, dtype=dtype)
        )
        buffer = draw(30, 20)
        got = score(
            hidden,
            weight,
            targets,
            sets,
            bias=bias,
            softcap=3.0,
            logit_scale=0.4,
            entropy=True,
            weight_grad=buffer if weight_grad == "buffer" else weight_grad,
            backend=backend,
        )
        mixed({"a": got.logprobs.cpu(), "b": got.entropy.cpu()}).backward()
        of_weight = buffer if weight_grad == "buffer" else weight.grad
        return got.logprobs, got.entropy, hidden.grad, of_weight, bias.grad

    for mine, theirs in zip(run("triton"), run("torch"), strict=True):
        assert mine.dtype == theirs.dtype
        assert error(mine, theirs) < max(2e-6, torch.finfo(mine.dtype).eps)


@pytest.mark.parametrize("weight_grad", ["dense", "buffer"])
def test_later_scores_over_the_same_tensors_do_not_wait_for_the_gpu(weight_grad):
    """Run the policy's forward and backward after the reference was scored over the same sets."""
    sets = random_sets([3, SINGLE, 7, EMPTY, 30, 2, 12], 30)
    options = {"softcap": 3.0, "logit_scale": 0.4, "entropy": True, "per_candidate": True}

    def run(candidates, targets, kl_to, temperature, *, later) -> list[torch.Tensor]:
        inputs = draw(len(sets), 20), draw(30, 20), draw(30)
        hidden, weight, bias = (x.to(targets.device).requires_grad_() for x in inputs)
        buffer = torch.zeros_like(weight)
        ones = torch.ones(len(sets), device=targets.device)
        with forbid_waits() if later else contextlib.nullcontext():
            got = score(
                hidden,
                weight,
                targets,
                candidates,
                bias=bias,
                kl_to=kl_to,
                temperature=temperature,
                weight_grad=buffer if weight_grad == "buffer" else weight_grad,
                **options,
            )
            loss = ((got.logprobs - 0.5 * got.entropy + got.kl) * ones).sum() + got.candidate_logprobs.sum()
            loss.backward()
        gradient = buffer if weight_grad == "buffer" else weight.grad
        return [
            got.logprobs.detach(),
            got.entropy.detach(),
            got.kl.detach(),
            hidden.grad,
            gradient,
            bias.grad,
        ]

    arguments = targets_of(sets), torch.tensor(sets.logprobs), 0.5 + draw(len(sets)).cpu().abs()
    want = run(sets, *arguments, later=False)
    with gpu():
        tensors = sets.to_torch("cuda")
        arguments = [x.to("cuda") for x in arguments]
        first = run(tensors, *arguments, later=False)
        second = run(tensors, *arguments, later=True)
    for mine, again, expected in zip(first, second, want, strict=True):
        assert torch.equal(mine.cpu(), again.cpu())
        assert error(again.cpu(), expected.cpu()) < 2e-6


def test_float64_is_refused():
    sets = random_sets([2], 4)
    hidden, weight = draw(1, 3).double(), draw(4, 3).double()
    with pytest.raises(InvalidInputError, match="backend: 'triton' sums in float32"):
        score(hidden, weight, targets_of(sets).to(DEVICE), sets, backend="triton")
