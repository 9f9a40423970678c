"""Benchmark of the adapter for Megatron-core: the scoring step on a rank's logits, and on its hidden states.

Run it in the environment of `make integrations`: `.integrations/bin/python -m benchmarks megatron`. The
baseline is slime's dense mask, if slime's source is on `PYTHONPATH`, and else Megatron's loss over the whole
vocabulary, which overwrites the logits.

One CPU process stands for one of two tensor-parallel ranks: it holds half of a vocabulary of 151,936, and
communicates with no other.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import tempfile
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.paired_timing import compare
from benchmarks.harness.peak_memory import Work, compare_peaks
from benchmarks.replay import make_sets
from sglang_topp import CandidateSets
from sglang_topp.replay import Layout, score_logits

__all__ = ["run"]

T, H, V = 4096, 1024, 151_936 // 2
WHOLE, DENSE, SETS = "Megatron, whole vocabulary", "slime, dense mask", "adapter, sets"


def run() -> None:
    if importlib.util.find_spec("megatron") is None:
        print("megatron: not installed here; run it with .integrations/bin/python after `make integrations`")
        return
    names = [WHOLE, SETS]
    if importlib.util.find_spec("slime") is not None:
        names = [DENSE, *names]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size = f"T = {T}, H = {H}, V = {V}"
        for title, prepare in (("logits", on_logits), ("hidden states", on_hidden)):
            steps = {name: prepare(name) for name in names}
            compare(f"scoring step on {title}, forward + backward; {size}, float32", steps, rounds=3)
            compare_peaks(f"scoring step on {title}, peak memory beyond inputs and gradients; {size}", steps)
    finally:
        torch.set_num_threads(threads)


def on_logits(name: str) -> Work:
    _start()
    logits, sets = _make_logits(), make_sets(T, V)

    def work() -> list[Tensor]:
        _logprobs(logits, sets, name).sum().backward()
        return [_take_grad(logits)]

    return work


@functools.cache  # 1.2 GB, one for all contenders; their times do not depend on its values
def _make_logits() -> Tensor:
    return torch.randn(1, T, V).requires_grad_()


def on_hidden(name: str) -> Work:
    kit = _start()
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from sglang_topp_integrations.megatron import ReplayContext, score_hidden

    config = kit.make_config(kit.Ranks(), torch.float32)
    layer = ColumnParallelLinear(H, V, config=config, init_method=torch.nn.init.normal_, bias=False)
    hidden, sets = torch.randn(T, 1, H).requires_grad_(), make_sets(T, V)
    targets = torch.tensor(sets.sampled_ids, dtype=torch.int64)
    rows = Layout().select_rows([1], [T - 1])

    def work() -> list[Tensor]:
        if name == SETS:
            context = ReplayContext(rows, targets[: T - 1], sets[: T - 1])
            logprobs = score_hidden(hidden.transpose(0, 1), layer, None, context).logprobs
        else:
            logprobs = _logprobs(layer(hidden)[0].transpose(0, 1).contiguous(), sets, name)
        logprobs.sum().backward()
        return [_take_grad(hidden), _take_grad(layer.weight)]

    return work


def _logprobs(logits: Tensor, sets: CandidateSets, name: str) -> Tensor:
    targets = torch.tensor(sets.sampled_ids, dtype=torch.int64)
    if name == SETS:
        return score_logits(logits.squeeze(0), targets, sets).logprobs
    if name == WHOLE:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        loss: Tensor = vocab_parallel_cross_entropy(logits.squeeze(0), targets)
        return -loss
    slime: Any = importlib.import_module("slime.backends.megatron_utils.loss")
    _, found = slime.get_log_probs_and_entropy(
        logits,
        args=Namespace(rollout_temperature=1.0, allgather_cp=False, log_probs_chunk_size=-1),
        unconcat_tokens=[torch.cat([targets[:1], targets])],
        total_lengths=[len(targets) + 1],
        response_lengths=[len(targets)],
        top_p_token_ids=[torch.tensor(sets.token_ids)],
        top_p_token_offsets=[torch.tensor(sets.offsets)],
    )
    logprobs: Tensor = found["log_probs"][0]
    return logprobs


def _start() -> Any:
    """Start Megatron in this process, and return the kit of its tests, which stands in for CUDA."""
    kit = importlib.import_module("tests.integrations.megatron.cpu_ranks")
    if not dist.is_initialized():
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group("gloo", store, rank=0, world_size=1)
        kit.parallel_state.initialize_model_parallel()
    return kit


def _take_grad(tensor: Tensor) -> Tensor:
    gradient, tensor.grad = tensor.grad, None
    assert gradient is not None
    return gradient
