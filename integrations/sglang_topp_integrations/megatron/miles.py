"""Adapter for Miles: its trainer scores over the candidate sets without a dense mask, or without logits.

::

    --custom-megatron-init-path sglang_topp_integrations.megatron.miles.install
    --custom-model-provider-path sglang_topp_integrations.megatron.miles.model_provider

`install` replaces Miles' `get_log_probs_and_entropy` in every module that has it. With `model_provider`, the
model returns hidden states instead of logits, and the replacement computes the candidates' logits alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    from miles.backends.training_utils.loss.hub import logit_processors
except ModuleNotFoundError as error:
    if not str(error.name).startswith("miles.backends.training_utils.loss"):
        raise
    # Miles before October 2026
    from miles.backends.training_utils.loss_hub import logit_processors

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
    "entropy_requires_grad",
    "non_loss_data",
    "max_seq_lens",
    "rollout_sampling_mask",
]


def install(args: Namespace) -> None:
    """Replace `get_log_probs_and_entropy` in Miles' modules.

    A call with sets returns log-probs and entropies over the sets. In Miles' own, the entropies are over the
    whole vocabulary. Other calls return what they returned before.

    Raises:
        InvalidInputError: the function of this Miles has other parameters, its actor passes no sets, or the
            arguments ask for a layout or rounding that the adapter does not have.
    """
    for name, expected in (
        ("use_sampling_support_replay", True),
        ("qkv_format", "thd"),
        ("true_on_policy_mode", False),
    ):
        if (value := getattr(args, name, None)) != expected:
            raise InvalidInputError(f"{name}: got {value!r}, expected {expected!r}")
    replace_scoring(logit_processors, _PARAMETERS, _log_probs_and_entropy, "Miles of September 2026")


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Build Miles' model with `return_hidden_states`. A critic's own output layer stays as it is."""
    from miles.backends.megatron_utils.model_provider import get_model_provider_func

    return build_model(get_model_provider_func, pre_process, post_process, vp_stage)


def _log_probs_and_entropy(
    original: Callable[..., Any], logits: Tensor, *, rollout_sampling_mask: Any = None, **options: Any
) -> Any:
    """Return each sample's log-probs and entropies on this rank, as Miles' own does."""
    if rollout_sampling_mask is None and not returns_hidden_states():
        return original(logits, **options)
    supports = None
    if rollout_sampling_mask is not None:
        supports = [(mask._ids, mask._offsets) for mask in rollout_sampling_mask]  # Miles has no public names
    answer = score_samples(logits, supports, **options)
    if options["args"].allgather_cp:
        names = ("args", "total_lengths", "response_lengths", "max_seq_lens")
        logit_processors.allgather_cp_redistribute(
            answer, logits=logits, **{name: options.get(name) for name in names}
        )
    return answer
