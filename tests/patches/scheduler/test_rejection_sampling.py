"""Runs the cases of rejection sampling on a GPU, or in Triton's interpreter without one."""

from __future__ import annotations

from pathlib import Path

from sglang_topp_patches.releases import Feature
from tests.skip_missing_features import needs
from tests.triton_subprocess import run_in_subprocess


@needs(Feature.SPECULATIVE)
@needs(Feature.REJECTION_SAMPLING)
def test_rejection_sampling() -> None:
    run_in_subprocess(Path(__file__).parent / "rejection_cases.py", interpret=True)
