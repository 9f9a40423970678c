"""Megatron-core on CPU processes over gloo: what stands in for CUDA, and a small real `GPTModel`.

What stands in: an attention over packed sequences and context-parallel ranks, which Megatron has in
Transformer Engine alone; a norm that sequence parallelism accepts; no position embedding, and no random
states of a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.overrides import TorchFunctionMode

VOCAB, PADDED_VOCAB, HIDDEN = 61, 64, 16
LIMIT_S = 300

torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.current_stream = torch.cuda.synchronize = lambda *_: None
CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
CudaRNGStatesTracker.add = lambda *_: None


class _OnCpu(TorchFunctionMode):
    """Megatron's schedules and optimizers name the device "cuda"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.")  # its optimizers know no others
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)


@dataclass(frozen=True)
class Ranks:
    """Sizes of the parallel groups."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = [
            f"{name}{getattr(self, name)}" for name in ("tp", "cp", "pp", "dp") if getattr(self, name) > 1
        ]
        return "-".join([*sizes, *(["sp"] if self.sequence_parallel else [])]) or "one"


def run(ranks: Ranks, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(ranks, *args)` in one process per rank, and return what each rank returned."""
    context = multiprocessing.get_context("fork")  # the import of Megatron takes 10 s
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, folder, queue, function, args))
            for rank in range(ranks.world)
        ]
        for process in processes:
            process.start()
        try:
            answers = dict(queue.get(timeout=LIMIT_S) for _ in processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    if failures := [answer for answer in answers.values() if isinstance(answer, str)]:
        raise AssertionError("\n".join(failures))
    return [pickle.loads(answers[rank]) for rank in range(ranks.world)]


def _rank(rank: int, ranks: Ranks, folder: str, queue: Any, function: Callable[..., Any], args: Any) -> None:
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks.world)
        parallel_state.initialize_model_parallel(ranks.tp, ranks.pp, context_parallel_size=ranks.cp)
        with _OnCpu():
            queue.put((rank, pickle.dumps(function(ranks, *args))))  # a copy: the process ends
    except BaseException:
        queue.put((rank, f"rank {rank} of {ranks}: {traceback.format_exc()}"))
        queue.close()
        queue.join_thread()
        os._exit(1)


class Norm(torch.nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class Attention(torch.nn.Module):
    """Causal attention over packed sequences, which the context-parallel ranks hold in zigzag order."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        edges = options["packed_seq_params"].cu_seqlens_q.tolist()
        group = parallel_state.get_context_parallel_group()
        columns = [local_columns(edges, group.size(), rank) for rank in range(group.size())]
        mine, all_columns = columns[group.rank()], torch.cat(columns)
        heads_per_group = query.shape[1] // key.shape[1]
        keys, values = (
            _Gather.apply(each, group).repeat_interleave(heads_per_group, 1) for each in (key, value)
        )
        sample = torch.bucketize(all_columns, torch.tensor(edges), right=True)
        own = torch.bucketize(mine, torch.tensor(edges), right=True)
        hidden = (sample[None] != own[:, None]) | (all_columns[None] > mine[:, None])
        scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.length = group, len(mine)
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank() * ctx.length :][: ctx.length], None


def local_columns(edges: list[int], cp: int, rank: int) -> Tensor:
    """Return the columns of a packed row that a context-parallel rank holds, in its order."""
    columns = []
    for start, stop in itertools.pairwise(edges):
        chunks = torch.arange(start, stop).chunk(2 * cp) if cp > 1 else (torch.arange(start, stop),)
        columns += [chunks[rank], chunks[2 * cp - 1 - rank]] if cp > 1 else chunks
    return torch.cat(columns)


def make_config(ranks: Ranks, dtype: torch.dtype, **options: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 32}
    return TransformerConfig(
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.4,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=ranks.tp,
        pipeline_model_parallel_size=ranks.pp,
        context_parallel_size=ranks.cp,
        sequence_parallel=ranks.sequence_parallel,
        batch_p2p_comm=False,
        **(sizes | options),
    )


def make_layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = Attention
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), layer_norm=Norm)


def make_model(ranks: Ranks, dtype: torch.dtype, tied: bool, **options: Any) -> GPTModel:
    torch.manual_seed(0)
    config = make_config(ranks, dtype, **options)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return GPTModel(
        config,
        make_layers(config),
        PADDED_VOCAB,
        128,
        pre_process=rank == 0,
        post_process=rank == ranks.pp - 1,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="none",
    )


def make_hybrid_model(ranks: Ranks, dtype: torch.dtype, tied: bool) -> HybridModel:
    """Build a `HybridModel` of attention and MLP layers: the kernels of its Mamba layers need a GPU."""
    torch.manual_seed(0)
    config = make_config(ranks, dtype, num_layers=4)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    parts = make_layers(config).layer_specs[0].submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=Norm, self_attention=parts.self_attention, self_attn_bda=parts.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)
    hybrid_block.TENorm = Norm  # of the last norm
    stack = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
    )
    return HybridModel(
        config,
        ModuleSpec(hybrid_block.HybridStack, submodules=stack),
        PADDED_VOCAB,
        128,
        "*-|*-" if ranks.pp > 1 else "*-*-",
        pre_process=rank == 0,
        post_process=rank == ranks.pp - 1,
        share_embeddings_and_output_weights=tied,
    )


def packed_inputs(ranks: Ranks, batch: Any, row: int) -> dict[str, Any]:
    """Return the arguments of `GPTModel.forward` for this rank's part of a packed row."""
    edges = batch["cu_seqlens"][row]
    rank = parallel_state.get_context_parallel_rank()
    columns = local_columns(edges.tolist(), ranks.cp, rank)
    sizes = {"max_seqlen_q": int(edges.diff().max()), "max_seqlen_kv": int(edges.diff().max())}
    return {
        "input_ids": batch["sequences"][row][columns][None],
        "position_ids": batch["position_ids"][row][columns][None],
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams("thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, **sizes),
    }
