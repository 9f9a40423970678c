"""Runs the Triton cases of the head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interpreter import run_cases

HERE = Path(__file__).parent


def test_in_the_interpreter():
    run_cases(HERE / "head_triton_cases.py", interpret=True)


def test_compiles_without_a_gpu():
    run_cases(HERE / "head_triton_compile.py", interpret=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_the_gpu():
    run_cases(HERE / "head_triton_cases.py", interpret=False)
