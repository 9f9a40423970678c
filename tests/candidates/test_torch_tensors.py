"""Candidate sets as torch tensors: equal values in separate memory, and one copy to a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from sglang_topp import CandidateSets
from sglang_topp.candidates import NO_TOKEN
from sglang_topp.candidates.torch_tensors import CandidateTensors
from tests.fake_gpu import gpu

SETS = CandidateSets([5, 2, 9, 7], [-0.5, -1.0, -1.0, -0.25], [0, 3, 3, 4], [2, NO_TOKEN, 7])


def arrays_of(tensors: CandidateTensors) -> list[torch.Tensor | None]:
    return [tensors.token_ids, tensors.logprobs, tensors.offsets, tensors.sampled_ids]


@pytest.mark.parametrize(
    "sets",
    [
        SETS,
        SETS.without_logprobs(),
        SETS[1:2],
        CandidateSets.empty(0),
        CandidateSets.empty(3),
        SETS[2:],
        CandidateSets(np.arange(8, dtype=np.int32)[::2], -np.ones(8, np.float32)[::2], [0, 4], [2]),
    ],
    ids=["some", "without log-probs", "an empty span", "nothing", "empty spans", "a part", "with strides"],
)
def test_the_same_numbers(sets):
    tensors = sets.to_torch()
    assert len(tensors) == len(sets)
    assert tensors.device.type == "cpu"
    for name, dtype in (("token_ids", torch.int32), ("offsets", torch.int64), ("sampled_ids", torch.int32)):
        tensor = getattr(tensors, name)
        assert tensor.dtype == dtype
        assert np.array_equal(tensor.numpy(), getattr(sets, name))
    assert (tensors.logprobs is None) is not sets.has_logprobs
    if sets.has_logprobs:
        assert tensors.logprobs.dtype == torch.float32
        assert np.array_equal(tensors.logprobs.numpy(), sets.logprobs)


def test_writing_to_them_changes_no_set():
    tensors = SETS.to_torch("cpu")
    for tensor in arrays_of(tensors):
        tensor.zero_()
    assert SETS.token_ids.tolist() == [5, 2, 9, 7]
    assert SETS.offsets.tolist() == [0, 3, 3, 4]


def test_torchs_default_device_is_the_default():
    with torch.device("meta"):
        assert {tensor.device.type for tensor in arrays_of(SETS.to_torch())} == {"meta"}
        assert SETS.to_torch("cpu").offsets.device.type == "cpu"


class Calls(TorchFunctionMode):
    """Records what is pinned and copies to a device. Without CUDA, no memory can be pinned."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.copied: list[Any] = []
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            self.pinned.append(args[0].nbytes)
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.copy_, torch.tensor):
            self.copied.append((func, kwargs))
        return func(*args, **kwargs)


def test_one_pinned_copy_that_nobody_waits_for():
    with gpu(), Calls() as calls:
        tensors = SETS.to_torch("cuda")
        assert {tensor.device.type for tensor in arrays_of(tensors)} == {"cuda"}
    num_bytes = 8 * len(SETS.offsets) + 4 * len(SETS.sampled_ids) + 8 * len(SETS.token_ids)
    assert calls.pinned == [num_bytes]
    assert calls.copied == [(torch.Tensor.to, {"non_blocking": True})]
    with gpu():
        got, want = arrays_of(tensors), arrays_of(SETS.to_torch("cpu"))
        assert [tensor.tolist() for tensor in got] == [tensor.tolist() for tensor in want]


def test_nothing_is_pinned_for_the_cpu():
    with Calls() as calls:
        SETS.to_torch("cpu")
    assert calls.pinned == []


def test_the_base_package_does_not_import_torch():
    code = "import sys, sglang_topp; sglang_topp.CandidateSets.to_torch; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
