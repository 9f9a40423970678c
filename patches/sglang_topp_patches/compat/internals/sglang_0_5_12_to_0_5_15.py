"""Adapters to the internals of SGLang 0.5.12 to 0.5.15.post1.

Before SGLang 0.5.16, the sampler computes the log-probs of the sampled tokens. From SGLang 0.5.16 on,
separate log-prob processors compute these log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_topp_patches.compat.internals.sglang_0_5_16_to_0_5_18 import Sglang0516
from sglang_topp_patches.set_buffer import KEY, SetBuffer

__all__ = ["Sglang0512", "Sglang0513", "Sglang0514", "Sglang0515"]


class Sglang0515(Sglang0516):
    """Adapter to SGLang 0.5.15 and 0.5.15.post1."""

    def streams_increments(self, manager: Any) -> bool:
        """Read `incremental_streaming_output` from the server arguments."""
        return bool(manager.server_args.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """Read `skip_tokenizer_init` from the server arguments."""
        return bool(manager.server_args.skip_tokenizer_init)


class Sglang0514(Sglang0515):
    """Adapter to SGLang 0.5.14, which sends `customized_info` only for requests that have it."""

    def align(self, reqs: Sequence[Any]) -> None:
        """If a request has a `SetBuffer`, give one to every request.

        SGLang sends the values of a `customized_info` key only for the requests that have the key. SGLang's
        `TokenizerManager` looks up each request's value by the request's position in the whole batch. If one
        request lacked the key, SGLang would give some requests the values of other requests.
        """
        if any(req.customized_info and KEY in req.customized_info for req in reqs):
            for req in reqs:
                req.customized_info = req.customized_info or {}
                req.customized_info.setdefault(KEY, SetBuffer())

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return the field itself, which is no pickle up to SGLang 0.5.14."""
        return getattr(recv_obj, "customized_info", None) or {}


class Sglang0513(Sglang0514):
    """Adapter to SGLang 0.5.13 and 0.5.13.post1, which lack the module `runtime_context`."""

    def answers_requests(self) -> bool:
        """Return whether this process has rank 0 in both attention groups (tensor and context parallel)."""
        from sglang.srt.layers.dp_attention import get_attention_cp_rank, get_attention_tp_rank

        return bool(get_attention_tp_rank() == 0 and get_attention_cp_rank() == 0)

    def sanitizes_logits(self) -> bool:
        """Return False: SGLang 0.5.12 and 0.5.13 have no setting that sanitizes logits."""
        return False


class Sglang0512(Sglang0513):
    """Adapter to SGLang 0.5.12 and 0.5.12.post1, whose `compute_logprobs_only` takes a `ModelWorkerBatch`."""

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Set `top_logprobs_nums` on the `ForwardBatch` and on the pass's `ModelWorkerBatch`."""
        super().carry(top_logprobs_nums, batch, forward_batch)
        batch.top_logprobs_nums = top_logprobs_nums
