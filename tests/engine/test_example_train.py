"""The training example against the real engine: rollouts, replay, steps, new weights."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sglang_topp_patches.releases import Feature
from tests.documentation_blocks import block_with
from tests.engine.conftest import EXAMPLES
from tests.engine.pushed_weights import restore_weights
from tests.engine.start_servers import Engine
from tests.skip_missing_features import needs


@pytest.fixture
def example(load_example: Callable[[str], ModuleType]) -> ModuleType:
    return load_example("train")


def test_the_guide_shows_its_lines() -> None:
    shown = block_with("how-to/train.md", "targets, sets).logprobs")
    assert textwrap.indent(shown, "    ") in (EXAMPLES / "train.py").read_text()


@pytest.fixture
def weights_for_others(engine: Engine, model_path: Path) -> Iterator[None]:
    """The engine is shared, so restore its weights afterwards."""
    yield
    restore_weights(engine, model_path)


@needs(Feature.SAMPLER_SOURCE)
@pytest.mark.usefixtures("weights_for_others")
def test_the_reward_rises_and_every_step_starts_at_a_ratio_of_one(
    example: ModuleType, engine: Engine, model_path: Path
) -> None:
    history = example.train(model_path, engine.url, engine.url, steps=5)
    for step in history:
        assert step["replay/tokens"] == len(example.PROMPTS) * example.GROUP * 32
        assert step["replay/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert step["replay/ratio_off_by_10_percent_share"] == 0
    assert history[-1]["reward"] > history[0]["reward"] + 0.1


@needs(Feature.SAMPLER_SOURCE)
@pytest.mark.usefixtures("weights_for_others")
def test_without_replay_the_ratios_are_the_kept_mass(
    example: ModuleType, engine: Engine, model_path: Path
) -> None:
    (step,) = example.train(model_path, engine.url, engine.url, steps=1, replay=False)
    assert step["replay/ratio_mean"] == pytest.approx(step["replay/kept_mass_mean"], abs=1e-4)
    assert step["replay/ratio_mean"] < 0.99
