"""The real SGLang serves on a CPU only when `SGLANG_PLATFORM` asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")

VENDOR = """
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


class Vendor(SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "vendor"


def activate():
    return f"{__name__}.Vendor"
"""
TAKEN = "from sglang.srt.platforms import current_platform; print(current_platform.device_name)"


def _run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Start SGLang with these variables, and without the one that asks for a platform."""
    kept = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**kept, **env},
        timeout=400,
        check=False,
    )


def test_a_machine_whose_accelerator_is_not_found_does_not_serve(model_path: Path) -> None:
    """SGLang refuses to start, as it does without the plugin. It must not serve on the CPU unnoticed."""
    ended = _run("-m", "sglang.launch_server", "--model-path", str(model_path), "--port", "0")
    assert ended.returncode != 0
    assert "platform plugin activated" not in ended.stdout + ended.stderr


def test_a_vendors_platform_is_taken(tmp_path: Path) -> None:
    """SGLang would refuse two platforms that are both active by default."""
    information = tmp_path / "vendor-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[sglang.srt.platforms]\nvendor = vendor_platform:activate\n"
    )
    (tmp_path / "vendor_platform.py").write_text(VENDOR)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ended = _run("-c", TAKEN, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "vendor"
