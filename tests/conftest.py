"""Settings of all tests, and fixtures that several folders share."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# Tests and engines share a few cores. A thread that waits at OpenMP's barrier spins while the thread that it
# waits for has no core. With two engines on two cores, each generated 12 tokens/s instead of 1,400. Must be
# set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.cpu_platform import request_cpu_platform

request_cpu_platform()

# A busy machine must not fail a test, so examples have no deadline.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


# The folders with slow files. They run first, so that a parallel run ends with short files on every worker.
_SLOW_FOLDERS = ("engine", "server", "docs", "packaging", "nucleus", "patches", "integrations", "replay")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return _SLOW_FOLDERS.index(folder) if folder in _SLOW_FOLDERS else len(_SLOW_FOLDERS)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-logs")


@pytest.fixture(scope="session")
def fork_server(log_folder: Path) -> Iterator[None]:
    """Let `run_engine` fork engines from a process that imports SGLang once."""
    from tests.engine import start_servers
    from tests.engine.fork_server import ForkServer

    with pytest.MonkeyPatch.context() as patch:
        for name in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
            patch.setenv(name, "0")  # otherwise SGLang sleeps for 5 s before it ends
        server = ForkServer(log_folder / "fork_server.log")
        patch.setattr(start_servers, "fork_server", server)
        yield
    server.close()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[ModuleType]:
    """Ray with one CPU on this machine."""
    import ray

    from tests.local_ray import run_local_ray

    with run_local_ray():
        yield ray
