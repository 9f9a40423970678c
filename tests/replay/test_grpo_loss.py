"""The example loss equals the plain formula on dense logits, and the example runs from the command line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from replay_oracle import entropy_of, error, leaves, random_sets

from sglang_topp import CandidateSets
from sglang_topp.replay import Layout, replayed_old_logprobs

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_loss.py"
V, H = 23, 7


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_loss_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("replay", [True, False])
def test_equals_the_plain_formula(example, replay):
    prompts, responses, clip, bonus = [2, 1, 3], [4, 0, 5], 0.2, 0.01
    parts = [random_sets([size] * n, V, seed=n) for size, n in zip([3, 2, 6], responses, strict=True)]
    samples = [
        example.Sample(torch.zeros(p).int().numpy(), sets.sampled_ids, sets)
        for p, sets in zip(prompts, parts, strict=True)
    ]
    advantages = torch.tensor([1.5, 0.0, -0.7], dtype=torch.float64)
    loss_mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1])
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(sum(prompts) + sum(responses), H, generator=rng, dtype=torch.float64)
    weight = 0.3 * torch.randn(V, H, generator=rng, dtype=torch.float64)

    ours = leaves(hidden, weight)
    loss, metrics = example.grpo_loss(
        *ours,
        samples,
        advantages,
        layout=Layout(),
        temperature=0.9,
        loss_mask=loss_mask,
        replay=replay,
        clip=clip,
        entropy_bonus=bonus,
    )
    loss.backward()

    plain = leaves(hidden, weight)
    logits = plain[0] @ plain[1].t() / 0.9
    row, position, terms, clipped = 0, 0, [], 0
    for i, sets in enumerate(parts):
        old = replayed_old_logprobs(sets)
        for t, (ids, _) in enumerate(sets):
            z = logits[row + prompts[i] - 1 + t]
            if replay:
                z = torch.full_like(z, -torch.inf).index_put(
                    (torch.tensor(ids).long(),), z[torch.tensor(ids).long()]
                )
            logprob = torch.log_softmax(z, 0)
            ratio = (logprob[sets.sampled_ids[t]] - old[t]).exp()
            clipped += abs(float(ratio.detach()) - 1) > clip
            gain = min(ratio * advantages[i], ratio.clamp(1 - clip, 1 + clip) * advantages[i])
            if loss_mask[position]:
                terms.append(-gain - bonus * entropy_of(logprob))
            position += 1
        row += prompts[i] + responses[i]
    expected = sum(terms) / len(terms)
    expected.backward()

    assert clipped  # or the clip is not tested
    # The rollout's log-probs are float32.
    assert error(loss, expected) < 1e-6
    for mine, theirs in zip(ours, plain, strict=True):
        assert error(mine.grad, theirs.grad) < 1e-6
    assert metrics.tokens == len(terms)


def one_sample(example, sets, prompt: int = 2):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(prompt + len(sets), H, generator=rng), torch.randn(V, H, generator=rng)
    sample = example.Sample(torch.zeros(prompt).int().numpy(), sets.sampled_ids.clip(min=0), sets)
    return [*leaves(hidden, weight), [sample]]


@pytest.mark.parametrize("replay", [True, False])
def test_tokens_without_a_set_do_not_count(example, replay):
    sets = random_sets([3, 0, 4, 0], V)
    runs = []
    for mask in (None, torch.tensor([1, 0, 1, 0])):
        hidden, weight, samples = one_sample(example, sets)
        loss, _ = example.grpo_loss(
            hidden, weight, samples, torch.ones(1), layout=Layout(), loss_mask=mask, replay=replay
        )
        loss.backward()
        runs.append((loss.detach(), hidden.grad))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not runs[0][1][[0, 2, 4, 5]].any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_the_rollout_gave_no_probability(example, advantage):
    """Its ratio is infinite. The gradients of all other tokens must not become NaN."""
    sets = CandidateSets([1, 2, 3, 4, 5], [-0.1, -2.0, -torch.inf, -0.5, -1.0], [0, 3, 5], [3, 4])
    hidden, weight, samples = one_sample(example, sets)
    loss, _ = example.grpo_loss(hidden, weight, samples, torch.tensor([advantage]), layout=Layout())
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[1].any()
    assert hidden.grad[2].any()


def test_advantages_are_centred_in_each_group(example):
    advantages = example.group_advantages(torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))


def test_replay_makes_the_first_ratio_one_and_learns(example):
    with_replay = example.train(replay=True, steps=12)
    without = example.train(replay=False, steps=1)
    assert with_replay[0]["replay/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert with_replay[0]["replay/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    # Over the whole vocabulary, a token's probability is lower than the sampler's by the kept mass.
    assert without[0]["replay/ratio_mean"] == pytest.approx(without[0]["replay/kept_mass_mean"], abs=1e-4)
    assert without[0]["replay/ratio_mean"] < 0.9
    assert with_replay[-1]["reward"] > with_replay[0]["reward"] + 0.1


def test_the_file_runs():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "with replay: first step's ratio 1.0000 (0.0%" in done.stdout
    assert "without replay: first step's ratio 0.8" in done.stdout
