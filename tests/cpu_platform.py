"""Selects SGLang's CPU platform on machines without an accelerator."""

from __future__ import annotations

import os

import torch

__all__ = ["request_cpu_platform"]


def request_cpu_platform() -> None:
    """Set `SGLANG_PLATFORM` for this process and its children, unless the machine has an accelerator."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("SGLANG_PLATFORM", "sglang_topp_cpu")
