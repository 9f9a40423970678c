"""The CPU platform serves only when `SGLANG_PLATFORM` asks for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.platforms.interface import SRTPlatform

    from sglang_topp.errors import PatchError
    from sglang_topp_patches.cpu import platform


@pytest.fixture(autouse=True)
def _asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variable for the platform, and nothing else."""
    monkeypatch.setenv("SGLANG_PLATFORM", "sglang_topp_cpu")
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


def _accelerator(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    found = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)


def _before_0_5_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has no CPU platform of its own."""
    find = importlib.util.find_spec
    own = "sglang.srt.platforms.cpu"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == own else find(name))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the targets of the hooks that are registered from now on."""
    targets: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: targets.append(target))
    return targets


@pytest.fixture
def _imports_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the stubs that an older release installed, and restore everything afterwards."""
    kept = {name: module for name, module in sys.modules.items() if _is_stood_in_for(name)}
    for name in kept:
        del sys.modules[name]
    finders = [finder for finder in sys.meta_path if not isinstance(finder, platform._StubFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    yield
    for name in [name for name in sys.modules if _is_stood_in_for(name)]:
        del sys.modules[name]
    sys.modules.update(kept)


def _is_stood_in_for(name: str) -> bool:
    return name.partition(".")[0] in ("sgl_kernel", "vllm")


def test_it_serves_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _accelerator(monkeypatch, None)
    path = platform.activate()
    assert path is not None
    assert pkgutil.resolve_name(path) is platform.TorchCpuPlatform


@pytest.mark.usefixtures("_imports_as_before")
@pytest.mark.parametrize("selected", [None, "", "a_vendors"])
def test_it_stands_aside_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, registered: list[str], selected: str | None
) -> None:
    """A machine without a visible accelerator may have a broken driver."""
    if selected is None:
        monkeypatch.delenv("SGLANG_PLATFORM")
    else:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    _accelerator(monkeypatch, None)
    _before_0_5_14(monkeypatch)
    finders = list(sys.meta_path)
    assert platform.activate() is None
    platform.register()
    assert registered == []
    assert sys.meta_path == finders
    assert not any(_is_stood_in_for(name) for name in sys.modules)
    with pytest.raises(ImportError):  # there is no platform, and none is invented
        importlib.import_module("vllm._custom_ops")


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_it_refuses_a_machine_with_an_accelerator(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    _accelerator(monkeypatch, device)
    with pytest.raises(PatchError, match=rf"SGLANG_PLATFORM: got sglang_topp_cpu .* \({device}\)"):
        platform.activate()


def test_it_refuses_sglangs_own_cpu_engine_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _accelerator(monkeypatch, None)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(PatchError, match="SGLANG_USE_CPU_ENGINE: got 1"):
        platform.activate()


@pytest.mark.usefixtures("_imports_as_before")
def test_releases_with_a_cpu_platform_of_their_own_get_no_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    _accelerator(monkeypatch, None)
    finders = list(sys.meta_path)
    own = importlib.util.find_spec("sglang.srt.platforms.cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: own or object())
    assert platform.activate() is not None
    assert sys.meta_path == finders


@pytest.mark.usefixtures("_imports_as_before")
def test_older_ones_import_kernels_that_nobody_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    _accelerator(monkeypatch, None)
    _before_0_5_14(monkeypatch)
    finders = len(sys.meta_path)
    assert platform.activate() == platform.activate() is not None
    assert len(sys.meta_path) == finders + 1
    kernels: Any = importlib.import_module("sgl_kernel.scalar_type")
    assert kernels.scalar_types.uint4 is not None
    rotary_embedding = importlib.import_module("vllm._custom_ops").rotary_embedding
    with pytest.raises(RuntimeError, match=r"vllm\._custom_ops\.rotary_embedding needs an accelerator"):
        rotary_embedding(1, key=2)
    with pytest.raises(ImportError):
        importlib.import_module("vllm.distributed")
    # Code that inspects a stub finds no attribute that does not exist.
    assert not hasattr(kernels, "__file__")
    assert not hasattr(kernels.scalar_types, "__len__")


def test_sglang_need_not_be_told_the_device() -> None:
    given = SimpleNamespace(device=None)
    platform._name_device(given)
    assert given.device == "cpu"
    given = SimpleNamespace(device="cuda:1")
    platform._name_device(given)
    assert given.device == "cuda:1"


@pytest.mark.parametrize(
    ("version", "count"), [("0.5.12", 3), ("0.5.12.post1", 3), ("0.5.13", 1), ("0.5.19", 1), ("0.5.20", 0)]
)
def test_memory_is_not_pinned_where_the_platform_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, registered: list[str], version: str, count: int
) -> None:
    _accelerator(monkeypatch, None)
    monkeypatch.setattr(platform, "installed", lambda: (version, None))
    platform.register()
    assert sum(target in dict(platform._PINNING) for target in registered) == count
    assert ("sglang.srt.mem_cache.pool_host.common._cuda_host_register" in registered) is (count == 0)

    before = torch.tensor, torch.zeros
    for make, values in ((torch.tensor, [1, 2]), (torch.zeros, [0, 0])):
        given = values if make is torch.tensor else 2

        def pinned(given: Any, name: str = make.__name__) -> torch.Tensor:
            return getattr(torch, name)(given, pin_memory=True)

        made = platform._without_pinned_memory(pinned, given)
        assert made.tolist() == values
        assert not made.is_pinned()
    with pytest.raises(ValueError, match="given"):
        platform._without_pinned_memory(_fail)
    assert (torch.tensor, torch.zeros) == before


def _fail() -> None:
    raise ValueError("given")


def test_it_answers_whatever_this_release_may_ask() -> None:
    """The platform inherits no method of SGLang's that only raises NotImplementedError."""
    cpu_platform = platform.TorchCpuPlatform()
    left = [
        name
        for name, method in inspect.getmembers(SRTPlatform, inspect.isfunction)
        if "raise NotImplementedError" in inspect.getsource(method)
        and getattr(type(cpu_platform), name) is method
    ]
    assert set(left) <= _NEVER_ASKED
    assert cpu_platform.get_default_attention_backend() == "torch_native"
    assert cpu_platform.is_pin_memory_available() is False
    free, total = cpu_platform.get_available_memory()
    assert 0 < free <= total == cpu_platform.get_device_total_memory()
    assert 0 < cpu_platform.get_current_memory_usage() < total
    assert cpu_platform.get_mha_kv_pool_cls().__name__ == "MHATokenToKVPool"
    assert cpu_platform.get_mla_kv_pool_cls().__name__ == "MLATokenToKVPool"
    assert cpu_platform.get_kv_pool_cls(kind="mha") is None
    assert cpu_platform.get_paged_allocator_cls().__name__ == "PagedTokenToKVPoolAllocator"


# Graphs are off, and neither sparse attention nor speculative decoding runs without CUDA kernels.
_NEVER_ASKED = {
    "get_default_speculative_draft_attention_backend",
    "get_dsa_kv_pool_cls",
    "get_nsa_kv_pool_cls",
    "get_piecewise_backend_cls",
}
