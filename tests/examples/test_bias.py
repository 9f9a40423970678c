"""The bias example in seconds: exact values are exact, and replay estimates the sampler's gradient best."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "bias.py"


@pytest.fixture(scope="module")
def bias() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bias", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bias"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bias"]


def test_the_exact_reward_is_the_mean_of_many_trajectories(bias: ModuleType) -> None:
    task, policy = bias.Task(0), bias.make_policy(0)
    rollouts = bias.roll_out(task, policy, 0.8, 20_000, torch.Generator().manual_seed(0))
    measures = bias.measure(task, policy, bias.all_logits(policy).detach(), 0.8)
    error = rollouts.rewards_N.std() / len(rollouts.rewards_N) ** 0.5
    assert abs(rollouts.rewards_N.mean() - measures["reward"]) < 4 * error
    sets = bias.candidate_sets(policy, rollouts, 0.8)
    assert sets.sizes.mean() == pytest.approx(measures["candidates"], rel=0.02)
    assert -sets.log_kept_mass.mean() == pytest.approx(measures["kl_sampler_to_policy"], rel=0.02)
    assert measures["kl_to_first_policy"] == 0


def test_ratios_start_at_one_with_replay_and_at_the_kept_mass_without(bias: ModuleType) -> None:
    task, policy = bias.Task(0), bias.make_policy(0)
    rollouts = bias.roll_out(task, policy, 0.8, 50, torch.Generator().manual_seed(0))
    sets, targets = bias.candidate_sets(policy, rollouts, 0.8), rollouts.targets_NT.flatten()
    logits = bias.all_logits(policy)[rollouts.states_NT.flatten()]
    ones = torch.ones(len(targets))
    losses = {way: -bias.loss(way, logits, targets, sets, ones).item() for way in bias.WAYS}
    kept_mass = float(torch.from_numpy(sets.log_kept_mass.copy()).exp().mean())
    assert kept_mass < 0.85
    assert losses["replay"] == pytest.approx(1, abs=1e-5)
    assert losses["uncorrected"] == pytest.approx(1, abs=1e-5)
    assert losses["without"] == pytest.approx(kept_mass, abs=1e-5)
    assert losses["truncated IS"] == pytest.approx(kept_mass, abs=1e-5)


def test_the_short_mode_prints_its_tables_and_replay_follows_the_exact_gradient(
    bias: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = bias.run((0.8,), (0,), steps=24, trajectories=64, estimates=4096)
    last = results["cosines"][-1]["cosines"]
    assert last["replay"]["sampled"] > 0.97
    assert all(last[way]["sampled"] < last["replay"]["sampled"] - 0.01 for way in bias.WAYS[1:])
    assert [curve["way"] for curve in results["curves"]] == list(bias.WAYS)
    assert all(curve["history"][-1]["reward"] > curve["history"][0]["reward"] for curve in results["curves"])
    bias.show(results)
    printed = capsys.readouterr().out
    assert all(f"\n{way} " in printed for way in ("before", *bias.WAYS))
    bias.plot(results, tmp_path / "bias.png")
    assert (tmp_path / "bias.png").read_bytes().startswith(b"\x89PNG")
