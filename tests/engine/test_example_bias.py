"""The bias example on the real engine, with a model that has learned little and short runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_topp import CandidateSets
from sglang_topp_client import RolloutClient
from sglang_topp_patches.releases import Feature
from tests.documentation_blocks import DOCS
from tests.engine.conftest import EXAMPLES
from tests.engine.start_servers import run_engine
from tests.skip_missing_features import skip_without

skip_without(Feature.SAMPLER_SOURCE)

STEPS = 2


@contextmanager
def refuse_to_serve(*arguments: Any) -> Iterator[NoReturn]:
    raise AssertionError("every run is in the file")
    yield


@pytest.fixture(scope="module")
def bias() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import bias

        patch.setattr(bias, "PAIRS", 3)  # short texts, of which a short training makes many right
        patch.setattr(bias, "OPENED", 1)
        patch.setattr(bias, "LEARNING_RATE", 1e-4)  # of a policy this small
        yield bias
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def start(bias: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = bias.make_trained_model(tmp_path_factory.mktemp("bias"), bias.right_texts(2000), steps=150)
    return path


@pytest.fixture(scope="module")
def client(start: Path, log_folder: Path) -> Iterator[RolloutClient]:
    with run_engine(start, log_folder / "bias.log") as engine, RolloutClient(engine.url) as client:
        yield client


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("c a A b B C", True),
        ("c a C b B A", False),  # another order
        ("c a A b B", False),  # c is open
        ("c a A b B C C", False),  # nothing is open
        ("c a A C", False),  # too short
        ("c a A b B d D C", False),  # too long
        ("c a A ab BA C", False),  # not brackets
    ],
)
def test_right_texts(bias: ModuleType, text: str, is_right: bool) -> None:
    assert bias.is_right(text) == is_right


def test_the_texts_to_learn_are_right(bias: ModuleType) -> None:
    texts = bias.right_texts(200)
    assert all(bias.is_right(text) for text in texts)
    assert len(set(texts)) > 190


def test_the_states_are_those_before_each_generated_token(
    bias: ModuleType, client: RolloutClient, start: Path
) -> None:
    """Each state is that of its row without padding, so the engine's log-probs follow from it."""
    policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    rollouts = bias.roll_out(client, ["a b", "c"], 0.9, sets=True)
    assert len({len(rollout.prompt_ids) + len(rollout.output_ids) for rollout in rollouts}) > 1
    states, targets = bias.hidden_states(policy, rollouts)
    assert targets.tolist() == [token for rollout in rollouts for token in rollout.output_ids.tolist()]
    logprobs = torch.log_softmax(policy.lm_head(states), 1).gather(1, targets[:, None])[:, 0]
    expected = np.concatenate([rollout.logprobs for rollout in rollouts])
    np.testing.assert_allclose(logprobs.detach(), expected, atol=1e-4)


def test_the_page_states_the_size_of_the_policy(bias: ModuleType, tmp_path: Path) -> None:
    bias.make_trained_model(tmp_path, bias.right_texts(500), hidden_size=bias.HIDDEN_SIZE, steps=1)
    size = AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters()
    page = (DOCS / "explanation" / "training-bias.md").read_text()
    assert f"{size / 1e6:.1f} million parameters" in page


@pytest.mark.parametrize("way", ["replay", "without", "truncated IS"])
def test_first_ratios(bias: ModuleType, client: RolloutClient, start: Path, way: str) -> None:
    policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    rollouts = bias.roll_out(client, ["a", "b", "c", "d"], 0.7, sets=True)
    sets = CandidateSets.concat([rollout.candidates for rollout in rollouts])
    kept_mass = float(np.exp(sets.log_kept_mass).mean())
    assert kept_mass < 0.9
    value, measures = bias.loss(way, policy, rollouts, torch.ones(len(rollouts)))
    assert measures["ratio"] == pytest.approx(kept_mass if way == "without" else 1, abs=1e-4)
    assert measures["clipped"] == 0  # a positive advantage clips only ratios above 1.2
    assert -value.item() == pytest.approx(1 if way == "replay" else kept_mass, abs=1e-4)
    _, measures = bias.loss(way, policy, rollouts, -torch.ones(len(rollouts)))
    below = np.exp(sets.log_kept_mass) < 1 - bias.CLIP
    assert measures["clipped"] == pytest.approx(below.mean() if way == "without" else 0, abs=1e-3)


def test_runs_are_measured_shown_drawn_and_continued(
    bias: ModuleType,
    client: RolloutClient,
    start: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = {"steps": STEPS, "estimates": 32}
    runs = [
        bias.train(client, start, way, 0.7, seed, **lengths) | lengths for way in bias.WAYS for seed in (0, 1)
    ]
    for run in runs:
        first, *others = run["history"]
        assert len(others) == STEPS
        assert first["kl_to_start"] == pytest.approx(0, abs=1e-6)
        assert all(step["kl_to_start"] > 1e-4 for step in others)
        expected = first["kept_mass"] if run["way"] == "without" else 1
        assert first["first_ratio"] == pytest.approx(expected, abs=0.02)  # of a quarter of the batch
        assert set(run["cosines"]) == (set(bias.WAYS) if run["way"] == "replay" else set())
        # Of so few samples, the cosines are mostly noise.
        assert len(set(run["cosines"].values())) == len(run["cosines"])
        assert all(0 < abs(value) < 1 for value in run["cosines"].values())

    monkeypatch.setattr(bias, "serve", refuse_to_serve)
    results, picture = tmp_path / "bias.json", tmp_path / "bias.png"
    results.write_text(json.dumps(runs))
    command = ["bias.py", "--top-p", "0.7", "--seeds", "2", "--results", str(results), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", [*command, "--steps", "2", "--estimates", "32"])
    assert bias.main() == 0
    printed = capsys.readouterr().out
    assert [line.split(" | ")[:2] for line in printed.splitlines()[2:]] == [
        ["| 0.7", way] for way in bias.WAYS
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(sys, "argv", [*command, "--steps", "3", "--estimates", "32"])
    with pytest.raises(SystemExit):  # other lengths: the runs could not be compared
        bias.main()


def test_the_band_is_students_interval(bias: ModuleType) -> None:
    mean, half = bias.mean_and_band([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.3027 / 3**0.5, abs=1e-3))
    assert math.isnan(bias.mean_and_band([1.0])[1])


@pytest.mark.parametrize(
    ("results", "options"),
    [("training-bias", []), ("training-bias-long", ["--top-p", "0.7", "--seeds", "3", "--steps", "200"])],
)
def test_the_page_shows_the_results_of_its_commands(
    bias: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    results: str,
    options: list[str],
) -> None:
    monkeypatch.setattr(bias, "serve", refuse_to_serve)
    path = DOCS / "explanation" / f"{results}.json"
    monkeypatch.setattr(sys, "argv", ["bias.py", *options, "--results", str(path)])
    assert bias.main() == 0
    page = (DOCS / "explanation" / "training-bias.md").read_text()
    assert capsys.readouterr().out in page
    assert " ".join(options) in page
