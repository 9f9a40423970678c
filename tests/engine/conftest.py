"""The shared engine, its model, and weights to push to it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_tiny_model
from tests.engine.pushed_weights import make_weights
from tests.engine.start_servers import Engine, run_engine

VOCAB_SIZE = 512
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session", autouse=True)
def _forked_engines(fork_server: None) -> None:
    """Every engine of these tests may be a fork."""


@pytest.fixture(scope="session")
def engine(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    """The shared server: overlap scheduling, radix cache, chunked prefill of 64 tokens."""
    with run_engine(model_path, log_folder / "default.log", "--chunked-prefill-size", "64") as running:
        yield running


@pytest.fixture(scope="session")
def weight_folders(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights that can be pushed to an engine that serves `model_path`; see `make_weights`."""
    return make_weights(model_path, tmp_path_factory.mktemp("weights"), VOCAB_SIZE)


@pytest.fixture(scope="session")
def reference_models(weight_folders: dict[str, Path]) -> dict[str, Any]:
    """float32 transformers models of `weight_folders`, by version."""
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in weight_folders.items()
    }


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import an example by its name, with the examples' folder on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)
