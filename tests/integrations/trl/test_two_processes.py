"""Two processes over gloo: a group split between them on one engine, with DDP and with a sharded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.start_servers import Engine, free_port

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def seen(
    model_path: Path, trl_engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], ...]:
    """What each of the two processes saw."""
    output = tmp_path_factory.mktemp("two_processes")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += ["-m", "tests.integrations.trl.two_processes", str(model_path), trl_engine.url, str(output)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return tuple(json.loads((output / f"{rank}.json").read_text()) for rank in (0, 1))


@pytest.mark.parametrize(
    ("name", "wrapper", "of_mean", "of_token"),
    [
        ("ddp", "DistributedDataParallel", 1e-4, 1e-3),
        ("fsdp", "FSDPQwen2ForCausalLM", 1e-4, 1e-3),
        ("fsdp_bf16", "FSDPQwen2ForCausalLM", 0.02, 0.2),  # all computation is in bfloat16 here
    ],
)
def test_each_half_of_a_group_starts_at_a_ratio_of_one(
    seen: tuple[dict[str, Any], ...], name: str, wrapper: str, of_mean: float, of_token: float
) -> None:
    first, second = (each[name] for each in seen)
    assert first["wrapper"] == second["wrapper"] == wrapper
    assert first["prompts"][:4] == second["prompts"][:4]  # two samples of one group in each process
    assert all(len(np.unique(each["prompts"][:2], axis=0)) == 1 for each in (first, second))
    assert first["versions"] == second["versions"]
    assert first["versions"][:4] == ["step-0-push-1"] * 2 + ["step-1-push-2"] * 2
    assert set(first["versions"][4:]) == {"step-2-push-3"}
    assert first["weights"] == second["weights"]
    assert first["ratios"] != second["ratios"]
    for each in (first, second):
        for ratios in map(np.array, each["ratios"]):
            assert abs(ratios.mean() - 1) < of_mean
            assert np.abs(ratios - 1).max() < of_token
        assert abs(each["evaluated_ratio"] - 1) < of_mean
        assert each["share_of_bf16_logprobs"] < 0.1  # they are float32, whatever the model's precision
    # The metrics are those of all processes.
    in_all = [len(a) + len(b) for a, b in zip(first["ratios"], second["ratios"], strict=True)]
    assert first["tokens"][:2] == in_all[:2]


def test_the_gradients_of_a_sharded_head(seen: tuple[dict[str, Any], ...]) -> None:
    for each in seen:
        assert len(each["head_errors"]) == 2
        assert max(each["head_errors"].values()) < 1e-5
