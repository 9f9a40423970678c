"""Record the variants of Triton kernels that launchers ask for, and compile them if wanted, without a GPU.

Triton compiles a variant of a kernel for each combination of dtypes, constants, and what it specializes on.
The interpreter has no variants, and accepts code that the compiler refuses. Nothing is launched here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils._pytree import tree_map_only
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from tests.fake_gpu import GpuTensor, fake_gpu

__all__ = ["recorded_variants"]

_new_devices = itertools.count()


@contextlib.contextmanager
def recorded_variants(capability: int, *, compiles: bool) -> Iterator[dict[tuple[str, str], Any]]:
    """Yield a dict that gets the variants that are asked for inside the `with` block, on a fake GPU.

    A variant's key is the kernel's name and what Triton distinguishes. Its value is the compiled kernel, or
    None if `compiles` is False.
    """
    variants: dict[tuple[str, str], Any] = {}
    run = JITFunction.run

    def skips_compilation(*, key: str, fn: Any, **_: Any) -> bool:
        variants[fn.name, key] = None
        return not compiles

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        args, kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.inner, (args, kwargs))
        before = set(variants)
        kernel = run(self, *args, warmup=True, **kwargs)
        variants.update(dict.fromkeys(set(variants) - before, kernel))

    device = next(_new_devices)  # Triton keeps the kernels of each device
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
    )
    with (
        fake_gpu(),
        mock.patch.object(driver, "_active", target),
        mock.patch.object(knobs.runtime, "jit_cache_hook", skips_compilation),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield variants
