"""Adapter for slime: its trainer scores over the candidate sets without a dense mask, or without logits.

::

    --custom-megatron-init-path sglang_topp_integrations.megatron.slime.install
    --custom-model-provider-path sglang_topp_integrations.megatron.slime.model_provider

`install` replaces slime's `get_log_probs_and_entropy` in every module that has it. With `model_provider`, the
model returns hidden states instead of logits, and the replacement computes the candidates' logits alone.

Shape legend: T rows of hidden states or logits on this rank, R response positions that they predict.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from slime.backends.megatron_utils import loss
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import Layout, RowSelection, Scores, score_logits
from sglang_topp_integrations.megatron import ReplayContext, gather_hidden, score_hidden

__all__ = ["install", "model_provider", "return_hidden_states"]

_NAME = "get_log_probs_and_entropy"
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

_model: weakref.ref[Any] | None = None
"""The model that returns hidden states, if this process has one."""


def install(args: Namespace) -> None:
    """Replace `get_log_probs_and_entropy` in slime's modules.

    A call with sets returns log-probs and entropies over the sets. In slime's own, the entropies are over the
    whole vocabulary. Other calls return what they returned before.

    Raises:
        InvalidInputError: the function of this slime has other parameters.
    """
    original = getattr(loss, _NAME)
    if [*inspect.signature(original).parameters] != _PARAMETERS:
        raise InvalidInputError(
            f"slime: {_NAME}{inspect.signature(original)} has other parameters than {', '.join(_PARAMETERS)};"
            " the adapter was written for slime of August 2026"
        )
    replacement = functools.wraps(original)(functools.partial(_log_probs_and_entropy, original))
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(_NAME) is original:
            setattr(module, _NAME, replacement)


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Build slime's model with `return_hidden_states`. A critic's own output layer stays as it is."""
    from megatron.training import get_args
    from slime.backends.megatron_utils.model_provider import _get_model_provider_func

    args = copy.copy(get_args())
    args.custom_model_provider_path = None
    model = _get_model_provider_func(args)(pre_process, post_process, vp_stage)
    if post_process:
        return_hidden_states(model)
    return model


def return_hidden_states(model: Any) -> None:
    """Make a model return its hidden states [1, T, H] instead of logits. `install` then scores them.

    Raises:
        InvalidInputError: another model of this process does so already.
    """
    global _model
    if _model is not None and _model() is not None:
        raise InvalidInputError("model: got a second one with an output layer, expected one per process")
    layer = model.output_layer
    layer.forward = lambda hidden_states, *_, **__: (gather_hidden(hidden_states, layer), None)
    _model = weakref.ref(model)


def _log_probs_and_entropy(
    original: Callable[..., Any],
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: list[Any] | None = None,
    top_p_token_offsets: list[Any] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return an empty tensor, and each sample's log-probs and entropies on this rank, as slime's own does."""
    model = None if _model is None else _model()
    if top_p_token_ids is None and model is None:
        result: tuple[Tensor, dict[str, list[Tensor]]] = original(
            logits,
            args=args,
            unconcat_tokens=unconcat_tokens,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            with_entropy=with_entropy,
            non_loss_data=non_loss_data,
        )
        return result
    rows = _select_rows(logits.shape[1], args.allgather_cp, total_lengths, response_lengths)
    tokens = [ids[len(ids) - n :] for ids, n in zip(unconcat_tokens, response_lengths, strict=True)]
    sets = None
    if top_p_token_ids is not None:
        sets = rows.take_sets(_candidate_sets(top_p_token_ids, top_p_token_offsets or [], tokens))
    context = ReplayContext(
        rows,
        rows.take(torch.cat(tokens)),
        sets,
        temperature=args.rollout_temperature,
        entropy=with_entropy,
    )
    if model is not None:
        is_tied, layer = model.share_embeddings_and_output_weights, model.output_layer
        weight = model.shared_embedding_or_output_weight() if is_tied else layer.weight
        # Megatron's Float16Module has converted the hidden states to float32, so this is exact.
        scores = score_hidden(logits.to(weight.dtype), layer, weight, context)
    else:
        scores = _score_logits(logits.squeeze(0), context)
    ends = np.cumsum(response_lengths)
    sizes = np.bincount(np.searchsorted(ends, rows.positions, side="right"), minlength=len(ends)).tolist()
    answer = {"log_probs": list(torch.split(scores.logprobs, sizes))}
    if scores.entropy is not None:
        entropy = scores.entropy if getattr(args, "entropy_coef", 0.0) else scores.entropy.detach()
        answer["entropy"] = list(torch.split(entropy, sizes))
    if args.allgather_cp:
        loss._allgather_cp_redistribute(
            answer,
            logits_local_len=logits.shape[1],
            total_lengths=total_lengths,
            response_lengths=response_lengths,
        )
    return logits.new_empty(0), answer


def _select_rows(
    num_rows: int, is_contiguous: bool, total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> RowSelection:
    """Select the rows of this rank's hidden states or logits that predict response tokens."""
    cp_size = parallel_state.get_context_parallel_world_size()
    multiple = 2 * cp_size if cp_size > 1 and not is_contiguous else 1
    totals, responses = np.asarray(total_lengths), np.asarray(response_lengths)
    edges = np.cumsum([0, *(-(-totals // multiple) * multiple)])
    layout = Layout(
        split="contiguous" if is_contiguous else "zigzag",
        cp_size=cp_size,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cu_seqlens=[*edges.tolist(), num_rows * cp_size],  # slime pads the end of the stream
    )
    return layout.select_rows(totals - responses, responses)


def _candidate_sets(
    token_ids: Sequence[Any], offsets: Sequence[Any], tokens: Sequence[Tensor]
) -> list[CandidateSets]:
    """Return each sample's candidate sets, from slime's fields and the sample's response tokens."""
    samples = []
    for sample_ids, sample_offsets, sampled in zip(token_ids, offsets, tokens, strict=True):
        ids, edges = np.asarray(sample_ids, np.int32), np.asarray(sample_offsets, np.int64)
        if len(edges) != len(sampled) + 1 or edges[-1] != len(ids):
            raise InvalidInputError(
                f"top_p_token_offsets: got {len(edges)} up to {edges[-1:]}, expected {len(sampled) + 1} for"
                f" {len(sampled)} tokens, up to {len(ids)}, the number of ids"
            )
        sizes = np.diff(edges)
        order = np.lexsort((ids, np.repeat(np.arange(len(sizes)), sizes)))  # as in sets without log-probs
        samples.append(CandidateSets(ids[order], None, edges, np.where(sizes, sampled.cpu().numpy(), -1)))
    return samples


def _score_logits(logits: Tensor, context: ReplayContext) -> Scores:
    """Score this rank's columns of the logits [T, V]. Rows outside of `context.rows` get empty sets.

    So the logits are not copied, and only one gradient of their shape is made.
    """
    assert isinstance(context.candidates, CandidateSets)
    group, rows = parallel_state.get_tensor_model_parallel_group(), context.rows.hidden_rows
    number = np.zeros(len(logits), np.int64)
    number[rows] = np.arange(1, len(rows) + 1)
    at = torch.from_numpy(rows).to(logits.device)
    scores: Scores = score_logits(
        logits,
        context.targets.new_zeros(len(logits)).index_copy(0, at, context.targets),
        CandidateSets.concat([CandidateSets.empty(1), context.candidates]).take(number),
        temperature=context.temperature,
        entropy=context.entropy,
        tp_group=group if group.size() > 1 else None,
        vocab_start=group.rank() * logits.shape[1],
    )
    entropy = None if scores.entropy is None else scores.entropy.index_select(0, at)
    return Scores(scores.logprobs.index_select(0, at), entropy)
