"""The GPU's benchmark compares like with like, and measures nothing where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import nucleus_gpu, results
from tests.interpreter import run_cases


def test_contenders_in_the_interpreter():
    run_cases(Path(__file__).with_name("nucleus_gpu_cases.py"), interpret=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_no_rows_without_a_gpu(capsys):
    with results.recorded() as tables:
        nucleus_gpu.run()
    assert tables == []
    assert "not measured" in capsys.readouterr().out
