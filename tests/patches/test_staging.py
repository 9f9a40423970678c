"""Runs the staging cases: on a GPU or, where there is none, interpreted."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.interpreter import run_cases


def test_staging():
    run_cases(Path(__file__).parent / "staging_cases.py", interpret=not torch.cuda.is_available())
