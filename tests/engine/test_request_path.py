"""CONTRIBUTING.md follows one request: it names each file that a request enters, and no other."""

from __future__ import annotations

import os
import re
import signal
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from tests.engine.start_servers import run_engine
from tests.matrix.releases import RELEASES

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BODY = {
    "text": "hello",
    "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_p": 0.9,
    "return_logprobs_in_base64": True,
}


def named() -> list[str]:
    """Return the modules of the files that CONTRIBUTING.md numbers, in its order."""
    paths = re.findall(r"^\d+\. `([\w/]+)\.py`", CONTRIBUTING.read_text(), re.M)
    paths = [path if path.startswith("sglang_topp/") else f"sglang_topp_patches/{path}" for path in paths]
    return [path.removesuffix("/__init__").replace("/", ".") for path in paths]


@pytest.mark.skipif(version("sglang") != next(iter(RELEASES)), reason="the list follows the newest SGLang")
def test_contributing_names_the_files_that_a_request_enters(
    model_path: Path, log_folder: Path, tmp_path: Path
) -> None:
    entered = tmp_path / "entered"
    follow = ["tests.engine.launch_followed", str(entered)]
    with run_engine(model_path, log_folder / "followed.log", module=follow) as engine:
        engine.http.post("/generate", json=BODY).raise_for_status()  # the next one finds everything started
        processes = [engine.process.pid]
        processes += [child.pid for child in psutil.Process(engine.process.pid).children(recursive=True)]
        assert len(processes) == 3, "the HTTP process, the scheduler, and the detokenizer"
        for process in processes:
            os.kill(process, signal.SIGUSR2)
        answer = engine.http.post("/generate", json=BODY).raise_for_status().json()
    assert "output_top_p_logprobs_lengths" in answer["meta_info"]
    modules = [line for line in entered.read_text().split() if line != "sglang_topp_patches.hooks"]
    assert sorted(named()) == sorted(set(modules))
