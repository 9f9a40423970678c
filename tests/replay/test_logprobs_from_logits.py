"""Scores from logits, over the support and over the whole vocabulary, against the dense float64 oracle."""

from __future__ import annotations

import pytest
import torch
from replay_oracle import (
    EMPTY,
    SINGLE,
    dense_mask,
    error,
    full_scores,
    leaves,
    mixed,
    random_sets,
    scores,
    targets_of,
)

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay import score_logits

pytestmark = pytest.mark.usefixtures("dense")

V = 61
SIZES = [3, SINGLE, 7, EMPTY, V, 2, SINGLE, EMPTY, 12, 5, 2]
T = len(SIZES)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TEMPERATURES = {"one": 1.0, "number": 0.6, "tensor": torch.linspace(0.3, 1.7, T, dtype=torch.float64)}


def make(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(T, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)


def all_targets(sets: CandidateSets) -> torch.Tensor:
    """Return targets that are ids at every position, as full scores need."""
    return targets_of(sets).clamp(min=0)


def divide(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    return logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)


@pytest.fixture
def sets() -> CandidateSets:
    return random_sets(SIZES, V)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_equal_the_dense_float64_oracle(dtype, full, temperature, sets):
    temperature = TEMPERATURES[temperature]
    logits, targets = make(dtype), all_targets(sets)
    other = -torch.arange(1, sum(SIZES) + 1, dtype=torch.float64)

    (exact_leaf,) = leaves(logits, dtype=torch.float64)
    divided = divide(exact_leaf, temperature)
    exact = scores(divided, targets, sets, other)
    if full:
        exact["full_logprobs"], exact["full_entropy"] = full_scores(divided, targets)
    mixed(exact).backward()

    (leaf,) = leaves(logits)
    before = leaf.detach().clone()
    result = score_logits(
        leaf,
        targets,
        sets,
        temperature=temperature,
        entropy=True,
        per_candidate=True,
        kl_to=other,
        full=full,
        chunk_rows=3,
    )
    got = {name: getattr(result, name) for name in exact}
    mixed(got).backward()
    assert torch.equal(leaf, before)  # the caller's logits are only read

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, value in got.items():
        assert value.dtype == wide
        assert error(value, exact[name]) < (1e-12 if wide == torch.float64 else 2e-6), name
    assert leaf.grad.dtype == dtype
    bound = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert error(leaf.grad, exact_leaf.grad) < bound
    if not full:
        assert result.full_logprobs is None
        assert not leaf.grad[torch.tensor(SIZES) < 2].any()


@pytest.mark.parametrize(
    "what", ["logprobs", "entropy", "candidate_logprobs", "full_logprobs", "full_entropy"]
)
def test_gradcheck(what):
    sizes, vocab = [3, EMPTY, 5, SINGLE, 2], 5
    sets = random_sets(sizes, vocab)
    logits = torch.randn(len(sizes), vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def function(logits):
        result = score_logits(
            logits, all_targets(sets), sets, temperature=0.7, entropy=True, per_candidate=True, full=True
        )
        return getattr(result, what)

    assert torch.autograd.gradcheck(function, logits.requires_grad_())


@pytest.mark.parametrize("chunk_rows", [1, 4, T, 100])
def test_full_scores_do_not_depend_on_the_chunk(chunk_rows, sets):
    (logits,) = leaves(make())
    result = score_logits(logits, all_targets(sets), entropy=True, chunk_rows=chunk_rows)
    (result.logprobs + result.entropy).sum().backward()
    (whole,) = leaves(make())
    want = score_logits(whole, all_targets(sets), entropy=True)
    (want.logprobs + want.entropy).sum().backward()
    assert torch.equal(result.logprobs, want.logprobs)
    assert torch.equal(logits.grad, whole.grad)


@pytest.mark.parametrize("only", ["logprobs", "entropy"])
def test_full_scores_one_at_a_time(only, sets):
    targets = all_targets(sets)
    (leaf,), (exact_leaf,) = leaves(make(torch.float64)), leaves(make(torch.float64))
    weights = torch.linspace(-1, 1, T, dtype=torch.float64)
    (getattr(score_logits(leaf, targets, entropy=True), only) * weights).sum().backward()
    (full_scores(exact_leaf, targets)[only == "entropy"] * weights).sum().backward()
    assert error(leaf.grad, exact_leaf.grad) < 1e-12


def test_minus_infinity_among_the_logits(sets):
    targets = all_targets(sets)
    logits = make(torch.float64)
    logits[4, [5, 6, 7]] = -torch.inf
    targets[4] = 5  # this policy masks the target itself
    logits[8] = -torch.inf
    members = torch.tensor(sets[8][0].astype("int64"))
    logits[8, members[:2]] = torch.tensor([0.5, -0.5], dtype=torch.float64)
    targets[8] = members[0]
    (exact_leaf,), (leaf,) = leaves(logits), leaves(logits)
    exact = scores(exact_leaf, targets, sets)
    exact_full = full_scores(exact_leaf, targets)
    got = score_logits(leaf, targets, sets, entropy=True, full=True)
    assert got.logprobs[4] == -torch.inf
    torch.testing.assert_close(got.logprobs, exact["logprobs"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.entropy, exact["entropy"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.full_logprobs, exact_full[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.full_entropy, exact_full[1], rtol=1e-12, atol=1e-12)
    (got.logprobs + 2 * got.entropy + 3 * got.full_logprobs - 4 * got.full_entropy).sum().backward()
    total = exact["logprobs"] + 2 * exact["entropy"] + 3 * exact_full[0] - 4 * exact_full[1]
    total.sum().backward()
    torch.testing.assert_close(leaf.grad, exact_leaf.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("replay", [True, False])
def test_autocast_changes_nothing(replay, sets):
    def run():
        (leaf,) = leaves(make())
        got = score_logits(leaf, all_targets(sets), sets if replay else None, full=replay)
        values = [value for value in vars(got).values() if value is not None]
        sum(value.sum() for value in values).backward()
        return [*values, leaf.grad]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize("chunk_rows", [1, 4, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_both_kinds_of_scores_is_rounded_once(dtype, chunk_rows, sets):
    """The two gradients nearly cancel, so rounding one of them first would lose most of the difference."""
    logits, targets = make(dtype), all_targets(sets)

    def loss(replayed, full) -> torch.Tensor:
        return (replayed - 0.999 * full).sum()

    (exact_leaf,), (leaf,) = leaves(logits, dtype=torch.float64), leaves(logits)
    loss(scores(exact_leaf, targets, sets)["logprobs"], full_scores(exact_leaf, targets)[0]).backward()
    got = score_logits(leaf, targets, sets, full=True, chunk_rows=chunk_rows)
    loss(got.logprobs, got.full_logprobs).backward()
    far = (leaf.grad.double() - exact_leaf.grad).abs() - torch.finfo(dtype).eps / 2 * exact_leaf.grad.abs()
    assert float(far.max()) < 1e-6


@pytest.mark.parametrize("dense", ["none"], indirect=True)
def test_logits_are_not_kept_for_the_backward():
    """Only candidates are kept. The logits may be freed or overwritten before the backward."""
    sets = random_sets([min(size, V // 5) for size in SIZES], V)
    (leaf,), (other,) = leaves(make()), leaves(make())
    saved = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        logits = leaf * 1.0
        saved.clear()
        got = score_logits(logits, targets_of(sets), sets, entropy=True)
    assert max(saved) <= sum(SIZES)
    with torch.no_grad():
        logits.zero_()
    (got.logprobs + got.entropy).sum().backward()
    want = score_logits(other, targets_of(sets), sets, entropy=True)
    (want.logprobs + want.entropy).sum().backward()
    assert torch.equal(leaf.grad, other.grad)


def test_a_temperature_that_is_written_to_before_the_backward(sets):
    grads = []
    for write in (False, True):
        (leaf,) = leaves(make())
        temperature = TEMPERATURES["tensor"].clone()
        got = score_logits(leaf, all_targets(sets), sets, temperature=temperature, full=True)
        if write:
            temperature.fill_(9.0)
        (got.logprobs + got.full_logprobs).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_masked_out_nan_does_not_matter(sets):
    """Logits outside the support are not read."""
    logits, targets = make(), targets_of(sets)
    expected = score_logits(logits, targets, sets).logprobs
    logits[0] = torch.nan
    ids = torch.tensor(sets[0][0].astype("int64"))
    logits[0, ids] = make()[0, ids]
    assert torch.equal(score_logits(logits, targets, sets).logprobs, expected)


def test_padded_columns_have_no_probability(sets):
    targets = all_targets(sets)
    padded = torch.cat([make(), torch.full((T, 3), 50.0)], dim=1).requires_grad_()
    got = score_logits(padded, targets, sets, full=True, entropy=True, vocab_size=V)
    want = score_logits(make(), targets, sets, full=True, entropy=True)
    assert torch.equal(got.full_logprobs, want.full_logprobs)
    assert torch.equal(got.full_entropy, want.full_entropy)
    got.full_logprobs.sum().backward()
    assert not padded.grad[:, V:].any()
    assert torch.equal(score_logits(padded, targets, vocab_size=V).logprobs, want.full_logprobs)
    with pytest.raises(InvalidInputError, match="targets: 62 at position 2 is not in the vocabulary"):
        score_logits(padded, targets.index_fill(0, torch.tensor([2]), 62), vocab_size=V)


def test_masked_losses_and_gradients_are_equal_where_spans_are_empty(sets):
    loss_mask = (torch.tensor(SIZES) > 0).double()
    assert 0 < loss_mask.sum() < len(loss_mask)
    gradients, losses = [], []
    for dense in (True, False):
        logits = make(torch.float64).requires_grad_()
        if dense:
            rows = torch.log_softmax(logits.masked_fill(~dense_mask(sets, V), -torch.inf), 1)
            logprobs = rows.gather(1, all_targets(sets)[:, None]).squeeze(1)
        else:
            logprobs = score_logits(logits, targets_of(sets), sets).logprobs
        losses.append((logprobs * loss_mask).sum())
        losses[-1].backward()
        gradients.append(logits.grad)
    assert error(*losses) < 1e-13
    assert error(*gradients) < 1e-13
    assert gradients[0].isfinite().all()


ERRORS = {
    "logits: got shape": lambda a: a | {"logits": a["logits"][None]},
    "targets: got 10 for 11 rows of logits": lambda a: a | {"targets": a["targets"][1:]},
    "sets: got 10 positions": lambda a: a | {"sets": a["sets"][1:]},
    "temperature: got -2": lambda a: a | {"temperature": -2},
    "log-prob at position 0 is NaN": lambda a: (
        a | {"logits": a["logits"].index_fill(0, torch.tensor([0]), torch.nan)}
    ),
    "over the vocabulary at position 3 is NaN": lambda a: (
        a | {"logits": a["logits"].index_fill(0, torch.tensor([3]), torch.inf), "full": True}
    ),
    "over the vocabulary at position 1 is NaN": lambda a: (
        a | {"logits": a["logits"].index_fill(0, torch.tensor([1]), -torch.inf), "full": True}
    ),
    "targets: -1 at position 3 is not in the vocabulary": lambda a: (
        a | {"targets": targets_of(a["sets"]), "full": True}
    ),
    "chunk_rows: got 0": lambda a: a | {"chunk_rows": 0},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument_and_the_problem(message, sets):
    arguments = {"logits": make(), "targets": all_targets(sets), "sets": sets}
    with pytest.raises(InvalidInputError, match=message):
        score_logits(**ERRORS[message](arguments))


@pytest.mark.parametrize(
    "targets", [torch.zeros(T), torch.zeros(T, dtype=torch.bool), torch.zeros(T, 1).long()]
)
def test_targets_are_integers(targets):
    with pytest.raises(
        InvalidInputError, match=r"targets: got shape .* and dtype .*, expected integers \[T\]"
    ):
        score_logits(make(), targets)


def test_more_errors(sets):
    with pytest.raises(InvalidCandidateSetsError, match="outside the vocabulary of 60"):
        score_logits(make()[:, :60], targets_of(sets), sets)


def test_scores_print_their_shapes_and_no_values():
    scores = score_logits(torch.zeros(3, 5), torch.tensor([0, 1, 2]), entropy=True)
    assert repr(scores) == "Scores(logprobs=[3] torch.float32, entropy=[3] torch.float32)"
