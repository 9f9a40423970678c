"""A GPU for every test: the real one, or CPU tensors that say `cuda` and refuse what a GPU would refuse.

The pretended one finds what a kernel's interpreter cannot: an operation that mixes devices, an index or a
buffer that was made on the CPU, NumPy asked to read device memory, a branch for CUDA that nobody ever
took. Values are computed on the CPU, so they can be compared. Within `no_waits` it refuses whatever would
have the host wait for the device. It says nothing about speed, streams or real kernels: those of Triton run
in its interpreter.
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

__all__ = ["gpu", "no_waits", "pretended_gpu"]

aten = torch.ops.aten
_CUDA = torch.device("cuda", 0)
_COPIES = (aten._to_copy.default, aten.copy_.default)
# What hands a number, or a shape that depends on values, to the host.
_WAITING = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
)


def gpu() -> contextlib.AbstractContextManager[None]:
    """Within it, tensors go to `cuda` and are made there, and work among them runs."""
    return contextlib.nullcontext() if torch.cuda.is_available() else pretended_gpu()


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """`gpu()`, without the real one."""
    backward = BackwardCFunction.apply

    def seen(*args: Any) -> Any:
        # The autograd engine runs a Function's backward without the modes of its caller.
        with _Devices():
            return backward(*args)

    with _Devices(), _Operations(), mock.patch.object(BackwardCFunction, "apply", seen), _interpreted():
        yield


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Within it, on the pretended GPU, an operation for which the host would wait is an error."""
    global _may_wait
    _may_wait = False
    try:
        yield
    finally:
        _may_wait = True


_may_wait = True


def _interpreted() -> contextlib.AbstractContextManager[Any]:
    """Triton's interpreter sees the tensors that hold the values."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return contextlib.nullcontext()
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def unwrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        on_cpu = [each for each in args if isinstance(each, torch.Tensor) and not isinstance(each, GpuTensor)]
        assert not on_cpu, "a kernel got a tensor of the CPU"
        args, kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.inner, (args, kwargs))
        return run(self, *args, **kwargs)

    return mock.patch.object(GridExecutor, "__call__", unwrapped)


class GpuTensor(torch.Tensor):
    """A tensor of the pretended GPU; `inner` is the CPU tensor that holds its values.

    To torch's own machinery it is a meta tensor, which has no memory to read by mistake.
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
    """Sees the operations without a tensor argument too: those that make tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Devices(TorchFunctionMode):
    """Says `meta` for `cuda` before torch looks for a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if func is torch.tensor and _is_cuda(kwargs.get("device")):
            assert _may_wait, "torch.tensor: the host would wait for the copy"
            # A meta tensor made from data would forget them.
            return GpuTensor(torch.tensor(*args, **(kwargs | {"device": "cpu"})))
        args, kwargs = tree_map(lambda value: "meta" if _is_cuda(value) else value, (args, kwargs))
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    made_on = kwargs.get("device")
    on_gpu = bool(ours) if made_on is None else torch.device(made_on).type == "meta"
    if not ours and not on_gpu:
        return func(*args, **kwargs)
    # As in CUDA, a CPU tensor may join in where it is one number.
    if func not in _COPIES and any(tensor.ndim and not isinstance(tensor, GpuTensor) for tensor in tensors):
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu")
    assert _may_wait or not _waits(func, args, kwargs, tensors), f"{func}: the host would wait"
    args, kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.inner, (args, kwargs))
    if made_on is not None:
        kwargs["device"] = "cpu"
    out = _mm_out_dtype(*args) if func is aten.mm.dtype else func(*args, **kwargs)
    if not on_gpu:
        return out
    known = {id(tensor.inner): tensor for tensor in ours}  # an operation in place returns its argument

    def wrapped(tensor: torch.Tensor) -> torch.Tensor:
        return known[id(tensor)] if id(tensor) in known else GpuTensor(tensor)

    return tree_map_only(torch.Tensor, wrapped, out)


def _waits(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether the host would wait until the device has got there."""
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
    return func in _WAITING or by_mask or of_unknown_size


def _mm_out_dtype(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What only CUDA has: half-precision factors, summed and returned in float32."""
    if left.dtype != right.dtype or left.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"mm.dtype: got {left.dtype} and {right.dtype}")
    if dtype != torch.float32:
        raise RuntimeError(f"mm.dtype: out_dtype is {dtype}")
    return left.to(dtype) @ right.to(dtype)
