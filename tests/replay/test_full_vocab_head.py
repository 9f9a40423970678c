"""The full-vocabulary head gives the scores of dense float64 logits."""

from __future__ import annotations

import pytest
import torch
from replay_oracle import error, full_scores, head_logits, leaves

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import Layout, score

T, V, H = 11, 61, 19

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


def make(dtype: torch.dtype, *, bias: bool = False):
    rng = torch.Generator().manual_seed(0)
    shapes = ((T, H), (V, H), (V,) if bias else None)
    return [shape and torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def targets() -> torch.Tensor:
    return torch.arange(T) * 7 % V


@pytest.mark.parametrize("chunk_rows", [4, T])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients_equal_the_dense_float64_oracle(dtype, case, chunk_rows):
    options = dict(CASES[case])
    inputs = make(dtype, bias=options.pop("bias", False))
    weights = torch.linspace(-1, 2, T, dtype=torch.float64)

    exact_leaves = leaves(*inputs, dtype=torch.float64)
    exact = full_scores(head_logits(*exact_leaves, **options), targets())
    (exact[0] * weights - exact[1] * weights**2).sum().backward()

    ours = leaves(*inputs)
    got = score(ours[0], ours[1], targets(), bias=ours[2], entropy=True, chunk_rows=chunk_rows, **options)
    (got.logprobs * weights - got.entropy * weights**2).sum().backward()

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for value, want in zip((got.logprobs, got.entropy), exact, strict=True):
        assert value.dtype == wide
        assert error(value, want) < (1e-12 if wide == torch.float64 else 2e-6)
    bound = {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, torch.finfo(dtype).eps)
    for leaf, exact_leaf in zip(ours, exact_leaves, strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == dtype
            assert error(leaf.grad, exact_leaf.grad) < bound


def test_a_second_backward_computes_the_logits_again():
    hidden, weight, bias = leaves(*make(torch.float64, bias=True))
    with torch.no_grad():
        bias[::3] = -torch.inf  # an impossible token has neither value nor gradient
    got = score(hidden, weight, torch.arange(T) * 3 + 1, bias=bias, temperature=0.01, entropy=True)
    loss = (got.logprobs + got.entropy).sum()
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    for one, other in zip(first, second, strict=True):
        assert one.isfinite().all()
        assert error(one, other) < 1e-12
    assert not first[2][::3].any()


@pytest.mark.parametrize("what", ["logprobs", "entropy"])
def test_gradcheck(what):
    rng = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 3), (6, 3), (6,))
    ]

    def function(hidden, weight, bias):
        result = score(
            hidden,
            weight,
            torch.tensor([5, 0, 2, 2]),
            bias=bias,
            softcap=2.0,
            logit_scale=0.4,
            temperature=0.7,
            entropy=True,
            chunk_rows=3,
        )
        return getattr(result, what)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("chunk_rows", [4, T])
def test_without_entropy_the_logprobs_and_their_gradient_are_the_same(chunk_rows):
    runs = []
    for entropy in (False, True):
        hidden, weight, bias = leaves(*make(torch.float32, bias=True))
        got = score(hidden, weight, targets(), bias=bias, softcap=2.5, entropy=entropy, chunk_rows=chunk_rows)
        assert (got.entropy is not None) == entropy
        got.logprobs.sum().backward()
        runs.append([got.logprobs.detach(), hidden.grad, weight.grad, bias.grad])
    assert all(map(torch.equal, *runs))


def test_padded_rows_of_the_head_have_no_part():
    hidden, weight, bias = leaves(*make(torch.float64, bias=True))
    padded_weight = torch.cat([weight.detach(), torch.full((3, H), 9.0)]).requires_grad_()
    padded_bias = torch.cat([bias.detach(), torch.full((3,), 9.0)]).requires_grad_()
    got = score(hidden, padded_weight, targets(), bias=padded_bias, entropy=True, vocab_size=V)
    want = score(hidden, weight, targets(), bias=bias, entropy=True)
    assert torch.equal(got.logprobs, want.logprobs)
    (got.logprobs + got.entropy).sum().backward()
    assert not padded_weight.grad[V:].any()
    assert not padded_bias.grad[V:].any()
    (want.logprobs + want.entropy).sum().backward()
    assert error(padded_weight.grad[:V], weight.grad) < 1e-14


def test_no_positions():
    hidden, weight, bias = make(torch.float32, bias=True)
    hidden, weight, bias = leaves(hidden[:0], weight, bias)
    got = score(hidden, weight, targets()[:0], bias=bias, entropy=True)
    (got.logprobs.sum() + got.entropy.sum()).backward()
    assert got.logprobs.shape == (0,)
    assert hidden.grad.shape == (0, H)
    assert not weight.grad.any()
    assert not bias.grad.any()


def test_autocast_changes_nothing():
    hidden, weight, _ = make(torch.float32)
    expected = score(hidden, weight, targets()).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = score(hidden, weight, targets()).logprobs
    assert torch.equal(got, expected)


def test_a_temperature_that_is_written_to_before_the_backward():
    grads = []
    for write in (False, True):
        hidden, weight, _ = leaves(*make(torch.float32))
        temperature = torch.linspace(0.3, 1.7, T)
        got = score(hidden, weight, targets(), temperature=temperature)
        if write:
            temperature.fill_(9.0)
        got.logprobs.sum().backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)


def test_errors_name_the_argument_and_the_problem():
    hidden, weight, _ = make(torch.float32)
    with pytest.raises(InvalidInputError, match=r"hidden and weight: got shapes \(11, 18\)"):
        score(hidden[:, 1:], weight, targets())
    with pytest.raises(InvalidInputError, match="targets: got 10 for 11 rows of hidden"):
        score(hidden, weight, targets()[1:])
    with pytest.raises(InvalidInputError, match=r"targets: got shape \(11,\) and dtype torch.float32"):
        score(hidden, weight, targets() + 0.5)
    with pytest.raises(InvalidInputError, match=r"targets: got shape \(11, 1\)"):
        score(hidden, weight, targets()[:, None])
    with pytest.raises(InvalidInputError, match=r"weight: got dtype torch\.int8, expected float16"):
        score(hidden, weight.to(torch.int8), targets())
    with pytest.raises(InvalidInputError, match="targets: 61 at position 1 is not in the vocabulary"):
        score(hidden, weight, targets().index_fill(0, torch.tensor([1]), V))
    with pytest.raises(InvalidInputError, match="log-prob over the vocabulary at position 7 is NaN"):
        score(hidden.index_fill(0, torch.tensor([7]), torch.nan), weight, targets())


@pytest.mark.parametrize("masked", [False, True], ids=["response-only", "loss-mask-only"])
def test_selecting_rows_before_the_head_changes_nothing_that_is_kept(masked):
    """Leave out rows before the product: kept rows equal the full result, others are 0, gradients agree."""
    prompts, responses = [3, 0, 4, 2, 1], [4, 5, 0, 3, 2]
    num_positions, num_rows = sum(responses), sum(prompts) + sum(responses)
    loss_mask = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1])  # no row of the third sample is left
    rows = Layout().select_rows(prompts, responses, loss_mask=loss_mask if masked else None)
    ids = torch.arange(num_positions) * 5 % V
    weights = torch.linspace(-1, 2, num_positions, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, H, generator=rng, dtype=torch.float64)
    weight = torch.randn(V, H, generator=rng, dtype=torch.float64)

    kept = leaves(hidden, weight)
    got = score(rows.select(kept[0]), kept[1], rows.take(ids), entropy=True, chunk_rows=3)
    spread = rows.scatter(got.logprobs), rows.scatter(got.entropy)
    (spread[0] * weights - spread[1] * weights**2).sum().backward()

    # Score every row, and take each response token's log-prob from the row before it.
    full = leaves(hidden, weight)
    logprobs = torch.log_softmax(full[0] @ full[1].t(), dim=1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=1)
    expected = [torch.zeros(num_positions, dtype=torch.float64) for _ in range(2)]
    start = position = 0
    for prompt, response in zip(prompts, responses, strict=True):
        for t in range(response):
            row = prompt + t - 1
            if row >= 0 and (not masked or loss_mask[position]):
                expected[0][position] = logprobs[start + row, ids[position]]
                expected[1][position] = entropies[start + row]
            position += 1
        start += prompt + response
    (expected[0] * weights - expected[1] * weights**2).sum().backward()

    for mine, theirs in zip(
        [*spread, kept[0].grad, kept[1].grad], [*expected, full[0].grad, full[1].grad], strict=True
    ):
        assert error(mine, theirs) < 1e-13
    assert not spread[0][~torch.tensor(rows.scored)].any()
