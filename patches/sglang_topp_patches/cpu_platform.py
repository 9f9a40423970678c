"""An SGLang platform for machines without an accelerator, so that the real engine runs there.

SGLang's own CPU engine needs kernels that no package ships. This platform takes only the plain-torch
paths instead: slow, but the same scheduler, sampler and HTTP server as everywhere else. It stands
aside when an accelerator is present, or when `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

__all__ = ["TorchCpuPlatform", "activate"]


def activate() -> str | None:
    """The entry point: the platform's class path, or None where this platform has no business."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "cpu":
        return None
    return f"{__name__}.{TorchCpuPlatform.__name__}"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """SGLang on a CPU through torch's own kernels."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.device = "cpu"
        server_args.attention_backend = server_args.attention_backend or "torch_native"
        server_args.sampling_backend = server_args.sampling_backend or "pytorch"
        server_args.disable_cuda_graph = True

    def get_device(self, device_id: int = 0) -> str:
        # SGLang takes the name apart (`device.split(":")`), so not a torch.device as in CpuDeviceMixin.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"
