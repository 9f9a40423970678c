"""Runs the staging cases on a GPU, or in Triton's interpreter without one."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.triton_subprocess import run_in_subprocess


def test_staging():
    run_in_subprocess(Path(__file__).parent / "gpu_staging_cases.py", interpret=not torch.cuda.is_available())
