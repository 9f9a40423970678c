"""A speculative algorithm for tests: `--speculative-algorithm TEST_CHAINS`.

SGLang's own draft workers need attention kernels that no package ships for a CPU. This worker drafts with the
target model itself. Everything else is SGLang's: the scheduler, `eagle_sample`, the log-probs of accepted
tokens, and the commit. It is registered through SGLang's public `SpeculativeAlgorithm.register`.

A request controls its drafts and records its verification with `custom_params`:

- `drafts`: "likely", "mixed" (default), or "unlikely".
- `verification_log`: a file. Each verification appends what the request's tokens were drawn from, as pickles
  of `Verification`.
- `accepts_zero_mass`: whether the sampling kernel gets random numbers of exactly 0. It then accepts tokens
  without mass (SGLang's issue 35771).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.speculative import kernels

__all__ = [
    "ALGORITHM",
    "ARGUMENTS",
    "Verification",
    "accepted",
    "install",
    "read_log",
    "register",
    "reporter",
]

ALGORITHM = "TEST_CHAINS"
_STEPS = 4
_NODES = _STEPS + 1
ARGUMENTS = (
    *("--speculative-algorithm", ALGORITHM),
    *("--speculative-num-steps", str(_STEPS)),
    *("--speculative-num-draft-tokens", str(_NODES)),
    *("--speculative-eagle-topk", "1"),
)
"""The arguments of a server that uses the algorithm."""

_METADATA = "Metadata-Version: 2.1\nName: test-chains\nVersion: 1.0\n"
_ENTRY_POINTS = "[sglang.srt.plugins]\ntest_chains = tests.speculative.chain_draft_worker:register\n"


@dataclass(frozen=True)
class Verification:
    """What one verification drew for one request.

    Attributes:
        token_ids: the tokens that verification returned, in order. SGLang may commit fewer.
        probs: float32 [tokens, V], the distributions that they were drawn from. After a greedy verification,
            V is 0.
    """

    token_ids: list[int]
    probs: NDArray[np.float32]


def read_log(path: Path) -> list[Verification]:
    """Return the verifications that a request recorded, in order."""
    found = []
    with path.open("rb") as log:
        while log.peek(1):
            found.append(pickle.load(log))
    return found


def install(folder: Path) -> dict[str, str]:
    """Make a plugin of this module in an empty folder. Return what a server's environment needs for it."""
    information = folder / "test_chains-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(_METADATA)
    (information / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = [folder, Path(__file__).parents[2], *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, path))}


def register() -> None:
    """Register the algorithm; the entry point of the plugin. A second call does nothing."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(ALGORITHM) is not None:
        return

    class Algorithm(CustomSpecAlgo):
        """The methods of `SpeculativeAlgorithm` that `CustomSpecAlgo` lacks."""

        def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
            return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=Algorithm)
    def create(server_args: Any) -> type:
        _install_kernels()
        return _worker_class()


_verified: Any = None  # the batch that the kernel samples for


def _install_kernels() -> None:
    """Put the ports of the kernels where SGLang looks for them."""
    utils = importlib.import_module("sglang.srt.speculative.eagle_utils")
    utils.verify_tree_greedy_func = _verify_greedily_and_log
    holder: Any = utils
    if not hasattr(utils, "top_k_renorm_prob"):  # imported where they are called
        holder = sys.modules.setdefault("sgl_kernel", ModuleType("sgl_kernel"))
    holder.top_k_renorm_prob = kernels.renorm_top_k
    holder.top_p_renorm_prob = kernels.renorm_top_p
    holder.tree_speculative_sampling_target_only = _sample_and_log
    backend = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    plan = backend.TorchNativeAttnBackend.init_forward_metadata
    backend.TorchNativeAttnBackend.init_forward_metadata = functools.partialmethod(_plan, plan)
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    # A Triton kernel moves the KV of accepted branches. A chain has none.
    pools.MHATokenToKVPool._init_kv_copy_and_warmup = _without_kv_copies
    # Older releases look for the KV cache of a draft model, which this worker has not.
    builder = importlib.import_module("sglang.srt.mem_cache.kv_cache_builder")
    if hasattr(builder, "get_draft_kv_pool"):
        builder.get_draft_kv_pool = lambda **_: None
    # A CPU has no streams, and older releases name one for its tensors.
    torch.Tensor.record_stream = lambda self, stream: None
    for name in ("sglang.srt.mem_cache.allocation", "sglang.srt.speculative.spec_utils"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if hasattr(module, "assign_req_to_token_pool_func"):
                module.assign_req_to_token_pool_func = _assign_slots


def _plan(self: Any, plan: Callable[..., None], forward_batch: Any) -> None:
    """Let torch-native attention run a verification as an extension by all nodes of a chain."""
    if forward_batch.forward_mode.is_target_verify():
        nodes = forward_batch.spec_info.draft_token_num
        forward_batch.extend_prefix_lens = forward_batch.seq_lens
        forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, nodes)
        forward_batch.seq_lens = forward_batch.seq_lens + nodes
    plan(self, forward_batch)


def _without_kv_copies(self: Any) -> None:
    self._kv_copy_config = None


def _assign_slots(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, batch_size: int
) -> None:
    """Write the next slots of KV to each request's places from `start` to `end`."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = slots[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def _sample_and_log(
    *, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, **kwargs: Any
) -> None:
    params = [req.sampling_params.custom_params or {} for req in _verified.reqs]
    faulty = any(each.get("accepts_zero_mass") for each in params)
    if faulty:
        kwargs["uniform_samples"] = torch.zeros_like(kwargs["uniform_samples"])
    kernels.sample_tree(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
        accepts_zero_mass=faulty,
        **kwargs,
    )
    _log(predicts, accept_index, accept_token_num, kwargs["target_probs"].flatten(0, 1))


def _verify_greedily_and_log(*args: Any, **kwargs: Any) -> Any:
    result = kernels.verify_tree_greedily(*args, **kwargs)
    _log(*result, torch.empty(len(result[0]), 0))
    return result


def _log(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, probs: Tensor) -> None:
    for row, req in enumerate(_verified.reqs):
        if path := (req.sampling_params.custom_params or {}).get("verification_log"):
            nodes = accept_index[row, : int(accept_token_num[row]) + 1].long()
            with open(path, "ab") as log:
                pickle.dump(Verification(predicts[nodes].tolist(), probs[nodes].numpy()), log)


def _worker_class() -> type:
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
    from sglang.srt.speculative.eagle_utils import eagle_sample

    class Worker(BaseSpecWorker):
        """Drafts chains of one to four tokens, and verifies them with SGLang's functions."""

        draft_worker = None

        def __init__(self, *, target_worker: Any, **others: Any) -> None:
            super().__init__()
            self._target_worker = target_worker
            self.model_runner = target_worker.model_runner
            self._random = torch.Generator().manual_seed(0)

        @property
        def target_worker(self) -> Any:
            return self._target_worker

        def clear_cache_pool(self) -> None:
            """Do nothing: the worker has no cache of its own."""

        def update_weights_from_disk(self, request: Any) -> tuple[bool, str]:
            """Do nothing: the worker drafts with the target's weights."""
            return True, ""

        def forward_batch_generation(
            self,
            batch: Any,
            on_publish: Callable[[Tensor], None] | None = None,
            pp_proxy_tensors: Any = None,
        ) -> Any:
            """Prefill, or draft and verify."""
            if batch.forward_mode.is_extend() or batch.forward_mode.is_idle():
                return self._prefill(batch, on_publish)
            return self._decode(batch, on_publish)

        def _prefill(self, batch: Any, on_publish: Callable[[Tensor], None] | None) -> Any:
            result = self.target_worker.forward_batch_generation(batch)
            if on_publish is not None:
                on_publish(batch.seq_lens)
            result.next_draft_input = self._draft_input(result.next_token_ids, batch.seq_lens)
            result.new_seq_lens = batch.seq_lens
            return result

        def _decode(self, batch: Any, on_publish: Callable[[Tensor], None] | None) -> Any:
            global _verified
            roots = batch.spec_info.bonus_tokens
            # Copied: SGLang's functions change these fields, and restore them only after the pass.
            window = torch.zeros((len(roots), _NODES), dtype=torch.int64)
            window[:, 0] = roots
            lengths = torch.randint(1, _NODES, (len(roots),), generator=self._random)
            for step in range(1, _NODES):
                logits = self._forward(batch, window, lengths).logits_output.next_token_logits
                window[:, step] = self._choose(logits.view(*window.shape, -1)[:, step - 1], batch.reqs)
            result = self._forward(batch, window, lengths)
            verify_input, logits_output = batch.spec_info, result.logits_output
            _verified = batch
            mask = _grammar_mask(batch, verify_input)
            predict, accept_lens, accept_index = eagle_sample(verify_input, batch, logits_output, mask)
            _verified = None
            new_seq_lens = batch.seq_lens + accept_lens
            if batch.return_logprob:
                _compute_logprobs(batch, logits_output, predict, accept_index)
            if on_publish is not None:
                on_publish(new_seq_lens)
            last = accept_index.gather(1, accept_lens[:, None].long() - 1).squeeze(1)
            return GenerationBatchResult(
                logits_output=logits_output,
                next_token_ids=predict,
                can_run_cuda_graph=False,
                accept_lens=accept_lens,
                new_seq_lens=new_seq_lens,
                next_draft_input=self._draft_input(predict[last.long()], new_seq_lens),
                speculative_num_draft_tokens=_NODES,
            )

        def _draft_input(self, bonus_tokens: Tensor, seq_lens: Tensor) -> Any:
            empty = torch.zeros((len(bonus_tokens), 1))
            return EagleDraftInput(
                bonus_tokens=bonus_tokens, topk_p=empty, topk_index=empty.long(), hidden_states=None
            )

        def _forward(self, batch: Any, window: Tensor, lengths: Tensor) -> Any:
            """Run the target over all nodes of the chains."""
            count = len(window)
            nodes = torch.arange(_NODES).expand(count, -1)
            positions = batch.seq_lens[:, None] + nodes
            children = torch.where(nodes < lengths[:, None], nodes + 1, -1)
            batch.forward_mode = ForwardMode.TARGET_VERIFY
            batch.input_ids = window.flatten()
            pool = batch.req_to_token_pool.req_to_token
            batch.out_cache_loc = pool[batch.req_pool_indices.long()].gather(1, positions).flatten().long()
            batch.spec_info = EagleVerifyInput(
                draft_token=window.flatten(),
                custom_mask=None,
                positions=positions.flatten(),
                retrieve_index=torch.arange(count * _NODES).view(count, _NODES),
                retrieve_next_token=children,
                retrieve_next_sibling=torch.full_like(children, -1),
                retrieve_cum_len=None,
                spec_steps=_STEPS,
                topk=1,
                draft_token_num=_NODES,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                seq_lens_sum=None,
                seq_lens_cpu=batch.seq_lens_cpu,
            )
            return self.target_worker.forward_batch_generation(batch, is_verify=True)

        def _choose(self, logits: Tensor, reqs: list[Any]) -> Tensor:
            """Return one draft for each row: likely ones, unlikely ones, and any."""
            best, worst = logits.argmax(-1), logits.argmin(-1)
            drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=self._random).squeeze(1)
            any_token = torch.randint(0, logits.shape[1], best.shape, generator=self._random)
            kinds = torch.randint(0, 8, best.shape, generator=self._random)
            for row, req in enumerate(reqs):
                kind = (req.sampling_params.custom_params or {}).get("drafts", "mixed")
                kinds[row] = {"likely": 0, "unlikely": 6, "mixed": kinds[row]}[kind]
            choices = torch.stack([best, best, best, drawn, drawn, drawn, worst, any_token])
            return choices.gather(0, kinds[None]).squeeze(0)

    return Worker


def _grammar_mask(batch: Any, verify_input: Any) -> Any:
    """Build the mask of a batch's grammars over its chains, as SGLang's workers do."""
    if not batch.has_grammar:
        return None
    utils = importlib.import_module("sglang.srt.speculative.spec_utils")
    links = (verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
    tokens = verify_input.draft_token.view(links[0].shape)
    if hasattr(utils, "GrammarTree"):
        return utils.build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=utils.GrammarTree.from_host(*links, tokens),
            sampling_info=batch.sampling_info,
            device=batch.device,
            barrier=None,
        )
    mask = utils.generate_token_bitmask(
        batch.reqs, verify_input, *links, tokens, batch.sampling_info.vocab_size
    )
    if mask is not None:
        batch.sampling_info.vocab_mask = None
    return mask


def reporter() -> tuple[ModuleType, str]:
    """Return the module and the name of the function that reports the log-probs of accepted tokens."""
    try:
        module = importlib.import_module("sglang.srt.layers.logprob_processor")
    except ImportError:
        module = importlib.import_module("sglang.srt.layers.utils.logprob")
    names = ("compute_spec_logprobs", "compute_spec_v2_logprobs")
    return module, next(name for name in names if hasattr(module, name))


def accepted(name: str, index: Tensor) -> dict[str, Any]:
    """Return how that function takes the accepted nodes, int32 [B, A]."""
    steps = {"speculative_num_steps": index.shape[1] - 1} if name == "compute_spec_v2_logprobs" else {}
    return {"accept_index": index, **steps}


def _compute_logprobs(batch: Any, logits_output: Any, predict: Tensor, accept_index: Tensor) -> None:
    module, name = reporter()
    getattr(module, name)(batch, logits_output, predict, **accepted(name, accept_index))
