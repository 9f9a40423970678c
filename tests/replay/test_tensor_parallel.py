"""Tensor and context parallelism on 2 and 4 processes, equal to one process to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import vocab_range

HERE = Path(__file__).parent
# Each rank loads torch, and this machine need not have many cores.
LIMIT_S = 300


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process(ranks, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
        "PYTHONWARNINGS": "error",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "tensor_parallel_rank.py"),
                str(rank),
                str(ranks),
                str(tmp_path / "rendezvous"),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        ends = [(process.communicate(timeout=LIMIT_S), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(code == 0 for _, code in ends), "\n".join(stderr for (_, stderr), _ in ends)

    for rank, ((stdout, _), _) in enumerate(ends):
        results = json.loads(stdout.splitlines()[-1])
        assert len(results) == (50 if ranks == 2 else 53)
        for case, difference in results.items():
            # bfloat16: the ranks' float32 parts are summed before they are rounded, once.
            assert difference <= (2**-8 if "bfloat16" in case else 1e-12), f"rank {rank}: {case}"


def test_vocab_range():
    assert [vocab_range(61, 4, rank) for rank in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 61)]
    assert [vocab_range(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert vocab_range(7, 1, 0) == (0, 7)
    for arguments in ((0, 1, 0), (5, 0, 0), (5, 2, 2), (5, 2, -1)):
        with pytest.raises(InvalidInputError, match="expected positive sizes"):
            vocab_range(*arguments)
