"""One engine in its usual configuration, shared among the tests."""

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

from sglang_topp_server.tiny_model import make_tiny_model
from tests.engine.running import Engine, run_engine
from tests.engine.weights import make_weights

VOCAB_SIZE = 512
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-logs")


@pytest.fixture(scope="session")
def engine(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    """The usual server: overlap scheduling, radix cache, prompts prefilled in chunks of 64 tokens."""
    with run_engine(model_path, log_folder / "default.log", "--chunked-prefill-size", "64") as running:
        yield running


@pytest.fixture(scope="session")
def weight_folders(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights that can be pushed to an engine that serves `model_path`; see `make_weights`."""
    return make_weights(model_path, tmp_path_factory.mktemp("weights"), VOCAB_SIZE)


@pytest.fixture(scope="session")
def reference_models(weight_folders: dict[str, Path]) -> dict[str, Any]:
    """transformers' models of the same weights, float32."""
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in weight_folders.items()
    }


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example by its name; it finds those beside it, as when it is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)
