"""Distillation over a teacher's candidate sets, against dense float64 distributions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distillation_oracle import distillation, kl_of, teacher_sets
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_oracle import error, head_logits, leaves
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay import distillation_loss
from tests.documentation_blocks import block_with

T, V, H = 11, 61, 19
DIRECTIONS = ("forward", "reverse")
FORMS = [(direction, outside) for direction in DIRECTIONS for outside in ("tail", "renormalized")]
EMPTY, SINGLE, WHOLE = 3, 5, 7

CASES = {
    "plain": {},
    "bias": {"bias": True},
    "temperature": {"temperature": 0.6},
    "temperatures": {"temperature": torch.linspace(0.3, 1.7, T)},
    "softcap": {"softcap": 2.5},
    "logit scale": {"logit_scale": 0.3},
    "everything": {
        "bias": True,
        "temperature": torch.linspace(0.3, 1.7, T),
        "softcap": 2.5,
        "logit_scale": 0.3,
    },
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def make(dtype: torch.dtype, *, bias: bool = False):
    return draw(T, H).to(dtype), draw(V, H).to(dtype), draw(V).to(dtype) if bias else None


@pytest.fixture
def sets() -> CandidateSets:
    """Return sets of all kinds: empty, a single candidate, and the whole vocabulary."""
    logits = 3 * draw(T, V, seed=1)
    logits[SINGLE, 4] = 14
    usual = teacher_sets(logits, 0.9, [4] * T, empty=(EMPTY,))
    whole = teacher_sets(logits, 1.0, [4] * T)
    sets = CandidateSets.concat([usual[:WHOLE], whole[WHOLE : WHOLE + 1], usual[WHOLE + 1 :]])
    assert sets.sizes[[EMPTY, SINGLE, WHOLE]].tolist() == [0, 1, V]
    return sets


def loss_of(kl: torch.Tensor) -> torch.Tensor:
    """Return a scalar in which each position has a different weight."""
    return (kl * torch.linspace(-1, 2, len(kl), dtype=torch.float64)).sum()


@pytest.mark.parametrize(("direction", "outside"), FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients_equal_the_dense_float64_oracle(dtype, case, direction, outside, sets):
    options = dict(CASES[case])
    inputs = make(dtype, bias=options.pop("bias", False))
    exact_leaves = leaves(*inputs, dtype=torch.float64)
    exact = distillation(head_logits(*exact_leaves, **options), sets, direction, outside)
    loss_of(exact).backward()

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Sums run in float32 and are rounded to the input's dtype once.
    bound = {torch.float64: 1e-11, torch.float32: 5e-6}.get(dtype, torch.finfo(dtype).eps)
    for chunk_rows in (4, T):
        ours = leaves(*inputs)
        got = distillation_loss(
            *ours[:2],
            sets,
            direction=direction,
            outside=outside,
            bias=ours[2],
            chunk_rows=chunk_rows,
            **options,
        )
        loss_of(got.kl).backward()
        assert got.kl.dtype == wide
        assert error(got.kl, exact) < (1e-12 if wide == torch.float64 else 2e-6)
        assert got.counted.tolist() == [t != EMPTY for t in range(T)]
        for leaf, exact_leaf in zip(ours, exact_leaves, strict=True):
            if leaf is not None:
                assert leaf.grad.dtype == dtype
                assert error(leaf.grad, exact_leaf.grad) < bound


@pytest.mark.parametrize("chunk_rows", [1, 3, None])
@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_gradcheck(direction, outside, chunk_rows):
    """Compare with finite differences, which share no formula with the implementation."""
    vocab, width = 7, 3
    logits = draw(5, vocab)
    logits[3, 2] = 9
    usual = teacher_sets(logits, 0.7, [2] * 5, empty=(1,))
    sets = CandidateSets.concat([usual[:4], teacher_sets(logits, 1.0, [2] * 5)[4:]])
    assert sets.sizes[[1, 3, 4]].tolist() == [0, 1, vocab]
    inputs = leaves(draw(5, width), draw(vocab, width), draw(vocab))

    def function(hidden, weight, bias):
        return distillation_loss(
            hidden,
            weight,
            sets,
            direction=direction,
            outside=outside,
            bias=bias,
            temperature=torch.linspace(0.3, 1.7, 5),
            softcap=2.5,
            logit_scale=0.4,
            chunk_rows=chunk_rows,
        ).kl

    assert torch.autograd.gradcheck(function, inputs)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    positions=st.integers(0, 6),
    vocab=st.integers(1, 40),
    p=st.sampled_from([1e-3, 0.3, 0.9, 0.999, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 8.0, 40.0]),
    student_spread=st.sampled_from([0.01, 1.0, 8.0, 40.0]),
    chunk_rows=st.sampled_from([1, 2, None]),
)
@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_any_teacher_and_any_student(
    direction, outside, seed, positions, vocab, p, spread, student_spread, chunk_rows
):
    """Value and gradient equal the oracle's. A merged KL is between 0 and the whole KL."""
    rng = np.random.default_rng(seed)
    teacher = torch.tensor(rng.normal(0, spread, (positions, vocab)))
    sets = teacher_sets(teacher, p, rng.integers(0, vocab, positions).tolist())
    # With a hidden size equal to the vocabulary and an identity head, any logits are possible.
    inputs = torch.tensor(rng.normal(0, student_spread, (positions, vocab))), torch.eye(vocab).double()
    (exact_hidden, exact_weight), (hidden, weight) = leaves(*inputs), leaves(*inputs)
    exact = distillation(exact_hidden @ exact_weight.t(), sets, direction, outside)
    got = distillation_loss(hidden, weight, sets, direction=direction, outside=outside, chunk_rows=chunk_rows)
    torch.testing.assert_close(got.kl, exact, rtol=1e-9, atol=1e-11)
    assert (got.kl >= 0).all()
    loss_of(got.kl).backward()
    if positions:
        loss_of(exact).backward()
        torch.testing.assert_close(hidden.grad, exact_hidden.grad, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(weight.grad, exact_weight.grad, rtol=1e-8, atol=1e-10)
    if outside == "tail":
        student, whole = torch.log_softmax(hidden.detach(), 1), torch.log_softmax(teacher, 1)
        for t, merged in enumerate(got.kl.tolist()):
            a, b = (whole[t], student[t]) if direction == "forward" else (student[t], whole[t])
            # The teacher's tail is exact to 1e-6, and at least 1e-6, so its log may be wrong by 1e-6 over it.
            is_outside = torch.ones(vocab, dtype=torch.bool)
            is_outside[torch.tensor(sets[t][0].astype("int64"))] = False
            tails = [float(each[t].exp()[is_outside].sum()) for each in (student, whole)]
            slack = 1e-6 * tails[0] / max(tails[1], 1e-6) if direction == "reverse" else 0.0
            assert merged <= float(kl_of(a, b)) * (1 + 1e-6) + 1e-4 + slack


@pytest.mark.parametrize(("direction", "outside"), FORMS)
@pytest.mark.parametrize("p", [0.5, 0.99, 1.0])
def test_a_student_that_is_the_teacher_has_neither_loss_nor_gradient(p, direction, outside):
    hidden, weight = leaves(draw(T, H), draw(V, H))
    sets = teacher_sets((hidden @ weight.t()).detach(), p, list(range(T)))
    got = distillation_loss(hidden, weight, sets, direction=direction, outside=outside)
    got.mean().backward()
    assert 0 <= float(got.kl.detach().max()) < 1e-12  # rounding errors of float32 log-probs enter it squared
    assert hidden.grad.abs().max() < 1e-5


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sets_of_the_whole_vocabulary_give_the_whole_kl(dtype, direction):
    """At p = 1 there is no tail, whatever the float32 log-probs sum to."""
    hidden, weight = leaves(draw(T, H).to(dtype), draw(V, H).to(dtype))
    teacher = 4 * draw(T, V, seed=3)
    sets = teacher_sets(teacher, 1.0, [0] * T)
    mass = np.exp(sets.logprobs, dtype=np.float64).reshape(T, V).sum(1)
    assert (mass > 1).any()
    assert (mass < 1).any()
    student = torch.log_softmax(hidden.double() @ weight.double().t(), 1)
    whole = torch.log_softmax(teacher, 1)
    a, b = (whole, student) if direction == "forward" else (student, whole)
    exact = (a.exp() * (a - b)).sum(1)
    for outside in ("tail", "renormalized"):
        got = distillation_loss(hidden, weight, sets, direction=direction, outside=outside)
        assert error(got.kl, exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_students_tail_of_next_to_nothing_or_next_to_all(direction, gap, dtype):
    """In float32, `1 - mass` cannot represent a tail below 6e-8."""
    sets = CandidateSets([0, 1], np.log([0.6, 0.3]), [0, 2], [0])
    for sign in (1, -1):
        logits = torch.tensor([[sign * gap, sign * gap - 1, 0.0, 0.3, -0.2]], dtype=torch.float64)
        exact_hidden, weight = leaves(logits, torch.eye(5).double())
        exact = distillation(exact_hidden, sets, direction, "tail")
        exact.sum().backward()
        hidden, weight = leaves(logits.to(dtype), torch.eye(5, dtype=dtype))
        got = distillation_loss(hidden, weight, sets, direction=direction, outside="tail")
        got.kl.sum().backward()
        # The logits themselves are rounded to float32.
        assert error(got.kl, exact) < (1e-6 if dtype == torch.float32 else 1e-12)
        torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mass", [1 - 1e-7, 1.0, 1 + 3e-7, 1.001])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_teachers_mass_that_is_rounded_to_one_or_above(mass, direction):
    """The forward KL uses no tail, the reverse KL the smallest one. Both are finite and at least 0."""
    sets = CandidateSets([2, 0], np.log([0.7 * mass, 0.3 * mass]), [0, 2], [0])
    assert abs(np.exp(sets.logprobs, dtype=np.float64).sum() - mass) < 1e-7
    hidden, weight = leaves(draw(1, H), draw(V, H))
    got = distillation_loss(hidden, weight, sets, direction=direction, outside="tail")
    student = torch.log_softmax(hidden @ weight.t(), 1)[0]
    inside = student[[2, 0]]
    tail = torch.log1p(-inside.exp().sum())
    teacher = torch.tensor([0.7, 0.3]).double()
    if direction == "forward":
        exact = (teacher * (teacher.log() - inside)).sum()
    else:
        exact = (inside.exp() * (inside - teacher.log())).sum() + tail.exp() * (tail - np.log(1e-6))
        exact = exact + np.log(max(mass, 1) + 1e-6) * tail.exp()  # they are made to add up to 1
    assert float(got.kl.detach()) == pytest.approx(float(exact.detach()), abs=3e-5)
    got.kl.sum().backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_a_sampled_token_that_the_teacher_rules_out_is_outside(direction, outside, lowest):
    hidden, weight = draw(2, H), draw(V, H)
    with_it = CandidateSets(
        [1, 2, 3, 5, 6], [*np.log([0.6, 0.3]), lowest, *np.log([0.5, 0.2])], [0, 3, 5], [3, 5]
    )
    without = CandidateSets([1, 2, 5, 6], np.log([0.6, 0.3, 0.5, 0.2]), [0, 2, 4], [1, 5])
    got, want = (
        distillation_loss(hidden, weight, sets, direction=direction, outside=outside).kl
        for sets in (with_it, without)
    )
    assert torch.equal(got, want)
    assert got.isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_single_candidate_is_a_choice_against_its_tail_only(direction, sets):
    hidden, weight = leaves(draw(T, H), draw(V, H))
    only = sets[SINGLE : SINGLE + 1]
    renormalized = distillation_loss(hidden[:1], weight, only, direction=direction, outside="renormalized")
    renormalized.kl.sum().backward()
    assert float(renormalized.kl.detach()) == 0
    assert renormalized.counted.all()
    assert not hidden.grad.any()
    tail = distillation_loss(hidden[:1], weight, only, direction=direction, outside="tail")
    assert float(tail.kl.detach()) > 0
    tail.kl.sum().backward()
    assert hidden.grad[0].any()


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_positions_that_do_not_count_are_zero_and_never_read(direction, outside, sets):
    loss_mask = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 2])
    counts = [bool(m) and t != EMPTY for t, m in enumerate(loss_mask)]
    hidden, weight, _ = make(torch.float64)
    hidden[~torch.tensor(counts)] = torch.nan
    temperature = torch.linspace(0.3, 1.7, T)
    ours = leaves(hidden, weight)
    got = distillation_loss(
        *ours,
        sets,
        direction=direction,
        outside=outside,
        loss_mask=loss_mask,
        temperature=temperature,
        chunk_rows=3,
    )
    assert got.counted.tolist() == counts
    assert not got.kl[~got.counted].any()
    got.mean().backward()
    assert not ours[0].grad[~got.counted].any()
    assert ours[1].grad.isfinite().all()

    theirs = leaves(*make(torch.float64)[:2])
    exact = distillation(head_logits(*theirs, None, temperature), sets, direction, outside, counts)
    assert error(got.mean(), exact.sum() / sum(counts)) < 1e-12
    (exact.sum() / sum(counts)).backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert error(mine.grad, other.grad) < 1e-12


@pytest.mark.parametrize(("direction", "outside"), FORMS)
@pytest.mark.parametrize("positions", [0, 2])
def test_nothing_counts(positions, direction, outside):
    hidden, weight, bias = leaves(draw(positions, H), draw(V, H), draw(V))
    got = distillation_loss(
        hidden, weight, CandidateSets.empty(positions), direction=direction, outside=outside, bias=bias
    )
    assert got.kl.shape == got.counted.shape == (positions,)
    assert not got.counted.any()
    got.mean().backward()
    assert float(got.mean().detach()) == 0
    for leaf in (hidden, weight, bias):
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_a_second_backward_gives_the_same(direction, outside, sets):
    hidden, weight, bias = leaves(*make(torch.float64, bias=True))
    with torch.no_grad():
        bias[
            [i for i in range(V) if i not in sets[:WHOLE].token_ids and i not in sets[WHOLE + 1 :].token_ids]
        ] = -30
    loss = distillation_loss(
        hidden, weight, sets, direction=direction, outside=outside, bias=bias, softcap=40.0
    ).kl.sum()
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    for one, other in zip(first, second, strict=True):
        assert one.isfinite().all()
        assert error(one, other) < 1e-12


def test_a_student_without_a_tail():
    """The student masks all ids outside. The forward KL is infinite, and the reverse KL ignores the tail."""
    sets = CandidateSets([0, 1], np.log([0.6, 0.3]), [0, 2], [0])
    bias = torch.tensor([0.0, 0, -torch.inf, -torch.inf]).double()
    hidden, weight, bias = leaves(draw(1, H), draw(4, H), bias)
    with pytest.raises(InvalidInputError, match="the KL at position 0 is inf"):
        distillation_loss(hidden, weight, sets, direction="forward", outside="tail", bias=bias)
    got = distillation_loss(hidden, weight, sets, direction="reverse", outside="tail", bias=bias)
    student = torch.log_softmax(hidden @ weight[:2].t(), 1)[0].detach()
    assert float(got.kl.detach()) == pytest.approx(
        float((student.exp() * (student - torch.tensor([0.6, 0.3]).log())).sum()), abs=1e-6
    )
    got.kl.sum().backward()
    assert hidden.grad.isfinite().all()
    assert not bias.grad[2:].any()


def test_a_candidate_that_the_student_rules_out():
    sets = CandidateSets([0, 1], np.log([0.6, 0.3]), [0, 2], [0])
    bias = torch.tensor([0.0, -torch.inf, 0, 0]).double()
    for outside in ("tail", "renormalized"):
        hidden, weight, bias = leaves(draw(1, H), draw(4, H), bias)
        with pytest.raises(InvalidInputError, match="the KL at position 0 is inf"):
            distillation_loss(hidden, weight, sets, direction="forward", outside=outside, bias=bias)
        got = distillation_loss(hidden, weight, sets, direction="reverse", outside=outside, bias=bias)
        exact = distillation(hidden @ weight.t() + bias, sets, "reverse", outside)
        assert error(got.kl, exact) < 1e-12
        got.kl.sum().backward()
        assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("outside", ["tail", "renormalized"])
@pytest.mark.usefixtures("dense")
def test_the_heads_gradient_in_a_buffer(outside, direction, sets):
    options = {"direction": direction, "outside": outside, "chunk_rows": 3}
    grads = []
    for buffered in (False, True):
        hidden, weight = leaves(*make(torch.float64)[:2])
        if buffered:
            weight.grad = torch.ones_like(weight)
        where = weight.grad if buffered else "dense"
        distillation_loss(hidden, weight, sets, **options, weight_grad=where).kl.sum().backward()
        grads.append(weight.grad - 1 if buffered else weight.grad)
    assert error(*grads) < 1e-12


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_padded_rows_of_the_head_have_no_part(direction, outside, sets):
    hidden, weight, bias = leaves(*make(torch.float64, bias=True))
    padded_weight = torch.cat([weight.detach(), torch.full((3, H), 9.0)]).requires_grad_()
    padded_bias = torch.cat([bias.detach(), torch.full((3,), 9.0)]).requires_grad_()
    options = {"direction": direction, "outside": outside}
    got = distillation_loss(hidden, padded_weight, sets, bias=padded_bias, vocab_size=V, **options)
    want = distillation_loss(hidden, weight, sets, bias=bias, **options)
    assert torch.equal(got.kl, want.kl)
    got.kl.sum().backward()
    assert not padded_weight.grad[V:].any()
    assert not padded_bias.grad[V:].any()
    want.kl.sum().backward()
    assert error(padded_weight.grad[:V], weight.grad) < 1e-14


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_autocast_and_strides_change_nothing(direction, outside, sets):
    hidden, weight, _ = make(torch.float32)
    options = {"direction": direction, "outside": outside}
    expected = distillation_loss(hidden, weight, sets, **options).kl
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(distillation_loss(hidden, weight, sets, **options).kl, expected)
    wide = torch.empty(H, T).copy_(hidden.t()).t()
    assert error(distillation_loss(wide, weight, sets, **options).kl, expected) < 1e-6


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_a_temperature_that_is_written_to_before_the_backward(direction, outside, sets):
    grads = []
    for write in (False, True):
        hidden, weight = leaves(*make(torch.float32)[:2])
        temperature = torch.linspace(0.3, 1.7, T)
        got = distillation_loss(
            hidden, weight, sets, direction=direction, outside=outside, temperature=temperature
        )
        if write:
            temperature.fill_(9.0)
        got.kl.sum().backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_repeats_to_the_last_bit_and_gives_a_gradient_only_where_one_is_wanted(direction, outside, sets):
    options = {"direction": direction, "outside": outside}
    runs = []
    for _ in range(2):
        hidden, weight = leaves(*make(torch.float32)[:2])
        distillation_loss(hidden, weight.detach(), sets, **options).kl.sum().backward()
        assert weight.grad is None
        distillation_loss(hidden.detach(), weight, sets, **options).kl.sum().backward()
        runs.append((hidden.grad, weight.grad))
    assert all(map(torch.equal, *runs))
    with torch.no_grad():
        assert not distillation_loss(hidden, weight, sets, **options).kl.requires_grad


class _Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [
            x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.layout == torch.strided
        ]
        self.num_bytes = max([self.num_bytes, *(x.nbytes for x in tensors)])
        return result


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_no_tensor_has_all_positions_and_the_vocabulary(direction, outside):
    tokens, vocab, width = 512, 1000, 8
    sets = teacher_sets(4 * draw(tokens, vocab), 0.5, [0] * tokens)
    hidden, weight = leaves(draw(tokens, width).float(), draw(vocab, width).float())
    with _Largest() as largest:
        got = distillation_loss(hidden, weight, sets, direction=direction, outside=outside, chunk_rows=4)
        got.mean().backward()
    bound = max(vocab * width * 4, len(sets.token_ids) * 2 * 8)
    assert largest.num_bytes <= bound  # and not tokens * vocab, 64 times the head
    assert 8 * bound < tokens * vocab * 4


ERRORS = {
    "hidden and weight: got shapes": lambda a: a | {"hidden": a["hidden"][:, :-1]},
    "expected \\[T, H\\]": lambda a: a | {"hidden": a["hidden"][None]},
    "teacher_sets: got 10 positions for 11 hidden states": lambda a: (
        a | {"teacher_sets": a["teacher_sets"][1:]}
    ),
    "logprobs: these candidate sets have none": lambda a: (
        a | {"teacher_sets": a["teacher_sets"].without_logprobs()}
    ),
    "direction: got 'backward', expected 'forward' or 'reverse'": lambda a: a | {"direction": "backward"},
    "outside: got None, expected 'tail' or 'renormalized'": lambda a: a | {"outside": None},
    "loss_mask: got shape \\(10,\\), expected \\[11\\]": lambda a: a | {"loss_mask": [1] * 10},
    "bias: got shape": lambda a: a | {"bias": torch.zeros(V - 1)},
    "temperature: got 0": lambda a: a | {"temperature": 0},
    "temperature: got shape": lambda a: a | {"temperature": torch.ones(T - 1)},
    "softcap: got 0": lambda a: a | {"softcap": 0},
    "logit_scale: got 0": lambda a: a | {"logit_scale": 0},
    "chunk_rows: got 0": lambda a: a | {"chunk_rows": 0},
    "vocab_start: got -1": lambda a: a | {"vocab_start": -1},
    "weight_grad: got 'there', expected 'dense'": lambda a: (
        a | {"weight_grad": "there", "outside": "renormalized"}
    ),
    "backend: got 'cuda'": lambda a: a | {"backend": "cuda", "outside": "renormalized"},
    "the KL at position 6 is nan: .* NaN or \\+inf": lambda a: (
        a | {"hidden": a["hidden"].index_fill(0, torch.tensor([6]), torch.nan)}
    ),
    "weight: got dtype torch.int8, expected float16": lambda a: a | {"weight": a["weight"].to(torch.int8)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument_and_the_problem(message, sets):
    hidden, weight, _ = make(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "teacher_sets": sets}
    arguments |= {"direction": "forward", "outside": "tail"}
    with pytest.raises(InvalidInputError, match=message):
        distillation_loss(**ERRORS[message](arguments))


@pytest.mark.parametrize(("direction", "outside"), FORMS)
def test_sets_that_cannot_be_of_this_vocabulary(direction, outside, sets):
    hidden, weight, _ = make(torch.float32)
    options = {"direction": direction, "outside": outside}
    with pytest.raises(InvalidCandidateSetsError, match="at position 7, outside the vocabulary of 60"):
        distillation_loss(hidden, weight[:60], sets, **options)
    with pytest.raises(InvalidCandidateSetsError, match="hold 56 of the 61 candidates at position 7"):
        distillation_loss(
            hidden, weight, CandidateSets.concat([CandidateSets.empty(7), sets[7:]]), vocab_start=5, **options
        )
    too_much = CandidateSets([1, 2], [-0.2, -0.3], [0, 2], [1])
    with pytest.raises(InvalidCandidateSetsError, match=r"at position 0 add up to 1\.55955, expected"):
        distillation_loss(hidden[:1], weight, too_much, **options)


def test_the_documented_lines(sets):
    program = block_with("how-to/score-and-distill.md", "distillation_loss(states")
    states, weight, _ = make(torch.float32)
    weight.requires_grad_()
    cut = [sets[:6], sets[6:]]
    names = {
        "teacher_client": SimpleNamespace(
            score=lambda rollouts, top_logprobs_p: [SimpleNamespace(candidates=one) for one in cut]
        ),
        "model": SimpleNamespace(lm_head=SimpleNamespace(weight=weight)),
    }
    names |= {"rollouts": [object(), object()], "states": states}
    exec(program, names | {"CandidateSets": CandidateSets, "distillation_loss": distillation_loss})
    expected = torch.autograd.grad(
        distillation_loss(states, weight, sets, direction="forward", outside="tail").mean(), weight
    )
    assert torch.equal(weight.grad, expected[0])
