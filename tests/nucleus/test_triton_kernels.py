"""Runs the nucleus tests with the Triton kernels, interpreted and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.triton_subprocess import run_in_subprocess

HERE = Path(__file__).parent


@pytest.mark.timeout(960)  # longer than the subprocess's own limit
def test_all_cases_pass_in_the_interpreter():
    files = (
        "test_top_p_implementations.py",
        "test_support_implementations.py",
        "test_kept_mass.py",
        "gpu_extraction_cases.py",
    )
    run_in_subprocess(*(HERE / name for name in files), interpret=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gpu_extraction_cases_pass_on_a_gpu():
    run_in_subprocess(HERE / "gpu_extraction_cases.py", interpret=False)
