"""Run SGLang's `eagle_sample` on the CPU with the plugin's hooks, and then SGLang's log-prob function."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sglang_topp_patches.releases import take
from sglang_topp_patches.request import SetsRequest
from sglang_topp_patches.scheduler import verification
from sglang_topp_patches.scheduler.host_copy_before_0_5_19 import Committed
from sglang_topp_patches.set_buffer import KEY, PackedSet
from tests.speculative import kernels
from tests.speculative.chain_draft_worker import accepted, reporter

__all__ = [
    "CHAIN",
    "TREE",
    "Tree",
    "Verified",
    "by_definition",
    "commit",
    "ids_of",
    "logprobs_of",
    "problem_of",
    "request",
    "verify",
]


@dataclass(frozen=True)
class Tree:
    """A drafted tree.

    Attributes:
        tokens: each node's token, the root's first.
        children: each node's first child, or -1.
        siblings: each node's next sibling, or -1.
        depth: the nodes of its longest path.
    """

    tokens: tuple[int, ...]
    children: tuple[int, ...]
    siblings: tuple[int, ...]
    depth: int


CHAIN = Tree((0, 1, 2, 3, 4), (1, 2, 3, 4, -1), (-1,) * 5, 5)
TREE = Tree((0, 1, 2, 3, 4, 1), (1, 3, 5, -1, -1, -1), (-1, 2, -1, 4, -1, -1), 3)


def request(rid: str, *, top_k: int = 1 << 30, top_p: float = 1.0, **fields: Any) -> Any:
    """Return a scheduler's request; `fields` are the plugin's."""
    wanted = SetsRequest(
        threshold=fields.get("top_logprobs_p", 0.0), is_from_sampler="top_logprobs_source" in fields
    )
    return SimpleNamespace(
        sglang_topp_request=wanted,
        rid=rid,
        customized_info=None,
        stream=False,
        send_token_offset=0,
        finished=lambda: False,
        sampling_params=SimpleNamespace(
            custom_params=None, top_k=top_k, top_p=top_p, temperature=1.0, stream_interval=1
        ),
    )


@dataclass
class Verified:
    """What one verification returned.

    Attributes:
        reqs: the batch's requests.
        tokens: each request's accepted tokens.
        probs: what the kernel was told to draw from, float32 [B, D, V]. None if it was not called.
        nodes: each request's accepted nodes.
        logprobs: the log-probs that SGLang reports, float32 [B, A].
        output: the plugin's output on the host; None if no request asks.
    """

    reqs: Sequence[Any]
    tokens: list[list[int]]
    probs: Tensor | None
    nodes: list[list[int]]
    logprobs: Tensor
    output: Any


def verify(
    reqs: Sequence[Any],
    logits: Tensor,
    tree: Tree = CHAIN,
    *,
    temperatures: Sequence[float] | None = None,
    coins: float | Tensor | None = None,
    accepts_zero_mass: bool = False,
    drafts: Tensor | None = None,
    draft_probs: Tensor | None = None,
    by_block: bool = False,
) -> Verified:
    """Verify the tree for each request.

    Args:
        reqs: as `request` returns.
        logits: float32 [B, D, V].
        tree: the drafts of every request.
        temperatures: one for each request; 1 by default.
        coins: the coins of all draws: one number, or [B, D + 1] with the final one last. Random by default.
        accepts_zero_mass: see `kernels.sample_tree`.
        drafts: int64 [B, D - 1], the drafts of each request instead of the tree's.
        draft_probs: float32 [B, D - 1, V], what they were drawn from. SGLang verifies by rejection sampling
            then, with its own kernel.
        by_block: with rejection sampling, accept whole blocks of drafts.
    """
    utils = importlib.import_module("sglang.srt.speculative.eagle_utils")
    count, nodes = len(reqs), len(tree.tokens)
    params = [req.sampling_params for req in reqs]
    place = torch.arange(count * nodes).view(count, nodes)
    calls: list[dict[str, Any]] = []

    def sample_tree(**kwargs: Any) -> None:
        calls.append(kwargs)
        if coins is not None:
            given = torch.as_tensor(coins, dtype=torch.float32).expand(count, nodes + 1)
            kwargs["uniform_samples"] = given[:, :nodes]
            kwargs["uniform_samples_for_final_sampling"] = given[:, nodes]
        kernels.sample_tree(**kwargs, accepts_zero_mass=accepts_zero_mass)

    by_row = (tree.tokens, tree.children, tree.siblings)
    tokens, children, siblings = (torch.tensor(each).expand(count, -1) for each in by_row)
    if drafts is not None:
        tokens = torch.cat((tokens[:, :1], drafts), 1)
    verify_input = SimpleNamespace(
        draft_token=tokens.flatten(),
        draft_token_num=nodes,
        max_tree_depth=tree.depth,
        tree_topk=-1,
        retrieve_index=place,
        retrieve_next_token=children,
        retrieve_next_sibling=siblings,
        draft_probs=draft_probs,
    )
    greedy = [each.top_k == 1 for each in params]
    info = SimpleNamespace(
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_watermark_candidates=False,
        is_all_greedy=all(greedy),
        temperatures=torch.tensor(temperatures or [1.0] * count)[:, None],
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        top_ks=torch.tensor([each.top_k for each in params], dtype=torch.int32),
        top_ps=torch.tensor([each.top_p for each in params]),
        sampling_seed=None,
    )
    batch = SimpleNamespace(
        reqs=reqs,
        return_logprob=True,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=torch.full((count,), 7),
        sampling_info=info,
        device="cpu",
    )
    logits_output = SimpleNamespace(
        next_token_logits=logits.flatten(0, 1).clone(), auxiliary_device_output=None
    )
    spec = SimpleNamespace(
        speculative_use_rejection_sampling=draft_probs is not None,
        speculative_use_block_verification=by_block,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
    )

    def sample_chain(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)
        sample_rejecting(*args, **kwargs)

    sample_rejecting = getattr(utils, "chain_speculative_sampling_triton", None)
    with _sglang(utils, spec, sample_tree, sample_chain):
        original = utils.eagle_sample
        original = getattr(original, "__wrapped__", original)
        predict, lens, index = verification.sample(original, verify_input, batch, logits_output)
        module, name = reporter()
        report = getattr(module, name)
        report = getattr(report, "__wrapped__", report)
        verification.compute_logprobs(report, batch, logits_output, predict, **accepted(name, index))
    paths = [row[:length].tolist() for row, length in zip(index, lens.tolist(), strict=True)]
    output = logits_output.auxiliary_device_output or take(logits_output)
    return Verified(
        reqs,
        [predict[path].tolist() for path in paths],
        calls[0]["target_probs"] if calls else None,
        [[node - row * nodes for node in path] for row, path in enumerate(paths)],
        logits_output.next_token_logprobs,
        output and output.copy_to_host(lambda tensor: tensor.clone()),
    )


@contextlib.contextmanager
def _sglang(
    utils: Any, spec: Any, sample_tree: Callable[..., None], sample_chain: Callable[..., None]
) -> Iterator[None]:
    """Give SGLang the kernels, and the configuration that it would read."""
    group = SimpleNamespace(world_size=1)
    parallel = SimpleNamespace(tp_group=group, attn_tp_group=None, attn_tp_rank=0, attn_cp_rank=0)
    with contextlib.ExitStack() as stack:
        holder = utils
        if not hasattr(utils, "top_k_renorm_prob"):  # imported where they are called
            holder = ModuleType("sgl_kernel")
            stack.enter_context(mock.patch.dict(sys.modules, {"sgl_kernel": holder}))
        for name, kernel in (
            ("top_k_renorm_prob", kernels.renorm_top_k),
            ("top_p_renorm_prob", kernels.renorm_top_p),
            ("tree_speculative_sampling_target_only", sample_tree),
        ):
            stack.enter_context(mock.patch.object(holder, name, kernel, create=holder is not utils))
        if spec.speculative_use_rejection_sampling:
            stack.enter_context(mock.patch.object(utils, "chain_speculative_sampling_triton", sample_chain))
        greedy = mock.patch.object(utils, "verify_tree_greedy_func", kernels.verify_tree_greedily)
        stack.enter_context(greedy)
        # The names moved. Each release reads one of these.
        for path, name, value in (
            ("sglang.srt.speculative.eagle_utils", "get_spec", spec),
            ("sglang.srt.runtime_context", "get_server_args", spec),
            ("sglang.srt.server_args", "get_global_server_args", spec),
            ("sglang.srt.runtime_context", "get_parallel", parallel),
            ("sglang.srt.distributed", "get_tp_group", group),
            ("sglang.srt.layers.dp_attention", "is_dp_attention_enabled", False),
        ):
            with contextlib.suppress(ImportError, AttributeError):
                module = importlib.import_module(path)
                stack.enter_context(mock.patch.object(module, name, return_value=value))
        internals = type(verification.internals())
        stack.enter_context(mock.patch.object(internals, "weight_version", return_value="7"))
        stack.enter_context(mock.patch.object(internals, "sanitizes_logits", return_value=False))
        yield


def ids_of(packed: PackedSet) -> list[int]:
    """Return the token ids of a set."""
    return np.frombuffer(packed[0], np.int32).tolist()


def logprobs_of(packed: PackedSet) -> dict[int, float]:
    """Return the log-prob of each token of a set."""
    return dict(zip(ids_of(packed), np.frombuffer(packed[1], np.float32).tolist(), strict=True))


def by_definition(logprobs: Tensor, p: float) -> set[int]:
    """Return the set by the threshold rule, written plainly."""
    mass = logprobs.double().exp().tolist()
    return {i for i, each in enumerate(mass) if sum(other for other in mass if other > each) < p}


def commit(verified: Verified, counts: Sequence[int] | None = None) -> list[list[PackedSet]]:
    """Commit each request's first tokens, all of them by default, and return the sets that it got."""
    counts = counts or [len(tokens) for tokens in verified.tokens]
    commits = [
        Committed(0, tuple(tokens[:count])) if count else None
        for tokens, count in zip(verified.tokens, counts, strict=True)
    ]
    verified.output.consume(SimpleNamespace(reqs=verified.reqs), commits)
    buffers = [(req.customized_info or {}).get(KEY) for req in verified.reqs]
    return [buffer.generated.sets() if buffer else [] for buffer in buffers]


def problem_of(verified: Verified, row: int) -> str:
    """Return why a request ends with an error, or an empty string."""
    buffer = (verified.reqs[row].customized_info or {}).get(KEY)
    return buffer.problem.text if buffer and buffer.problem else ""
