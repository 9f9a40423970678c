"""The tool loop's example, on the shared engine and through a sidecar."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.engine.running import Engine, run_sidecar

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_loop.py"


def run(url: str) -> str:
    command = [sys.executable, str(EXAMPLE), "--url", url, "--turns", "3", "--max-new-tokens", "6"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_model_and_tool_take_turns(engine: Engine) -> None:
    with run_sidecar(engine.url) as sidecar:
        for url in (engine.url, sidecar):
            printed = run(url)
            turns = re.findall(r"^(model|tool) +(\d+) tokens", printed, re.MULTILINE)
            assert [who for who, _ in turns] == ["model", "tool", "model", "tool", "model"]
            tokens, generated, sets = map(
                int, re.findall(r"(\d+) tokens of responses, (\d+) of them generated: (\d+)", printed)[0]
            )
            assert 0 < generated == sets < tokens
