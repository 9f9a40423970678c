"""A GPU for tests: the real one, or a fake of CPU tensors whose device is `cuda`.

The fake finds errors that Triton's interpreter cannot find: an operation that mixes devices, an index or a
buffer on the CPU, a NumPy read of device memory, an untested CUDA branch. Values are computed on the CPU, so
tests can compare them. Inside `forbid_waits`, the fake refuses every operation that would make the host wait
for the device. It does not model speed, streams, or compiled kernels. Triton kernels run in the interpreter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

__all__ = ["fake_gpu", "forbid_waits", "gpu"]

aten = torch.ops.aten
_CUDA = torch.device("cuda", 0)
_COPIES = (aten._to_copy.default, aten.copy_.default)
# Operations that return a number, or a shape that depends on values, to the host.
_BLOCKING = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
)


def gpu() -> contextlib.AbstractContextManager[None]:
    """Allow tensors on `cuda` inside the `with` block: on the real GPU if there is one, else on the fake."""
    return contextlib.nullcontext() if torch.cuda.is_available() else fake_gpu()


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Allow tensors on a fake `cuda` device inside the `with` block."""
    backward = BackwardCFunction.apply

    def backward_in_mode(*args: Any) -> Any:
        # The autograd engine runs the backward of a Function without the modes of its caller.
        with _Devices():
            return backward(*args)

    with (
        _Devices(),
        _Operations(),
        mock.patch.object(BackwardCFunction, "apply", backward_in_mode),
        _unwrap_in_interpreter(),
    ):
        yield


@contextlib.contextmanager
def forbid_waits() -> Iterator[None]:
    """Raise inside the `with` block if an operation on the fake GPU would make the host wait."""
    global _may_wait
    _may_wait = False
    try:
        yield
    finally:
        _may_wait = True


_may_wait = True


def _unwrap_in_interpreter() -> contextlib.AbstractContextManager[Any]:
    """Pass the underlying CPU tensors to kernels that run in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return contextlib.nullcontext()
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def run_unwrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        on_cpu = [each for each in args if isinstance(each, torch.Tensor) and not isinstance(each, GpuTensor)]
        assert not on_cpu, "a kernel got a CPU tensor"
        args, kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.inner, (args, kwargs))
        return run(self, *args, **kwargs)

    return mock.patch.object(GridExecutor, "__call__", run_unwrapped)


class GpuTensor(torch.Tensor):
    """A tensor on the fake GPU. The CPU tensor `inner` holds its values.

    Torch sees a meta tensor, which has no memory that it could read by mistake.
    """

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> GpuTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    device = property(lambda self: _CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def tolist(self) -> Any:
        assert _may_wait, "tolist: the host would wait"
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"GpuTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Intercepts operations without tensor arguments too, such as `torch.zeros`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Devices(TorchFunctionMode):
    """Replaces the device `cuda` with `meta` before torch looks for a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if kwargs.get("pin_memory"):  # no memory can be pinned without a GPU
            pinned = func(*args, **(kwargs | {"pin_memory": False}))
            pinned.is_pinned_here = True
            return pinned
        if func is torch.tensor and _is_cuda(kwargs.get("device")):
            assert _may_wait, "torch.tensor: the host would wait for the copy"
            # `torch.tensor` on the meta device would drop the data.
            return GpuTensor(torch.tensor(*args, **(kwargs | {"device": "cpu"})))
        args, kwargs = tree_map(lambda value: "meta" if _is_cuda(value) else value, (args, kwargs))
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    gpu_tensors = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    device = kwargs.get("device")
    on_gpu = bool(gpu_tensors) if device is None else torch.device(device).type == "meta"
    if not gpu_tensors and not on_gpu:
        return func(*args, **kwargs)
    # As on CUDA, a zero-dimensional CPU tensor may be mixed with GPU tensors.
    if func not in _COPIES and any(tensor.ndim and not isinstance(tensor, GpuTensor) for tensor in tensors):
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu")
    assert _may_wait or not _waits(func, args, kwargs, tensors), f"{func}: the host would wait"
    args, kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.inner, (args, kwargs))
    if device is not None:
        kwargs["device"] = "cpu"
    out = _mm_out_dtype(*args) if func is aten.mm.dtype else func(*args, **kwargs)
    if not on_gpu:
        return out
    # An in-place operation returns its argument, which must keep its wrapper.
    wrapper_of = {id(tensor.inner): tensor for tensor in gpu_tensors}

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        return wrapper_of[id(tensor)] if id(tensor) in wrapper_of else GpuTensor(tensor)

    return tree_map_only(torch.Tensor, wrap, out)


def _waits(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
    """Return whether the host would wait for the device to reach this operation."""
    if func in _COPIES:
        to_host = func is aten._to_copy.default and torch.device(kwargs.get("device", "meta")).type == "cpu"
        from_host = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor)]
        is_async = kwargs.get("non_blocking", False) or (func is aten.copy_.default and args[2:] == (True,))
        return (to_host or bool(from_host)) and not (
            is_async and all(getattr(tensor, "is_pinned_here", False) for tensor in from_host)
        )
    by_mask = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    of_unknown_size = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    return func in _BLOCKING or by_mask or of_unknown_size


def _mm_out_dtype(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply half-precision matrices with float32 sums and a float32 result, as only CUDA does."""
    if left.dtype != right.dtype or left.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"mm.dtype: got {left.dtype} and {right.dtype}")
    if dtype != torch.float32:
        raise RuntimeError(f"mm.dtype: out_dtype is {dtype}")
    return left.to(dtype) @ right.to(dtype)
