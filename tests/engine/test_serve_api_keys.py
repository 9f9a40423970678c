"""`sglang-topp serve` with keys: they work, and neither the list of processes nor the log shows them."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx

from sglang_topp_client import RolloutClient
from tests.engine.start_servers import START_LIMIT_S


def test_no_process_shows_a_key(model_path: Path, log_folder: Path) -> None:
    ours, theirs = secrets.token_hex(), secrets.token_hex()
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "serve", "--model-path", str(model_path)]
    command += ["--port", "0", "--engine-port", "0", "--ready-timeout-s", str(START_LIMIT_S), "--"]
    command += ["--dtype", "float32", "--max-total-tokens", "16384", "--mem-fraction-static", "0.2"]
    log = log_folder / "keys.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "SGLANG_TOPP_API_KEY": ours, "SGLANG_TOPP_ENGINE_API_KEY": theirs},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            assert "ready:" in words, log.read_text()[-4000:]
            sidecar, engine = words[words.index("sidecar") + 1], words[words.index("engine") + 1]
            with RolloutClient(sidecar, api_key=ours) as client:
                (rollout,) = client.generate("hello", {"max_new_tokens": 4}, top_logprobs_p=0.9)
                assert rollout.candidates is not None
            assert httpx.get(f"{engine}/server_info", timeout=60).status_code == 401
            with RolloutClient(engine, kind="sglang", api_key=theirs) as client:
                assert client.server_info()["sglang_topp"]["active"]

            shown = command_lines()
            assert any("sglang::scheduler" in line for line in shown)
            assert any("sglang_topp_server.process.engine_supervisor" in line for line in shown)
            assert [line for line in shown if ours in line or theirs in line] == []
            said = log.read_text(errors="replace")
            assert re.search(r"\bapi_key(?:': |=)'\*{3}'", said)
            assert ours not in said
            assert theirs not in said
        finally:
            process.terminate()
            process.wait(120)


def command_lines() -> list[str]:
    """Return the command lines of all processes of this machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines
