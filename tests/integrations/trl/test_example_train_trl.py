"""`examples/train_trl.py` against the real engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.engine.conftest import EXAMPLES
from tests.engine.start_servers import Engine


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("train_trl")
    for name in ("train_trl", "rollout_loop"):
        sys.modules.pop(name, None)


def test_the_reward_rises_and_every_step_starts_at_a_ratio_of_one(
    example: ModuleType, trl_engine: Engine, model_path: Path
) -> None:
    history = example.train(model_path, trl_engine.url, trl_engine.url, steps=8)
    assert len(history) == 8
    for row in history:
        assert row["replay/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert row["replay/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert history[0]["replay/kept_mass_mean"] < 0.95
    assert max(row["reward"] for row in history[-3:]) > history[0]["reward"] + 0.05
