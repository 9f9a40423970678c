"""Run the cases of the Triton kernels, interpreted or on a GPU, and compile the kernels, in new processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.triton_subprocess import run_in_subprocess

HERE = Path(__file__).parent


def test_in_the_interpreter():
    run_in_subprocess(HERE / "gathered_products_triton_cases.py", interpret=True)


def test_compiles_without_a_gpu():
    run_in_subprocess(HERE / "gathered_products_triton_compile.py", interpret=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_the_gpu():
    run_in_subprocess(HERE / "gathered_products_triton_cases.py", interpret=False)
