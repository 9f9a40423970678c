"""Two processes over gloo: a group split between them on one engine, and an LM head sharded over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.engine.start_servers import Engine, free_port

ROOT = Path(__file__).parents[3]


def test_each_half_of_a_group_starts_at_a_ratio_of_one(
    model_path: Path, trl_engine: Engine, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += ["-m", "tests.integrations.trl.two_processes", str(model_path), trl_engine.url, str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["prompts"] == second["prompts"]  # two samples of one group in each process
    assert all(len(np.unique(each["prompts"][:2], axis=0)) == 1 for each in (first, second))
    assert first["versions"] == second["versions"] == ["step-0-push-1"] * 2 + ["step-1-push-2"] * 2
    assert first["weights"] == second["weights"]
    assert first["ratios"] != second["ratios"]
    for seen in (first, second):
        assert len(seen["ratios"]) == 2
        assert seen["sharded_head_error"] < 1e-5
        for ratios in map(np.array, seen["ratios"]):
            assert abs(ratios.mean() - 1) < 1e-4
            assert np.abs(ratios - 1).max() < 1e-3
    # The metrics are those of all processes.
    in_all = [len(a) + len(b) for a, b in zip(first["ratios"], second["ratios"], strict=True)]
    assert first["tokens"][:2] == in_all
