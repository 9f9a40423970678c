"""An SGLang platform for machines without an accelerator, so that the real engine runs there.

SGLang's own CPU engine needs kernels that no package ships. This platform takes only the plain-torch
paths instead: slow, but the same scheduler, sampler and HTTP server as everywhere else. It stands
aside when an accelerator is present, or when `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own.

SGLang's platform interface changed between 0.5.12 and 0.5.23. The class answers all of it, the methods
that one release calls and another does not have among them; none of them looks at the release.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
from collections.abc import Callable
from typing import Any

import psutil
import torch
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from sglang_topp_patches import kernel_stand_ins
from sglang_topp_patches.package_source import PackageSource

__all__ = ["TorchCpuPlatform", "activate", "register"]

_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"


def activate() -> str | None:
    """The entry point: the platform's class path, or None where this platform has no business."""
    if not _is_needed():
        return None
    # Older releases' tensor parallel ranks take NCCL wherever its library loads; it has nothing for a CPU.
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "none")
    if importlib.util.find_spec("sglang.srt.platforms.cpu") is None:  # before 0.5.14
        kernel_stand_ins.install()
    return f"{__name__}.{TorchCpuPlatform.__name__}"


def register() -> None:
    """The entry point of the group `sglang.srt.plugins`: SGLang need not be told `--device cpu`."""
    if not _is_needed():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    # From 0.5.13 on SGLang asks the platform, and at some time the method went away.
    if hasattr(ServerArgs, "_handle_missing_default_values"):
        target = "sglang.srt.server_args.ServerArgs._handle_missing_default_values"
        HookRegistry.register(target, _name_device, HookType.BEFORE)
    # 0.5.12 pins memory there without asking the platform; what has the second method does.
    pins = [f"{_LOGITS}._get_pruned_states", f"{_LOGITS}._expand_metadata_for_logprobs"]
    if PackageSource.installed().has(pins[-1]):
        for target in pins:
            HookRegistry.register(target, _without_pinned_memory, HookType.AROUND)


def _is_needed() -> bool:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return False
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is None or accelerator.type == "cpu"


def _name_device(server_args: Any) -> None:
    if server_args.device is None:
        server_args.device = "cpu"


def _without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    pinning = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return pinning(*args, **kwargs)

    torch.tensor = tensor
    try:
        return original(*args, **kwargs)
    finally:
        torch.tensor = pinning


class TorchCpuPlatform(SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """SGLang on a CPU through torch's own kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.device = "cpu"
        server_args.attention_backend = server_args.attention_backend or "torch_native"
        server_args.sampling_backend = server_args.sampling_backend or "pytorch"
        server_args.disable_cuda_graph = True

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    # The device: all ranks share the one CPU and its memory.

    def get_device(self, device_id: int = 0) -> str:
        # SGLang takes the name apart (`device.split(":")`), so not a torch.device.
        return "cpu"

    def set_device(self, device: Any) -> None:
        """Nothing to choose from."""

    def get_device_name(self, device_id: int = 0) -> str:
        return f"cpu ({platform.machine()})"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return platform.machine()

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def empty_cache(self) -> None:
        gc.collect()

    def synchronize(self) -> None:
        """Nothing runs asynchronously."""

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    # What 0.5.21 and earlier ask an out-of-tree platform for; later ones ask `get_kv_pool_cls`, whose None
    # means the same classes.

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]  # SGLang ships no types

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool  # type: ignore[no-any-return]  # SGLang ships no types

    def get_kv_pool_cls(self, *, kind: str) -> None:
        return None

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator  # type: ignore[no-any-return]  # SGLang ships no types

    def get_graph_runner_cls(self) -> None:
        return None

    def support_cuda_graph(self) -> bool:
        return False

    def support_piecewise_cuda_graph(self) -> bool:
        return False
