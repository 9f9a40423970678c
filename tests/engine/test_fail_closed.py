"""If the plugin does not hold, no request gets a set, and every caller learns the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_topp_patches.plugin import all_seams
from sglang_topp_patches.releases import RELEASES, installed
from tests.engine.sglang_forks import sitecustomize
from tests.engine.start_servers import run_engine
from tests.skip_missing_features import hooks_here

# A `sitecustomize` that every Python process with this folder on PYTHONPATH runs. SGLang then claims to be
# another release.
OTHER_RELEASE = """
import importlib.metadata as metadata
original = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else original(name)
"""

# A `sitecustomize` that changes one of SGLang's modules when it is imported.
CHANGED_MODULE = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader


class Changed(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        {change}


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != "{module}":
            return None
        spec = PathFinder.find_spec(name, path)
        spec.loader = Changed(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
"""

# SGLang's sampler has the function that slime's sglang-top_p.patch adds to it.
PATCHED_BY_SLIME = CHANGED_MODULE.format(
    module="sglang.srt.layers.sampler", change="module.renorm_logprob_over_top_p = print"
)

# SGLang lacks one function that is hooked, and another that is called takes other parameters.
MISSING_AND_CHANGED = CHANGED_MODULE.format(
    module="sglang.srt.managers.schedule_batch",
    change="del module.Req.reset_for_retract; module.Req.set_finish_with_abort = lambda self, reason: None",
)


@pytest.fixture
def another_release(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which SGLang claims a release that the plugin does not know."""
    return _at_start(OTHER_RELEASE, tmp_path)


@pytest.fixture
def patched_by_slime(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which SGLang was built with slime's patch of the sampler."""
    return _at_start(PATCHED_BY_SLIME, tmp_path)


def _at_start(code: str, folder: Path) -> dict[str, str]:
    forks = Path(sitecustomize.__file__).read_text()
    (folder / "sitecustomize.py").write_text(f"{code}\n{forks}")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def _sglang_topp(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_topp_server.cli.main", *arguments],
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
        sampling = {"max_new_tokens": 3, "ignore_eos": True}
        plain = {"text": "hello", "sampling_params": sampling, "return_logprob": True}
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
    ended = _sglang_topp("doctor", "-v")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for hook in hooks_here():
        assert f"holds  {hook.target}" in ended.stdout
    for feature in installed()[1].refused:
        assert f"refused: {feature}: " in ended.stdout
    assert ended.stdout.splitlines()[-1] == "the plugin holds"


def test_doctor_names_a_plugin_that_was_left_out() -> None:
    ended = _sglang_topp("doctor", env={"SGLANG_PLUGINS": "sglang_topp_cpu"})
    assert ended.returncode == 1
    assert "the plugin was not loaded in this process; do SGLANG_PLUGINS" in ended.stdout


needs_the_newest = pytest.mark.skipif(
    installed()[0] != next(iter(RELEASES)),
    reason="an unknown release is compared with the newest one's functions",
)


@needs_the_newest
def test_doctor_of_another_release(another_release: dict[str, str]) -> None:
    ended = _sglang_topp("doctor", "-v", env=another_release)
    assert ended.returncode == 1
    assert f"SGLang 0.5.99 is not supported; supported: {', '.join(RELEASES)}" in ended.stdout
    newest = [seam for seam in all_seams() if seam.is_in("0.5.99")]
    assert f"{len(newest)} of the {len(newest)} functions that are hooked or called" in ended.stdout
    for seam in newest:
        assert f"holds  {seam.target}" in ended.stdout
    assert "FAILS" not in ended.stdout


@needs_the_newest
def test_doctor_says_what_differs_and_how(another_release: dict[str, str], tmp_path: Path) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as changed:
        changed.write(MISSING_AND_CHANGED)
    ended = _sglang_topp("doctor", "-v", env=another_release)
    assert ended.returncode == 1
    lines = [line.strip() for line in ended.stdout.splitlines()]
    missing = lines.index("FAILS  sglang.srt.managers.schedule_batch.Req.reset_for_retract")
    assert lines[missing + 1].startswith("not found (")
    changed_to = lines.index("FAILS  sglang.srt.managers.schedule_batch.Req.set_finish_with_abort")
    assert lines[changed_to + 1] == "takes (self, reason), expected error_msg among them"
    count = sum(seam.is_in("0.5.99") for seam in all_seams())
    assert f"{count - 2} of the {count} functions that are hooked or called are as expected" in ended.stdout
    assert lines[-1] == "the plugin does NOT hold: requests are refused"


def test_an_sglang_that_slime_patched_is_refused_in_words(
    model_path: Path, log_folder: Path, patched_by_slime: dict[str, str]
) -> None:
    """Every seam holds there, and the log-probs of slime's requests would be renormalized twice."""
    words = "sglang.srt.layers.sampler has renorm_logprob_over_top_p: this SGLang was changed by slime's"
    ended = _sglang_topp("doctor", env=patched_by_slime)
    assert ended.returncode == 1
    assert [line for line in ended.stdout.splitlines() if line.startswith("problem: ")] == [
        line for line in ended.stdout.splitlines() if line.startswith(f"problem: {words}")
    ]
    assert f"problem: {words}" in ended.stdout
    assert "FAILS" not in ended.stdout

    with run_engine(model_path, log_folder / "patched-by-slime.log", env=patched_by_slime) as engine:
        sampling = {"max_new_tokens": 3, "ignore_eos": True}
        plain = {"text": "hello", "sampling_params": sampling, "return_logprob": True}
        assert len(engine.generate(**plain)["output_ids"]) == 3
        flagged = {"custom_params": {"return_top_p_token_ids": True}}
        for field, asked in (
            ("return_top_p_token_ids", {"sampling_params": flagged}),
            ("top_logprobs_p", {"top_logprobs_p": 0.9}),
        ):
            refused = engine.post(**{**plain, **asked})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error.startswith(
                f"{field}: candidate sets are not served here: {words} sglang-top_p.patch,"
            )
            assert error.endswith("(this plugin answers return_top_p_token_ids itself)")
        report = engine.http.get("/server_info").json()["sglang_topp"]
        assert report["active"] is False
        assert f"sglang-topp refuses candidate sets: {words}" in engine.log.read_text()
