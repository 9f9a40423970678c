"""The demo fails if a replayed ratio is off, and a kill ends its servers. tests/engine runs it for real."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

from examples.tiny_model import make_tiny_model
from sglang_topp import CandidateSets
from sglang_topp_client import Rollout

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollout_loop.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE.parent)  # as Python does for a script
    spec = importlib.util.spec_from_file_location("rollout_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("shift", "status"), [(0.0, 0), (0.0005, 0), (0.002, 1), (float("nan"), 1)])
def test_the_exit_status_is_that_of_the_ratios(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    shift: float,
    status: int,
) -> None:
    sets = CandidateSets([5, 3, 7], np.log(np.array([0.5, 0.3, 0.9], np.float32)), [0, 2, 3], [3, 7])
    ids = np.array([3, 7], np.int32)
    rollout = Rollout(0, 0, "r", ids, ids, "", sets.sampled_logprobs, sets, "length", "default", 0, 0.1)

    @contextmanager
    def serve(model_path: Path) -> Iterator[tuple[str, str]]:
        yield "http://127.0.0.1:1", "http://127.0.0.1:2"

    class Client:
        def __init__(self, url: str) -> None: ...
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *error: object) -> None: ...
        def generate(self, *args: Any, **kwargs: Any) -> list[Rollout]:
            return [rollout]

    def score(model: Any, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        return rollout.logprobs, rollout.masked_logprobs + np.float32(shift)

    for name, fake in (("serve", serve), ("RolloutClient", Client), ("score", score)):
        monkeypatch.setattr(example, name, fake)
    model_path = str(make_tiny_model(tmp_path))
    monkeypatch.setattr(sys, "argv", ["rollout_loop.py", "--model-path", model_path])
    assert example.main() == status
    assert ("FAILED" in capsys.readouterr().out) == bool(status)


def test_a_plain_kill_ends_the_servers(tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.write_text("#!/bin/sh\necho is ready: sidecar http://a engine http://b\nexec sleep 300\n")
    server.chmod(0o755)
    program = (
        f"import sys, time; sys.path.insert(0, {str(EXAMPLE.parent)!r})\nfrom rollout_loop import *\n"
        f"sys.executable = {str(server)!r}\nwith serve(Path({str(tmp_path)!r})) as urls:\n"
        "    print(*urls, flush=True)\n    time.sleep(300)"
    )
    example = psutil.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert example.stdout.readline() == "http://a http://b\n"
    (running,) = example.children()
    example.terminate()
    assert example.wait(timeout=60) == 128 + signal.SIGTERM
    assert not running.is_running()
    example.stdout.close()
