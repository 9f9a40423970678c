"""Where the patch set does not hold, nobody gets a set, and everybody is told why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_topp_patches.releases import RELEASES, installed
from tests.engine.running import run_engine

# Read by every Python process that has its folder on PYTHONPATH: SGLang claims to be another release.
OTHER_RELEASE = """
import importlib.metadata as metadata
original = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else original(name)
"""

# And ours was written for a release that has one function elsewhere, and another with a parameter more.
MOVED_AND_CHANGED = """
from dataclasses import replace
from types import MappingProxyType
from sglang_topp_patches import releases

batch = "sglang.srt.managers.schedule_batch."
new = {
    batch + "FINISH_ABORT": {"target": batch + "no_longer_here.FINISH_ABORT"},
    batch + "Req.set_finish_with_abort": {"parameters": ("self", "error_msg", "cause")},
}
release = releases.RELEASES[original("sglang")]
seams = tuple(replace(seam, **new.get(seam.target, {})) for seam in release.seams)
releases.RELEASES = MappingProxyType({"0.5.23": replace(release, seams=seams)})
"""


@pytest.fixture
def another_release(tmp_path: Path) -> dict[str, str]:
    """An environment in which SGLang is of a release that the patch set does not know."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_RELEASE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}


def _sglang_topp(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_topp_server.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=600,
        check=False,
    )


def test_an_engine_of_another_release_serves_everything_but_the_feature(
    model_path: Path, log_folder: Path, another_release: dict[str, str]
) -> None:
    with run_engine(model_path, log_folder / "other-release.log", env=another_release) as engine:
        plain = {"text": "hello", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
        assert len(engine.generate(**plain)["output_ids"]) == 3
        for place in (
            {"top_logprobs_p": 0.9},
            {"sampling_params": {"custom_params": {"top_logprobs_p": 0.9}}},
        ):
            refused = engine.post(**{**plain, **place})
            assert refused.status_code == 400
            assert "SGLang 0.5.99 is not supported" in refused.json()["error"]
        report = engine.http.get("/server_info").json()["sglang_topp"]
        assert report["active"] is False
        assert any("0.5.99" in problem for problem in report["problems"])


def test_serve_says_why_and_exits_non_zero(model_path: Path, another_release: dict[str, str]) -> None:
    ended = _sglang_topp(
        "serve",
        *("--model-path", str(model_path), "--port", "0", "--engine-port", "0", "--"),
        *("--dtype", "float32", "--max-total-tokens", "4096", "--mem-fraction-static", "0.2"),
        env=another_release,
    )
    assert ended.returncode not in (0, None)
    assert "SGLang 0.5.99 is not supported" in ended.stderr.splitlines()[-1]
    assert "is ready" not in ended.stdout


def test_doctor_holds_here() -> None:
    ended = _sglang_topp("doctor")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for seam in installed()[1].seams:
        assert f"holds  {seam.target}" in ended.stdout
    for feature in installed()[1].refused:
        assert f"refused: {feature}: " in ended.stdout
    assert ended.stdout.splitlines()[-1] == "the patch set holds"


def test_doctor_names_a_plugin_that_was_left_out() -> None:
    ended = _sglang_topp("doctor", env={"SGLANG_PLUGINS": "sglang_topp_cpu"})
    assert ended.returncode == 1
    assert "its hook is not in place" in ended.stdout


def test_doctor_of_another_release(another_release: dict[str, str]) -> None:
    ended = _sglang_topp("doctor", env=another_release)
    assert ended.returncode == 1
    assert f"SGLang 0.5.99 is not supported; supported: {', '.join(RELEASES)}" in ended.stdout
    assert "not a supported release; compared with 0.5." in ended.stdout
    for seam in installed()[1].seams:
        assert f"holds  {seam.target}" in ended.stdout
    assert "FAILS" not in ended.stdout


def test_doctor_says_what_differs_and_how(another_release: dict[str, str], tmp_path: Path) -> None:
    """The installed SGLang has a class of the scheduler's elsewhere, and a method takes one thing less."""
    with (tmp_path / "sitecustomize.py").open("a") as changed:
        changed.write(MOVED_AND_CHANGED)
    ended = _sglang_topp("doctor", env=another_release)
    assert ended.returncode == 1
    lines = [line.strip() for line in ended.stdout.splitlines()]
    moved = lines.index("FAILS  sglang.srt.managers.schedule_batch.no_longer_here.FINISH_ABORT")
    assert lines[moved + 1].startswith("not found (")
    assert lines[moved + 2] == "that name is at sglang.srt.managers.schedule_batch.FINISH_ABORT"
    changed_to = lines.index("FAILS  sglang.srt.managers.schedule_batch.Req.set_finish_with_abort")
    assert lines[changed_to + 1].startswith("takes (self, error_msg")
    assert lines[changed_to + 1].endswith("), expected cause among them")
    assert f"{len(installed()[1].seams) - 2} of its {len(installed()[1].seams)} seams hold" in lines
    assert lines[-1] == "the patch set does NOT hold: requests are refused"
