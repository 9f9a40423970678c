"""Exported names of `sglang_topp.replay`, and an import of the base package without torch."""

from __future__ import annotations

import subprocess
import sys

import sglang_topp.replay


def test_exported_names():
    assert sglang_topp.replay.__all__ == [
        "CandidateTensors",
        "DistillationLoss",
        "Layout",
        "ReplayMetrics",
        "RowSelection",
        "Scores",
        "distillation_loss",
        "replay_metrics",
        "replayed_old_logprobs",
        "score",
        "score_logits",
    ]
    assert all(hasattr(sglang_topp.replay, name) for name in sglang_topp.replay.__all__)


def test_the_base_package_does_not_import_torch():
    code = "import sys, sglang_topp; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
