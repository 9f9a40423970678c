"""Benchmark of the adapter for Megatron-core: the scoring step on a rank's logits, and on its hidden states.

Run it in the environment of `make megatron`: `.megatron/bin/python -m benchmarks megatron`. The baseline is
slime's dense mask, if slime's source is on `PYTHONPATH`, and else Megatron's loss over the whole vocabulary,
which overwrites the logits.

One CPU process stands for one of two tensor-parallel ranks: it holds half of a vocabulary of 151,936, and
communicates with no other.
"""

from __future__ import annotations

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
TINY = (16, 8, 64)
WHOLE, DENSE, SETS = "Megatron, whole vocabulary", "slime, dense mask", "adapter, sets"


def run() -> None:
    if importlib.util.find_spec("megatron") is None:
        print("megatron: not installed here; run it with .megatron/bin/python after `make megatron`")
        return
    names = [WHOLE, SETS]
    if importlib.util.find_spec("slime") is not None:
        names = [DENSE, *names]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for title, prepare, t in (("logits", on_logits, T), ("hidden states", on_hidden, T // 8)):
            shape, size = (t, H, V), f"T = {t}, H = {H}, V = {V}"
            compare(
                f"scoring step on {title}, forward + backward; {size}, float32",
                {name: prepare(*shape, name) for name in names},
                rounds=3,
                picture="megatron",
            )
            compare_peaks(
                f"scoring step on {title}, peak memory beyond inputs and gradients; {size}",
                {name: (prepare, (*shape, name)) for name in names},
                warmup=(*TINY, SETS),
                picture="megatron",
            )
    finally:
        torch.set_num_threads(threads)


def on_logits(t: int, h: int, v: int, name: str) -> Work:
    _start()
    logits, sets = torch.randn(1, t, v).requires_grad_(), make_sets(t, v)

    def work() -> list[Tensor]:
        _logprobs(logits, sets, name).sum().backward()
        return [_take_grad(logits)]

    return work


def on_hidden(t: int, h: int, v: int, name: str) -> Work:
    kit = _start()
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from sglang_topp_integrations.megatron import ReplayContext, score_hidden

    config = kit.make_config(kit.Ranks(), torch.float32)
    layer = ColumnParallelLinear(h, v, config=config, init_method=torch.nn.init.normal_, bias=False)
    hidden, sets = torch.randn(t, 1, h).requires_grad_(), make_sets(t, v)
    targets = torch.tensor(sets.sampled_ids, dtype=torch.int64)
    rows = Layout().select_rows([1], [t - 1])

    def work() -> list[Tensor]:
        if name == SETS:
            context = ReplayContext(rows, targets[: t - 1], sets[: t - 1])
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
        top_p_token_ids=[torch.from_numpy(sets.token_ids)],
        top_p_token_offsets=[torch.from_numpy(sets.offsets)],
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
