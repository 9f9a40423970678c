"""The distillation example against two real engines: rollouts, the teacher's sets, steps, new weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from examples.tiny_model import make_tiny_model
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.start_servers import Engine, run_engine


@pytest.fixture(scope="module")
def student_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("student"), vocab_size=VOCAB_SIZE, seed=1)


@pytest.fixture(scope="module")
def student_engine(student_path: Path, log_folder: Path) -> Iterator[Engine]:
    with run_engine(student_path, log_folder / "student.log") as running:
        yield running


@pytest.mark.timeout(900)  # the example starts a second engine
def test_the_kl_over_the_whole_vocabulary_falls(
    load_example: Callable[[str], ModuleType],
    engine: Engine,
    model_path: Path,
    student_engine: Engine,
    student_path: Path,
) -> None:
    """The shared engine is the teacher. No weights are pushed to it."""
    history = load_example("distill").distill(
        student_path,
        model_path,
        student_url=student_engine.url,
        student_engine_url=student_engine.url,
        teacher_url=engine.url,
        steps=8,
    )
    for step in history:
        # Tokens outside of the teacher's sets are merged, which can only lower a KL.
        assert 0 < step["loss"] < step["forward_kl"] + 1e-3
        assert step["loss"] > 0.8 * step["forward_kl"]
        assert 1 < step["candidates"] < VOCAB_SIZE
        assert all(map(math.isfinite, step.values()))
    assert history[-1]["forward_kl"] < 0.85 * history[0]["forward_kl"]
    assert history[-1]["reverse_kl"] < 0.95 * history[0]["reverse_kl"]
