"""The CPU platform takes over only where nothing better is."""

from __future__ import annotations

import pkgutil
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang_topp_patches import cpu_platform


def _accelerator(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    found = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)


def test_it_serves_where_no_accelerator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    _accelerator(monkeypatch, None)
    path = cpu_platform.activate()
    assert path is not None
    assert pkgutil.resolve_name(path) is cpu_platform.TorchCpuPlatform


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_it_stands_aside_for_an_accelerator(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    _accelerator(monkeypatch, device)
    assert cpu_platform.activate() is None


def test_it_stands_aside_for_sglangs_own_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    _accelerator(monkeypatch, None)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu_platform.activate() is None
