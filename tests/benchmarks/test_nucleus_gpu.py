"""The GPU benchmark of the extraction: equal results of its contenders, and no result without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import nucleus_gpu
from benchmarks.harness import result_files
from tests.triton_subprocess import run_in_subprocess


def test_contenders_in_the_interpreter():
    run_in_subprocess(Path(__file__).with_name("nucleus_gpu_cases.py"), interpret=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_no_table_is_recorded(capsys):
    with result_files.collect_tables() as tables:
        nucleus_gpu.run()
    assert tables == []
    assert "not measured" in capsys.readouterr().out
