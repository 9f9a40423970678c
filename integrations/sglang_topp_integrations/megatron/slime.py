"""Adapter for slime: its trainer scores over the candidate sets without a dense mask, or without logits.

::

    --custom-megatron-init-path sglang_topp_integrations.megatron.slime.install
    --custom-model-provider-path sglang_topp_integrations.megatron.slime.model_provider

`install` replaces slime's `get_log_probs_and_entropy` in every module that has it. With `model_provider`, the
model returns hidden states instead of logits, and the replacement computes the candidates' logits alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.backends.megatron_utils import loss
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp_integrations.megatron.samples import (
    build_model,
    replace_scoring,
    return_hidden_states,
    returns_hidden_states,
    score_samples,
)

__all__ = ["install", "model_provider", "return_hidden_states"]

_PARAMETERS = [
    "logits",
    "args",
    "unconcat_tokens",
    "total_lengths",
    "response_lengths",
    "with_entropy",
    "non_loss_data",
    "top_p_token_ids",
    "top_p_token_offsets",
]


def install(args: Namespace) -> None:
    """Replace `get_log_probs_and_entropy` in slime's modules.

    A call with sets returns log-probs and entropies over the sets. In slime's own, the entropies are over the
    whole vocabulary. Other calls return what they returned before.

    Raises:
        InvalidInputError: the function of this slime has other parameters.
    """
    replace_scoring(loss, _PARAMETERS, _log_probs_and_entropy, "slime of August 2026")


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Build slime's model with `return_hidden_states`. A critic's own output layer stays as it is."""
    from slime.backends.megatron_utils.model_provider import _get_model_provider_func

    return build_model(_get_model_provider_func, pre_process, post_process, vp_stage)


def _log_probs_and_entropy(
    original: Callable[..., Any],
    logits: Tensor,
    *,
    top_p_token_ids: list[Any] | None = None,
    top_p_token_offsets: list[Any] | None = None,
    **options: Any,
) -> Any:
    """Return an empty tensor, and each sample's log-probs and entropies on this rank, as slime's own does."""
    if top_p_token_ids is None and not returns_hidden_states():
        return original(logits, **options)
    supports = None
    if top_p_token_ids is not None:
        offsets = top_p_token_offsets or []
        if (count := len(offsets)) != len(top_p_token_ids):
            raise InvalidInputError(f"top_p_token_offsets: got {count}, expected {len(top_p_token_ids)}")
        supports = list(zip(top_p_token_ids, offsets, strict=True))
    args = options["args"]
    has_gradient = bool(getattr(args, "entropy_coef", 0.0))
    answer = score_samples(logits, supports, entropy_requires_grad=has_gradient, **options)
    if args.allgather_cp:
        lengths = {name: options[name] for name in ("total_lengths", "response_lengths")}
        loss._allgather_cp_redistribute(answer, logits_local_len=logits.shape[1], **lengths)
    return logits.new_empty(0), answer
