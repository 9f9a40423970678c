"""An SGLang platform plugin that runs SGLang on the CPU of a machine without an accelerator.

`SGLANG_PLATFORM=sglang_topp_cpu` selects this platform. SGLang chooses its platform at import, before it
parses arguments, so `--device cpu` comes too late. SGLang never chooses this CPU platform automatically. So
if a GPU driver is broken and `SGLANG_PLATFORM` is not set, SGLang refuses to start instead of running on the
slow CPU.

SGLang's own CPU engine needs kernels that no package ships. This platform runs SGLang's plain-torch code,
which needs none of these kernels. The plain-torch code is slow, but the scheduler, the sampler, and the HTTP
server are the same as on other platforms.

SGLang's platform interface changed between 0.5.12 and 0.5.23. `TorchCpuPlatform` has the methods of all
versions of the interface. Each SGLang release calls only the methods that it knows.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import psutil
import torch
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from sglang_topp.errors import PatchError
from sglang_topp_patches.hooks import release_key
from sglang_topp_patches.releases import installed

_NAME = "sglang_topp_cpu"  # the platform entry point and the plugin entry point have this name
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
# These ask for pinned memory even on a platform that has none, in SGLang before the release beside them. The
# last is the buffer of `--enable-return-routed-experts`.
_PINNING = (
    (f"{_LOGITS}._get_pruned_states", "0.5.13"),
    (f"{_LOGITS}._expand_metadata_for_logprobs", "0.5.13"),
    ("sglang.srt.state_capturer.base.BaseHostCache.__init__", "0.5.20"),
)

# On a CPU, SGLang before 0.5.14 imports two kernel packages, but calls neither. `sgl_kernel` cannot be
# imported without the CUDA driver, and SGLang does not install `vllm`, so both have stubs. Only two modules
# of vllm have one: the import of any other fails.
_STUBBED = "sgl_kernel"
_STUBBED_MODULES = ("vllm", "vllm._custom_ops")


def activate() -> str | None:
    """Platform entry point: return the platform's class path if `SGLANG_PLATFORM` selects it, else None.

    Raises:
        PatchError: `SGLANG_PLATFORM` selects this platform, but the machine has an accelerator, or
            `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU engine. The error keeps SGLang from starting.
    """
    if not _is_selected():
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise PatchError(f"SGLANG_USE_CPU_ENGINE: got 1 and SGLANG_PLATFORM={_NAME}, expected one of them")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "cpu":
        raise PatchError(
            f"SGLANG_PLATFORM: got {_NAME} on a machine with an accelerator ({accelerator.type}), which parts"
            " of SGLang would use all the same; unset it, or hide the accelerator (CUDA_VISIBLE_DEVICES=)"
        )
    # In some supported releases of SGLang, tensor-parallel ranks use NCCL whenever they can load the NCCL
    # library. NCCL does not work on a CPU, so name a library file that does not exist.
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "none")
    if importlib.util.find_spec("sglang.srt.platforms.cpu") is None:  # SGLang before 0.5.14
        _install_kernel_stubs()
    return f"{__name__}.{TorchCpuPlatform.__name__}"


def register() -> None:
    """Plugin entry point (group `sglang.srt.plugins`): register the hooks that SGLang needs on a CPU."""
    if not _is_selected():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    # SGLang 0.5.12 does not ask the platform for the device, so the hook `_name_device` sets the device. The
    # hook is installed only if SGLang has `_handle_missing_default_values`. Some newer releases lack it.
    if hasattr(ServerArgs, "_handle_missing_default_values"):
        target = "sglang.srt.server_args.ServerArgs._handle_missing_default_values"
        HookRegistry.register(target, _name_device, HookType.BEFORE)
    release = release_key(installed()[0])
    for target, until in _PINNING:
        if release < release_key(until):
            HookRegistry.register(target, _without_pinned_memory, HookType.AROUND)
    if release >= release_key("0.5.20"):
        # SGLang registers the buffer of `--enable-return-routed-experts` with CUDA, whatever the platform is.
        target = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
        HookRegistry.register(target, _do_nothing, HookType.REPLACE)


def _is_selected() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == _NAME


def _name_device(server_args: Any) -> None:
    if server_args.device is None:
        server_args.device = "cpu"


def _without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    pinning: dict[str, Callable[..., Any]] = {"tensor": torch.tensor, "zeros": torch.zeros}

    def unpinned(make: Callable[..., Any], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    vars(torch).update({name: partial(unpinned, make) for name, make in pinning.items()})
    try:
        return original(*args, **kwargs)
    finally:
        vars(torch).update(pinning)


def _do_nothing(*args: Any) -> None:
    """Stand in for a function that has nothing to do on a CPU."""


class TorchCpuPlatform(SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """The platform that runs SGLang on a CPU with torch's own kernels."""

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

    # -- The following methods treat the CPU and its memory as one device, which all ranks share.

    def get_device(self, device_id: int = 0) -> str:
        # Return a string, because SGLang splits the device's name (`device.split(":")`).
        return "cpu"

    def set_device(self, device: Any) -> None:
        """Do nothing: there is only one CPU device to select."""

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

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    # SGLang up to 0.5.21 calls `get_mha_kv_pool_cls` and `get_mla_kv_pool_cls`. SGLang after 0.5.21 calls
    # `get_kv_pool_cls`. If `get_kv_pool_cls` returns None, SGLang selects its own classes. The two older
    # methods return these classes too.

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


def _install_kernel_stubs() -> None:
    """Make `import sgl_kernel`, with its submodules, and `import vllm._custom_ops` succeed."""
    if not any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StubFinder())


class _Stub(ModuleType):
    """A stub for a module or a kernel. Every attribute is another stub. Calling a stub raises an error."""

    def __getattr__(self, name: str) -> _Stub:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no attribute {name!r}")
        return _Stub(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self.__name__} needs an accelerator, and this is the CPU platform")


class _StubFinder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _STUBBED_MODULES and fullname.partition(".")[0] != _STUBBED:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub module has no code to run."""
