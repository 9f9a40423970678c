"""Runs the nucleus cases on the Triton kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interpreter import run_cases

HERE = Path(__file__).parent


def test_every_case_in_the_interpreter():
    files = ("test_select.py", "test_support.py", "staged_cases.py")
    run_cases(*(HERE / name for name in files), interpret=True)


def test_compiles_without_a_gpu():
    run_cases(HERE / "triton_compile.py", interpret=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_the_gpu():
    run_cases(HERE / "staged_cases.py", interpret=False)
