"""Stubs of two kernel packages. On a CPU, SGLang versions before 0.5.14 import both but call neither.

`sgl_kernel` cannot be imported without the CUDA driver. `vllm` may be missing, because SGLang does not
install it. This package's CPU platform runs SGLang's plain-torch code, which calls no kernel of `sgl_kernel`
or `vllm`. Calling a stub raises an error that names the kernel.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["install"]

# Only these two vllm modules have stubs. The import of any other vllm module fails.
_MODULES = ("vllm", "vllm._custom_ops")
_PACKAGE = "sgl_kernel"


def install() -> None:
    """Make `import sgl_kernel`, with its submodules, and `import vllm._custom_ops` succeed in this process.

    Only `cpu/platform.py` calls `install`. A second call of `install` does nothing.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Kernel:
    """A stub for a kernel. Every attribute of a stub is another stub, and calling a stub raises an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(f"{self._name} has no attribute {name!r}")
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self._name} needs an accelerator, and this is the CPU platform")


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _Kernel(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _MODULES and fullname.partition(".")[0] != _PACKAGE:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub module has no code to run."""
