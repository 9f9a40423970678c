"""Runs the Triton cases in their own processes: the interpreter is chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def run_cases(name: str, *, interpret: bool) -> None:
    pytest.importorskip("triton", reason="torch brings Triton on Linux only")
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    if interpret:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_in_the_interpreter():
    run_cases("head_triton_cases.py", interpret=True)


def test_compiles_without_a_gpu():
    run_cases("head_triton_compile.py", interpret=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_the_gpu():
    run_cases("head_triton_cases.py", interpret=False)
