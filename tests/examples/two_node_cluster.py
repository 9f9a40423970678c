"""A real Ray cluster of two nodes on loopback, for examples that run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.engine.start_servers import with_forks

__all__ = ["RunningExample", "run_example", "two_node_cluster"]

EXAMPLES = Path(__file__).parents[2] / "examples"
_NODE = {
    "num_cpus": 2,
    "node_ip_address": "127.0.0.1",
    "object_store_memory": 100 * 2**20,
    "include_dashboard": False,
}


@contextmanager
def two_node_cluster() -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield the address of a cluster, and a function that kills its second node with SIGKILL."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", with_forks(os.environ)["PYTHONPATH"])
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Despite its name: every process of Ray then uses 127.0.0.1, and nothing listens elsewhere.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_health_check_period_ms", "1000")
        patch.setenv("RAY_health_check_failure_threshold", "3")
        cluster = Cluster(initialize_head=True, head_node_args=_NODE, shutdown_at_exit=False)
        try:
            second = cluster.add_node(**{k: v for k, v in _NODE.items() if k != "include_dashboard"})
            yield cluster.address, lambda: cluster.remove_node(second, allow_graceful=False)
        finally:
            cluster.shutdown()


class RunningExample:
    """An example that runs, and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(process.stdout,))
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        self.lines.extend(iter(output.readline, ""))

    def wait_for(self, condition: Callable[[], object], limit_s: float) -> None:
        """Wait until the condition holds. The example must not end before."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def wait(self, limit_s: float) -> int:
        """Wait for its end, and return its status."""
        status = self.process.wait(limit_s)
        self._reader.join()
        return status

    @property
    def text(self) -> str:
        """Everything that it has printed."""
        return "".join(self.lines)


@contextmanager
def run_example(name: str, arguments: Sequence[str]) -> Iterator[RunningExample]:
    """Run `examples/NAME.py`."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        example = RunningExample(process)
        try:
            yield example
        finally:
            process.kill()
            example.wait(60)
