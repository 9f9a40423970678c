"""Sets that were copied to the device once give equal scores, and later scores do not wait."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from replay_oracle import EMPTY, SINGLE, leaves, mixed, random_sets, targets_of
from torch import Tensor

from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay import Scores, score, score_logits
from tests.fake_gpu import forbid_waits, gpu

pytestmark = pytest.mark.usefixtures("dense")

V, H = 61, 19
SIZES = [3, SINGLE, 7, EMPTY, V, 2, SINGLE, EMPTY, 12, 5, 2]
T = len(SIZES)
SETS = random_sets(SIZES, V)
TARGETS = targets_of(SETS).clamp(min=0)
OTHER = -torch.arange(1.0, len(SETS.token_ids) + 1)
ASKED = {"entropy": True, "per_candidate": True}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def values_of(scores: Scores) -> dict[str, Tensor]:
    return {name: value for name, value in vars(scores).items() if value is not None}


def from_head(candidates, *, targets: Tensor = TARGETS, **options) -> tuple[dict[str, Tensor], list[Tensor]]:
    inputs = leaves(draw(T, H), draw(V, H), draw(V))
    inputs = [leaf.detach().to(targets.device).requires_grad_() for leaf in inputs]
    options = {"softcap": 5.0, "kl_to": OTHER.to(targets.device), "backend": "torch"} | ASKED | options
    hidden, weight, bias = inputs
    return values_of(score(hidden, weight, targets, candidates, bias=bias, **options)), inputs


def from_logits(
    candidates, *, targets: Tensor = TARGETS, **options
) -> tuple[dict[str, Tensor], list[Tensor]]:
    logits = (3 * draw(T, V)).to(targets.device).requires_grad_()
    options = {"kl_to": OTHER.to(targets.device)} | ASKED | options
    return values_of(score_logits(logits, targets, candidates, **options)), [logits]


def with_gradients(values: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    mixed(values).backward()
    return [*(value.detach() for value in values.values()), *(leaf.grad for leaf in inputs)]


@pytest.mark.parametrize("scored", [from_head, from_logits])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": torch.linspace(0.3, 1.7, T)},
        {"temperature": torch.tensor(0.6)},
        {"vocab_size": V},
    ],
    ids=["plain", "temperatures", "one temperature", "vocab size"],
)
def test_policy_reference_and_later_epochs_equal_the_sets_bit_for_bit(scored, options):
    want = with_gradients(*scored(SETS, **options))
    tensors = SETS.to_torch()
    for _ in range(3):
        with torch.no_grad():
            reference, _ = scored(tensors, **options)
        assert all(map(torch.equal, reference.values(), want))
        got = with_gradients(*scored(tensors, **options))
        assert all(map(torch.equal, got, want))


def test_the_whole_vocabulary_beside_the_support():
    want = with_gradients(*from_logits(SETS, full=True))
    tensors = SETS.to_torch()
    for _ in range(2):
        assert all(map(torch.equal, with_gradients(*from_logits(tensors, full=True)), want))


def test_a_buffer_for_the_gradient_of_the_head():
    def gradient(candidates) -> Tensor:
        weight, buffer = draw(V, H).requires_grad_(), torch.zeros(V, H)
        score(draw(T, H), weight, TARGETS, candidates, weight_grad=buffer).logprobs.sum().backward()
        return buffer

    tensors = SETS.to_torch()
    want = gradient(SETS)
    assert want.any()
    assert torch.equal(gradient(tensors), want)
    assert torch.equal(gradient(tensors), want)


def test_one_index_for_each_shard_of_the_vocabulary():
    """Heads of other vocabulary ranges can use the same tensors, and check the ids again."""
    tensors = SETS.to_torch()
    hidden, weight = draw(T, H), draw(V, H)
    want = score(hidden, weight, TARGETS, SETS).logprobs
    assert torch.equal(score(hidden, weight, TARGETS, tensors).logprobs, want)
    padded = torch.cat([weight, torch.ones(3, H)])
    assert torch.equal(score(hidden, padded, TARGETS, tensors).logprobs, want)
    with pytest.raises(InvalidCandidateSetsError, match="at position 4, outside the vocabulary of 60"):
        score(hidden, weight[:60], TARGETS, tensors)
    with pytest.raises(InvalidCandidateSetsError, match="hold 56 of the 61 candidates at position 4"):
        score(hidden, weight, TARGETS, tensors, vocab_start=5)


def test_an_index_that_was_built_in_inference_mode_serves_gradients():
    want = with_gradients(*from_head(SETS))
    with torch.inference_mode():
        tensors = SETS.to_torch()
        score(draw(T, H), draw(V, H), TARGETS, tensors)
    assert all(map(torch.equal, with_gradients(*from_head(tensors)), want))


def test_on_a_cpu_every_use_checks_every_value():
    tensors = SETS.to_torch()
    shifted = TARGETS.roll(1)
    for _ in range(2):
        with pytest.raises(
            InvalidInputError, match=r"targets: .* at position 0 is not among the 3 candidates"
        ):
            from_head(tensors, targets=shifted)
    with pytest.raises(InvalidInputError, match="sets: got 11 positions for 10 targets"):
        score_logits(draw(T - 1, V), TARGETS[1:], tensors)
    with pytest.raises(InvalidInputError, match="log-prob at position 2 is NaN"):
        score_logits(draw(T, V).index_fill(0, torch.tensor([2]), torch.nan), TARGETS, tensors)


def test_tensors_of_another_device_are_refused():
    tensors = SETS.to_torch()
    with gpu():
        logits, targets = draw(T, V).to("cuda"), TARGETS.to("cuda")
        with pytest.raises(InvalidInputError, match=r"sets: they are on cpu, expected cuda:0; call"):
            score_logits(logits, targets, tensors)


@pytest.fixture
def on_gpu():
    """Return the sets on a GPU, indexed by a first scored."""
    with gpu():
        tensors = SETS.to_torch("cuda")
        for options in (ASKED, {"per_candidate": False, "kl_to": None}):
            from_logits(tensors, targets=TARGETS.to("cuda"), **options)
        yield tensors


def test_the_second_use_does_not_wait_for_the_gpu(on_gpu: CandidateTensors):
    want = with_gradients(*from_logits(SETS, temperature=torch.linspace(0.3, 1.7, T)))
    options = {
        "targets": TARGETS.to("cuda"),
        "temperature": torch.linspace(0.3, 1.7, T).to("cuda"),
        "kl_to": OTHER.to("cuda"),
    }
    logits = (3 * draw(T, V)).to("cuda").requires_grad_()
    weights = torch.ones((), device="cuda")
    with forbid_waits():
        scores = score_logits(logits, sets=on_gpu, **ASKED, **options)
        (scores.logprobs.sum() * weights + scores.entropy.sum()).backward()
    for got, expected in zip(values_of(scores).values(), want, strict=False):
        torch.testing.assert_close(got.detach().cpu(), expected)


def test_the_first_use_on_a_gpu_names_a_wrong_target():
    with gpu():
        tensors = SETS.to_torch("cuda")
        with pytest.raises(
            InvalidInputError, match=r"targets: .* at position 0 is not among the 3 candidates"
        ):
            from_logits(tensors, targets=TARGETS.roll(1).to("cuda"))


@pytest.mark.parametrize("position", [2, SIZES.index(SINGLE)], ids=["a choice", "one candidate"])
def test_later_on_a_gpu_a_target_outside_its_set_is_nan(on_gpu: CandidateTensors, position):
    targets = TARGETS.clone()
    ids, _ = SETS[position]
    targets[position] = next(i for i in range(V) if i not in ids)
    values, (logits,) = from_logits(on_gpu, targets=targets.to("cuda"), kl_to=None)
    right, _ = from_logits(on_gpu, targets=TARGETS.to("cuda"), kl_to=None)
    assert values["logprobs"].isnan().nonzero().squeeze(1).tolist() == [position]
    others = torch.arange(T) != position
    assert torch.equal(values["logprobs"].cpu()[others], right["logprobs"].cpu()[others])
    values["logprobs"].sum().backward()
    if SIZES[position] > 1:
        assert logits.grad.cpu()[position].isnan().any()


def test_later_on_a_gpu_broken_logits_and_temperatures_are_nan(on_gpu: CandidateTensors):
    targets = TARGETS.to("cuda")
    logits = draw(T, V).index_fill(0, torch.tensor([2]), torch.nan).to("cuda")
    got = score_logits(logits, targets, on_gpu, entropy=True)
    assert got.logprobs.isnan().nonzero().squeeze(1).tolist() == [2]
    assert got.entropy.isnan().nonzero().squeeze(1).tolist() == [2]
    for wrong in (0.0, -1.0, torch.inf):
        temperature = torch.ones(T).index_fill(0, torch.tensor([4]), wrong).to("cuda")
        got = score_logits(draw(T, V).to("cuda"), targets, on_gpu, temperature=temperature)
        assert got.logprobs.isnan().nonzero().squeeze(1).tolist() == [4]


def test_a_missing_part_of_the_vocabulary_is_always_an_error(on_gpu: CandidateTensors):
    logits, targets = draw(T, V - 5).to("cuda"), TARGETS.to("cuda")
    for _ in range(2):
        with pytest.raises(InvalidCandidateSetsError, match="hold 56 of the 61 candidates at position 4"):
            score_logits(logits, targets, on_gpu, vocab_start=5, vocab_size=V)


def test_they_are_freed_without_the_garbage_collector_and_pickled_without_the_index():
    tensors = SETS.to_torch()
    fresh = pickle.dumps(tensors)
    from_head(tensors)
    assert len(pickle.dumps(tensors)) == len(fresh)
    got, _ = from_head(pickle.loads(pickle.dumps(tensors)))
    want, _ = from_head(SETS)
    assert all(map(torch.equal, got.values(), want.values()))
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(tensors)
        del tensors
        assert alive() is None
    finally:
        gc.enable()
