"""The candidate-only head gives the scores of dense float64 logits."""

from __future__ import annotations

import pytest
import torch
from replay_oracle import EMPTY, SINGLE, error, head_logits, leaves, mixed, random_sets, scores, targets_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay import Scores, score, score_logits

pytestmark = pytest.mark.usefixtures("dense")

V, H = 61, 19
SIZES = [3, SINGLE, 7, EMPTY, V, 2, SINGLE, EMPTY, 12, 5, 2]
T = len(SIZES)

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


def make(dtype: torch.dtype, *, bias: bool = False, seed: int = 0, scale: float = 1.0):
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=rng, dtype=torch.float64) * scale).to(dtype)

    return draw(T, H), draw(V, H), draw(V) if bias else None


def values_of(result: Scores) -> dict[str, torch.Tensor]:
    names = ("logprobs", "entropy", "candidate_logprobs", "kl")
    return {name: getattr(result, name) for name in names}


@pytest.fixture
def sets() -> CandidateSets:
    return random_sets(SIZES, V)


@pytest.fixture
def other(sets: CandidateSets) -> torch.Tensor:
    hidden, weight, _ = make(torch.float64, seed=9)
    return scores(head_logits(hidden, weight), targets_of(sets), sets)["candidate_logprobs"].float()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients_equal_the_dense_float64_oracle(dtype, case, sets, other):
    options = dict(CASES[case])
    inputs = make(dtype, bias=options.pop("bias", False))
    targets = targets_of(sets)

    exact_leaves = leaves(*inputs, dtype=torch.float64)
    exact = scores(head_logits(*exact_leaves, **options), targets, sets, other)
    mixed(exact).backward()

    ours = leaves(*inputs)
    got = values_of(
        score(
            ours[0],
            ours[1],
            targets,
            sets,
            bias=ours[2],
            entropy=True,
            per_candidate=True,
            kl_to=other,
            **options,
        )
    )
    mixed(got).backward()

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, value in got.items():
        assert value.dtype == wide
        assert error(value, exact[name]) < (1e-12 if wide == torch.float64 else 2e-6), name
    # Sums run in float32 and are rounded to the input's dtype once.
    bound = {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, torch.finfo(dtype).eps)
    for leaf, exact_leaf in zip(ours, exact_leaves, strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == dtype
            assert error(leaf.grad, exact_leaf.grad) < bound


def test_no_worse_than_the_plain_float32_path():
    """On a larger size, our error against float64 is at most that of dense float32 logits."""
    sizes = [1 + (37 * t) % 40 for t in range(256)]
    vocab, width = 800, 256
    sets = random_sets(sizes, vocab)
    targets = targets_of(sets)
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn((len(sizes), width), generator=rng)
    weight = torch.randn((vocab, width), generator=rng) * 0.2

    results = {}
    for name in ("exact", "plain", "ours"):
        h, w = leaves(hidden, weight, dtype=torch.float64 if name == "exact" else torch.float32)
        if name == "ours":
            values = score(h, w, targets, sets, entropy=True)
            values = {"logprobs": values.logprobs, "entropy": values.entropy}
        else:
            values = scores(head_logits(h, w), targets, sets)
            values = {key: values[key] for key in ("logprobs", "entropy")}
        mixed(values).backward()
        results[name] = [*(v.detach() for v in values.values()), h.grad, w.grad]
    for exact, plain, ours in zip(*results.values(), strict=True):
        assert error(ours, exact) <= max(2 * error(plain, exact), 1e-6)


@pytest.mark.parametrize("what", ["logprobs", "entropy", "candidate_logprobs", "kl"])
def test_gradcheck(what):
    """Compare with finite differences, which share no formula with the implementation."""
    sizes, vocab, width = [3, EMPTY, 7, SINGLE, 2], 7, 3
    sets = random_sets(sizes, vocab)
    other = torch.log_softmax(torch.arange(sum(sizes), dtype=torch.float64), dim=0)
    rng = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)
        for shape in ((len(sizes), width), (vocab, width), (vocab,))
    ]

    def function(hidden, weight, bias):
        result = score(
            hidden,
            weight,
            targets_of(sets),
            sets,
            bias=bias,
            temperature=torch.linspace(0.3, 1.7, len(sizes)),
            softcap=2.5,
            logit_scale=0.4,
            entropy=True,
            per_candidate=True,
            kl_to=other,
        )
        return getattr(result, what)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10_000])
def test_any_chunk_size_gives_the_same(chunk, sets):
    def run(chunk_candidates):
        hidden, weight, _ = leaves(*make(torch.bfloat16))
        result = score(hidden, weight, targets_of(sets), sets, entropy=True)
        (result.logprobs.sum() + 2 * result.entropy.sum()).backward()
        return result.logprobs, hidden.grad, weight.grad

    # The gradients' sums may be split differently, so they differ by float32 rounding.
    reference, ours = run(16), run(chunk)
    assert torch.equal(ours[0], reference[0])
    for mine, theirs in zip(ours[1:], reference[1:], strict=True):
        assert error(mine, theirs) <= torch.finfo(torch.bfloat16).eps


def test_repeats_to_the_last_bit(sets):
    runs = []
    for _ in range(2):
        hidden, weight, bias = leaves(*make(torch.float32, bias=True))
        score(hidden, weight, targets_of(sets), sets, bias=bias).logprobs.sum().backward()
        runs.append((hidden.grad, weight.grad, bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_positions_without_a_choice_are_exactly_zero_and_never_read(sets):
    hidden, weight, _ = make(torch.float32)
    no_choice = torch.tensor([size < 2 for size in SIZES])
    hidden[no_choice] = torch.nan
    hidden, weight = leaves(hidden, weight)
    got = score(hidden, weight, targets_of(sets), sets, entropy=True, per_candidate=True)
    mixed({"a": got.logprobs, "b": got.entropy, "c": got.candidate_logprobs}).backward()
    assert not got.logprobs[no_choice].any()
    assert not got.entropy[no_choice].any()
    singles = torch.tensor(sets.sizes).repeat_interleave(torch.tensor(sets.sizes)) == 1
    assert not got.candidate_logprobs[singles].any()
    assert not hidden.grad[no_choice].any()
    assert hidden.grad[~no_choice].any(dim=1).all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("sizes", [[], [EMPTY], [SINGLE], [EMPTY, SINGLE, SINGLE]], ids=str)
def test_nothing_to_choose_at_all(sizes):
    sets = random_sets(sizes, V)
    hidden, weight, bias = (
        x[: len(sizes)] if i == 0 else x for i, x in enumerate(make(torch.float32, bias=True))
    )
    hidden, weight, bias = leaves(hidden, weight, bias)
    got = score(hidden, weight, targets_of(sets), sets, bias=bias, entropy=True, per_candidate=True)
    (got.logprobs.sum() + got.entropy.sum() + got.candidate_logprobs.sum()).backward()
    assert got.logprobs.shape == (len(sizes),)
    assert got.candidate_logprobs.shape == (sum(sizes),)
    assert not got.logprobs.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()
    assert not bias.grad.any()


def test_only_what_requires_a_gradient_gets_one(sets):
    hidden, weight, _ = make(torch.float32)
    hidden.requires_grad_()
    score(hidden, weight, targets_of(sets), sets).logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_targets_at_empty_spans_are_ignored(sets):
    hidden, weight, _ = make(torch.float32)
    targets = targets_of(sets)
    expected = score(hidden, weight, targets, sets).logprobs
    targets[SIZES.index(EMPTY)] = 10**6
    assert torch.equal(score(hidden, weight, targets, sets).logprobs, expected)


def test_a_set_of_the_whole_vocabulary_is_no_mask():
    hidden, weight, _ = make(torch.float64)
    sets = random_sets([V] * T, V)
    targets = targets_of(sets)
    expected = torch.log_softmax(hidden @ weight.t(), dim=1).gather(1, targets[:, None]).squeeze(1)
    assert error(score(hidden, weight, targets, sets).logprobs, expected) < 1e-13


@pytest.mark.parametrize("on_target", [False, True])
def test_minus_infinity_among_the_logits(on_target, sets):
    """A candidate that this policy masks has probability 0, and no gradient is NaN."""
    hidden, weight, bias = make(torch.float64, bias=True)
    targets = targets_of(sets)
    whole = SIZES.index(V)
    ruled_out = next(i for i in range(V) if i not in targets)
    bias[ruled_out] = -torch.inf
    if on_target:
        targets[whole] = ruled_out

    exact_leaves = leaves(hidden, weight, bias)
    exact = scores(head_logits(*exact_leaves), targets, sets)
    got_leaves = leaves(hidden, weight, bias)
    got = score(*got_leaves[:2], targets, sets, bias=got_leaves[2], entropy=True)
    assert bool(got.logprobs.isneginf().any()) == on_target
    torch.testing.assert_close(got.logprobs, exact["logprobs"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.entropy, exact["entropy"], rtol=1e-12, atol=1e-12)
    (got.logprobs + got.entropy).sum().backward()
    (exact["logprobs"] + exact["entropy"]).sum().backward()
    for mine, theirs in zip(got_leaves, exact_leaves, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-11)


def test_far_apart_logits_neither_overflow_nor_vanish(sets):
    hidden, weight, _ = make(torch.float32, scale=40.0)
    targets = targets_of(sets)
    exact = scores(head_logits(hidden.double(), weight.double()), targets, sets)
    got = score(hidden, weight, targets, sets, entropy=True)
    assert error(got.logprobs, exact["logprobs"]) < 1e-6
    torch.testing.assert_close(got.entropy.double(), exact["entropy"], rtol=1e-3, atol=1e-3)


def test_kl_to_itself_is_zero(sets):
    hidden, weight, _ = make(torch.float64)
    targets = targets_of(sets)
    own = score(hidden, weight, targets, sets, per_candidate=True).candidate_logprobs
    assert score(hidden, weight, targets, sets, kl_to=own).kl.abs().max() < 1e-14


@pytest.mark.parametrize("asked", [{}, {"entropy": True}, {"per_candidate": True}], ids=str)
@pytest.mark.parametrize("logits", [False, True], ids=["head", "logits"])
def test_both_kinds_of_scores_from_one_pass(logits, asked, sets):
    """They equal the two kinds from two calls, and so do the gradients."""
    targets, (hidden, weight, _) = targets_of(sets).clamp(min=0), make(torch.float64)

    def run(call):
        h, w = leaves(hidden, weight)
        source = (h @ w.t(),) if logits else (h, w)
        values = call(score_logits if logits else score, *source, targets)
        mixed(values).backward()
        return [*(value.detach() for value in values.values()), h.grad, w.grad]

    def together(function, *arguments):
        got = vars(function(*arguments, sets, full=True, **asked))
        return {name: value for name, value in got.items() if value is not None}

    def apart(function, *arguments):
        values = vars(function(*arguments, sets, **asked))
        full = function(*arguments, entropy=asked.get("entropy", False))
        values |= {"full_logprobs": full.logprobs, "full_entropy": full.entropy}
        return {name: value for name, value in values.items() if value is not None}

    for one, two in zip(run(together), run(apart), strict=True):
        assert error(one, two) < 1e-12


def test_scores_of_candidates_need_sets(sets):
    hidden, weight, _ = make(torch.float32)
    for name, value in {"full": True, "per_candidate": True, "kl_to": torch.zeros(sum(SIZES))}.items():
        with pytest.raises(InvalidInputError, match=f"{name}: it needs sets"):
            score(hidden, weight, targets_of(sets).clamp(min=0), **{name: value})


@pytest.mark.parametrize(("asked", "at_most"), [("", 16), ("entropy", 19), ("entropy, kl", 22)])
@pytest.mark.parametrize(("dtype", "more"), [(torch.float32, 0), (torch.bfloat16, 8)], ids=str)
@pytest.mark.parametrize("dense", ["none"], indirect=True)
def test_a_backward_dispatches_few_operations(dtype, more, asked, at_most, sets, other):
    """With a stored index, the backward neither sorts nor searches. On a GPU, each operation is a launch."""
    tensors = sets.to_torch()
    for _ in range(2):
        hidden, weight = leaves(*make(dtype)[:2])
        options = {"entropy": "entropy" in asked, "kl_to": other if "kl" in asked else None}
        got = score(hidden, weight, targets_of(sets), tensors, **options)
        loss = sum(value.sum() for value in (got.logprobs, got.entropy, got.kl) if value is not None)
        with _Count() as count:
            loss.backward()
    assert count.num_operations <= at_most + more


class _Count(TorchDispatchMode):
    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("reference", ["of the head", "of the logits"])
def test_a_small_kl_keeps_its_digits(reference, step):
    """After one small step, the KL is about the square of the step: far below float32's distance from 1."""
    sets = random_sets([7, 30, 2, V] * 8, V)
    targets, rng = targets_of(sets), torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=rng) / 4 for n in (len(sets), V))
    moved = hidden + step * torch.randn(hidden.shape, generator=rng)
    exact_other = scores(hidden.double() @ weight.double().t(), targets, sets)["candidate_logprobs"]
    exact = scores(moved.double() @ weight.double().t(), targets, sets, exact_other)["kl"]

    if reference == "of the head":
        own = score(hidden, weight, targets, sets, per_candidate=True).candidate_logprobs
        kl = score(moved, weight, targets, sets, kl_to=own).kl
    else:
        own = score_logits(hidden @ weight.t(), targets, sets, per_candidate=True).candidate_logprobs
        kl = score_logits(moved @ weight.t(), targets, sets, kl_to=own).kl
    assert (kl >= 0).all()
    # The log-probs are rounded to about 1e-7 of their size, and a step moves them by about the step.
    relative = (kl - exact).abs() / exact
    assert float(relative.median()) < 5e-6 / step


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_kl_to_a_rollout_that_gave_its_own_token_no_probability(lowest):
    """SGLang writes float32's lowest value for it, so the KL is not finite."""
    sets = CandidateSets([1, 2, 3], [-0.1, -2.0, lowest], [0, 3], [3])
    hidden, weight = torch.ones(1, H), torch.ones(V, H)
    with pytest.raises(InvalidInputError, match="kl_to: the KL at position 0 is inf"):
        score(hidden, weight, targets_of(sets), sets, kl_to=torch.tensor(sets.logprobs))


def test_autocast_changes_nothing(sets):
    hidden, weight, _ = make(torch.float32)
    expected = score(hidden, weight, targets_of(sets), sets).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = score(hidden, weight, targets_of(sets), sets).logprobs
    assert torch.equal(got, expected)


@pytest.mark.parametrize("replay", [True, False])
def test_a_head_in_float32_over_half_precision_states(replay, sets):
    hidden, weight = make(torch.bfloat16)[0], make(torch.float32)[1]
    over = sets if replay else None
    targets = targets_of(sets).clamp(min=0)
    mine = leaves(hidden, weight)
    got = score(*mine, targets, over)
    wide = leaves(hidden.float(), weight)
    want = score(*wide, targets, over)
    assert torch.equal(got.logprobs, want.logprobs)
    got.logprobs.sum().backward()
    want.logprobs.sum().backward()
    assert torch.equal(mine[0].grad, wide[0].grad.bfloat16())
    assert torch.equal(mine[1].grad, wide[1].grad)


class _Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            x.itemsize
            * (x._values().numel() if x.is_sparse else x.values().numel() if x.is_sparse_csr else x.numel())
            for x in tree_leaves(result)
            if isinstance(x, torch.Tensor)
        ]
        self.num_bytes = max([self.num_bytes, *sizes])
        return result


@pytest.mark.parametrize("dense", ["none"], indirect=True)
def test_no_tensor_is_larger_than_the_gradient_of_the_head():
    tokens, vocab, width = 512, 1000, 8
    sets = random_sets([4] * tokens, vocab)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    with _Largest() as largest:
        got = score(hidden, weight, targets_of(sets), sets, entropy=True)
        (got.logprobs + got.entropy).sum().backward()
    assert largest.num_bytes == vocab * width * 4  # and not tokens * vocab, 64 times as many


def test_hidden_need_not_be_contiguous(sets):
    hidden, weight, _ = make(torch.float32)
    wide = torch.empty(H, T).copy_(hidden.t()).t()
    assert not wide.is_contiguous()
    targets = targets_of(sets)
    expected = score(hidden, weight, targets, sets).logprobs
    assert torch.equal(score(wide, weight, targets, sets).logprobs, expected)


ERRORS = {
    "hidden and weight: got shapes": lambda a: a | {"hidden": a["hidden"][:, :-1]},
    "expected \\[T, H\\]": lambda a: a | {"hidden": a["hidden"][None]},
    "targets: got 10 for 11": lambda a: a | {"targets": a["targets"][1:]},
    "sets: got 10 positions for 11": lambda a: a | {"sets": a["sets"][1:]},
    "targets: got shape .* expected integers": lambda a: a | {"targets": a["targets"].float()},
    "targets: 60 at position 0 is not among the 3": lambda a: (
        a | {"targets": a["targets"].index_fill(0, torch.tensor([0]), 60)}
    ),
    "at position 1 is not among the 1": lambda a: (
        a | {"targets": a["targets"].index_fill(0, torch.tensor([1]), 10**6)}
    ),
    "bias: got shape": lambda a: a | {"bias": torch.zeros(V - 1)},
    "temperature: got 0": lambda a: a | {"temperature": 0},
    "temperature: got nan": lambda a: a | {"temperature": float("nan")},
    "temperature: got -1.0 at position 4": lambda a: (
        a | {"temperature": torch.ones(T).index_fill(0, torch.tensor([4]), -1.0)}
    ),
    "temperature: got shape": lambda a: a | {"temperature": torch.ones(T - 1)},
    "temperature: it requires a gradient": lambda a: a | {"temperature": torch.ones(T, requires_grad=True)},
    "softcap: got 0": lambda a: a | {"softcap": 0},
    "logit_scale: got -0.5, expected a positive number": lambda a: a | {"logit_scale": -0.5},
    "logit_scale: got inf": lambda a: a | {"logit_scale": float("inf")},
    "kl_to: got shape": lambda a: a | {"kl_to": torch.zeros(3)},
    "kl_to: it requires a gradient": lambda a: a | {"kl_to": torch.zeros(sum(SIZES), requires_grad=True)},
    "kl_to: the KL at position 0 is inf": lambda a: (
        a | {"kl_to": torch.zeros(sum(SIZES)).index_fill(0, torch.tensor([1]), -torch.inf)}
    ),
    "kl_to: the KL at position 0 is nan": lambda a: a | {"kl_to": torch.full((sum(SIZES),), -torch.inf)},
    "the log-prob at position 2 is NaN": lambda a: (
        a | {"hidden": a["hidden"].index_fill(0, torch.tensor([2]), torch.nan)}
    ),
    "log-prob at position 4 is NaN": lambda a: (
        a | {"hidden": a["hidden"].index_fill(0, torch.tensor([4]), torch.inf)}
    ),
    "none is above -inf": lambda a: a | {"bias": torch.full((V,), -torch.inf)},
    "backend: got 'cuda'": lambda a: a | {"backend": "cuda"},
    "vocab_start: got -1": lambda a: a | {"vocab_start": -1},
    "vocab_size: got 0": lambda a: a | {"vocab_size": 0},
    "hidden: got dtype torch.int64, expected float16": lambda a: a | {"hidden": a["hidden"].long()},
    # A quantized weight without its scale, and a dtype that does not promote to a float.
    "weight: got dtype torch.int8, expected float16": lambda a: a | {"weight": a["weight"].to(torch.int8)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument_and_the_problem(message, sets):
    hidden, weight, _ = make(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets_of(sets), "sets": sets}
    with pytest.raises(InvalidInputError, match=message):
        score(**ERRORS[message](arguments))


def test_ids_outside_the_vocabulary(sets):
    hidden, weight, _ = make(torch.float32)
    with pytest.raises(InvalidCandidateSetsError, match="at position 4, outside the vocabulary of 60"):
        score(hidden, weight[:60], targets_of(sets), sets)
    # The head is padded to V rows, of which 60 exist.
    with pytest.raises(InvalidCandidateSetsError, match="at position 4, outside the vocabulary of 60"):
        score(hidden, weight, targets_of(sets), sets, vocab_size=60)
    with pytest.raises(InvalidCandidateSetsError, match="hold 56 of the 61 candidates at position 4"):
        score(hidden, weight, targets_of(sets), sets, vocab_start=5)


def test_a_slice_of_the_head_that_holds_all_candidates(sets):
    """`vocab_start` without a group: the head holds a range of a longer vocabulary."""
    hidden, weight, _ = make(torch.float32)
    shifted = CandidateSets(
        sets.token_ids + 100, sets.logprobs, sets.offsets, sets.sampled_ids + 100 * (sets.sizes > 0)
    )
    expected = score(hidden, weight, targets_of(sets), sets).logprobs
    got = score(hidden, weight, targets_of(shifted), shifted, vocab_start=100).logprobs
    assert torch.equal(got, expected)
