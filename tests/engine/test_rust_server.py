"""SGLang's Rust HTTP server ignores our fields and cannot be patched: the scheduler refuses them.

Every caller that can receive the reason does.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_topp.errors import MissingCandidateSetsError
from sglang_topp_client import RolloutClient
from tests.engine.start_servers import run_engine

if importlib.util.find_spec("sglang.srt.rust_server") is None:
    pytest.skip("this SGLang has no Rust server", allow_module_level=True)

RUST = {"SGLANG_RUST_SERVER": "1"}


def _sglang_topp(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_topp_server.cli.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **RUST, **environment},
        timeout=600,
        check=False,
    )


def test_the_engine_refuses_what_reaches_it(model_path: Path, log_folder: Path) -> None:
    with run_engine(model_path, log_folder / "rust.log", env=RUST) as engine:
        body = {
            "text": "hello",
            "sampling_params": {"max_new_tokens": 3, "custom_params": {"top_logprobs_p": 0.9}},
            "return_logprob": True,
        }
        for stream in (False, True):
            answer = engine.post(**body, stream=stream)
            assert answer.status_code == (200 if stream else 400)
            assert '"error"' in answer.text
            assert "SGLANG_RUST_SERVER" in answer.text
        assert len(engine.generate(text="hello", sampling_params={"max_new_tokens": 3})["output_ids"]) == 3
        # The report is added by the Python server.
        assert "sglang_topp" not in engine.http.get("/server_info").json()
        # A field at the top level never arrives, and the client notices.
        with RolloutClient(engine.url, kind="sglang") as client, pytest.raises(MissingCandidateSetsError):
            client.generate("hello", {"max_new_tokens": 3}, top_logprobs_p=0.9)


def test_serve_does_not_start_it() -> None:
    ended = _sglang_topp("serve", "--model-path", "unused", "--port", "0", "--engine-port", "0")
    assert ended.returncode == 2
    assert "SGLANG_RUST_SERVER" in ended.stderr


def test_doctor_names_it() -> None:
    ended = _sglang_topp("doctor", SGLANG_RETURN_ORIGINAL_LOGPROB="1")
    assert ended.returncode == 1
    assert "problem: SGLANG_RUST_SERVER" in ended.stdout
    assert "note: requests at a temperature other than 1 are refused" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("the plugin does NOT hold")
