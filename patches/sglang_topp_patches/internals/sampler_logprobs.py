"""SGLang 0.5.12 to 0.5.15.post1: the sampler attaches the log-probs itself, and the logits processor scores
prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_topp_patches.internals.customized_info import CustomizedInfoOneNormalizer
from sglang_topp_patches.payload import KEY, PROMPT_KEY

__all__ = [
    "SamplerLogprobs",
    "SamplerLogprobsOfWorkerBatch",
    "SamplerLogprobsUnaligned",
    "SamplerLogprobsWithoutContext",
]


class SamplerLogprobs(CustomizedInfoOneNormalizer):
    """`Internals` of 0.5.15 and 0.5.15.post1."""

    def streams_increments(self, manager: Any) -> bool:
        """By the server's arguments."""
        return bool(manager.server_args.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """By the server's arguments."""
        return bool(manager.server_args.skip_tokenizer_init)


class SamplerLogprobsUnaligned(SamplerLogprobs):
    """`Internals` of 0.5.14, which sends `customized_info` of those requests alone that have some."""

    def align(self, reqs: Sequence[Any]) -> None:
        """SGLang would list the entries of some requests, and read them by the place of each in the batch."""
        keys = {key for req in reqs for key in (req.customized_info or ()) if key in (KEY, PROMPT_KEY)}
        for req in reqs if keys else ():
            info = req.customized_info = req.customized_info or {}
            for key in keys:
                info.setdefault(key, [])

    def _arrived(self, recv_obj: Any) -> dict[str, Any]:
        # Not pickled: the message's own.
        return getattr(recv_obj, "customized_info", None) or {}


class SamplerLogprobsWithoutContext(SamplerLogprobsUnaligned):
    """`Internals` of 0.5.13 and 0.5.13.post1, which have no runtime context."""

    def answers_requests(self) -> bool:
        """By the ranks of attention."""
        from sglang.srt.layers.dp_attention import get_attention_cp_rank, get_attention_tp_rank

        return bool(get_attention_tp_rank() == 0 and get_attention_cp_rank() == 0)

    def sanitizes_logits(self) -> bool:
        """There is no such switch."""
        return False


class SamplerLogprobsOfWorkerBatch(SamplerLogprobsWithoutContext):
    """`Internals` of 0.5.12 and 0.5.12.post1, where a pass that only scores has no `ForwardBatch`."""

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """By the `ModelWorkerBatch` too, which is made for one pass."""
        super().carry(top_logprobs_nums, batch, forward_batch)
        batch.top_logprobs_nums = top_logprobs_nums
