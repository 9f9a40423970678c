"""The tool loop's example, through a sidecar before the shared engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from sglang_topp_patches.releases import Feature
from tests.engine.running import Engine, run_sidecar
from tests.features import skip_without

skip_without(Feature.RESUMED)

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_loop.py"


def test_model_and_tool_take_turns(engine: Engine) -> None:
    with run_sidecar(engine.url) as url:
        command = [sys.executable, str(EXAMPLE), "--url", url, "--turns", "3", "--max-new-tokens", "6"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    turns = re.findall(r"^(model|tool) +(\d+) tokens", ended.stdout, re.MULTILINE)
    assert [who for who, _ in turns] == ["model", "tool", "model", "tool", "model"]
    counts = re.findall(r"(\d+) tokens of responses, (\d+) of them generated: (\d+)", ended.stdout)
    num_tokens, num_generated, num_sets = map(int, counts[0])
    assert 0 < num_generated == num_sets < num_tokens
