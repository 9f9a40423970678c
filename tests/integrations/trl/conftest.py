"""One engine for all tests of the adapter, which push weights to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from sglang_topp_client import RolloutClient
from sglang_topp_patches.releases import Feature
from tests.engine.start_servers import Engine, run_engine
from tests.skip_missing_features import skip_without

skip_without(Feature.SAMPLER_SOURCE)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture(scope="session")
def trl_engine(model_path: Path, log_folder: Path, fork_server: None) -> Iterator[Engine]:
    with run_engine(model_path, log_folder / "trl.log") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(trl_engine: Engine) -> Iterator[RolloutClient]:
    with RolloutClient(trl_engine.url) as client:
        yield client


@pytest.fixture(scope="session", autouse=True)
def _without_the_warning() -> Iterator[None]:
    """TRL warns that `rollout_func` is experimental."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield
