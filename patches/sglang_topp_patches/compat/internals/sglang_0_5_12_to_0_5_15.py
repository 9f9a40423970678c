"""Adapt to SGLang 0.5.12 to 0.5.15.post1, where the sampler attaches log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_topp_patches.compat.internals.sglang_0_5_16_to_0_5_18 import Sglang0516
from sglang_topp_patches.scheduler_messages import KEY, PROMPT_KEY

__all__ = ["Sglang0512", "Sglang0513", "Sglang0514", "Sglang0515"]


class Sglang0515(Sglang0516):
    """`Internals` of 0.5.15 and 0.5.15.post1."""

    def streams_increments(self, manager: Any) -> bool:
        """Read `incremental_streaming_output` from the server arguments."""
        return bool(manager.server_args.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """Read `skip_tokenizer_init` from the server arguments."""
        return bool(manager.server_args.skip_tokenizer_init)


class Sglang0514(Sglang0515):
    """`Internals` of 0.5.14, which sends `customized_info` only for the requests that have some."""

    def align(self, reqs: Sequence[Any]) -> None:
        """Give every request every key of the batch.

        For each key, SGLang lists only the requests that have it, but reads the list by position in the
        batch.
        """
        keys = {key for req in reqs for key in (req.customized_info or ()) if key in (KEY, PROMPT_KEY)}
        for req in reqs if keys else ():
            info = req.customized_info = req.customized_info or {}
            for key in keys:
                info.setdefault(key, [])

    def _arrived(self, recv_obj: Any) -> dict[str, Any]:
        # In these releases, the message holds the value itself, not its pickle.
        return getattr(recv_obj, "customized_info", None) or {}


class Sglang0513(Sglang0514):
    """`Internals` of 0.5.13 and 0.5.13.post1, which have no runtime context."""

    def answers_requests(self) -> bool:
        """Return whether both attention ranks (tensor and context parallel) are 0, from `dp_attention`."""
        from sglang.srt.layers.dp_attention import get_attention_cp_rank, get_attention_tp_rank

        return bool(get_attention_tp_rank() == 0 and get_attention_cp_rank() == 0)

    def sanitizes_logits(self) -> bool:
        """Return False: these releases have no such setting."""
        return False


class Sglang0512(Sglang0513):
    """`Internals` of 0.5.12 and 0.5.12.post1, where a pass that only scores prompts has no `ForwardBatch`."""

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Set the list on the `ModelWorkerBatch` too, which SGLang creates for each pass."""
        super().carry(top_logprobs_nums, batch, forward_batch)
        batch.top_logprobs_nums = top_logprobs_nums
