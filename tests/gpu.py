"""A GPU for every test: the real one, or CPU tensors that say `cuda` and refuse what a GPU would refuse.

The pretended one finds what a kernel's interpreter cannot: an operation that mixes devices, an index or a
buffer that was made on the CPU, NumPy asked to read device memory, a branch for CUDA that nobody ever
took. Values are computed on the CPU, so they can be compared. It says nothing about speed, streams or
real kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

__all__ = ["gpu", "pretended_gpu"]

aten = torch.ops.aten
_CUDA = torch.device("cuda", 0)
_COPIES = (aten._to_copy.default, aten.copy_.default)


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

    with _Devices(), _Operations(), mock.patch.object(BackwardCFunction, "apply", seen):
        yield


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
        if func is torch.tensor and _is_cuda(kwargs.get("device")):
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


def _mm_out_dtype(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What only CUDA has: half-precision factors, summed and returned in float32."""
    if left.dtype != right.dtype or left.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"mm.dtype: got {left.dtype} and {right.dtype}")
    if dtype != torch.float32:
        raise RuntimeError(f"mm.dtype: out_dtype is {dtype}")
    return left.to(dtype) @ right.to(dtype)
