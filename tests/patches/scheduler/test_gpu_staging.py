"""Runs the staging cases on a GPU, or in Triton's interpreter without one, and compiles the kernels."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.triton_subprocess import run_in_subprocess

HERE = Path(__file__).parent


def test_staging():
    run_in_subprocess(HERE / "gpu_staging_cases.py", interpret=not torch.cuda.is_available())


def test_variants_of_the_kernels():
    run_in_subprocess(HERE / "kernel_variants.py", interpret=False)
