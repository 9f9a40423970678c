"""Score samples that lie one after the other in a packed stream: what the adapters for slime and Miles share.

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
from types import ModuleType
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import Layout, RowSelection, Scores, score_logits
from sglang_topp_integrations.megatron import ReplayContext, gather_hidden, score_hidden

__all__ = [
    "build_model",
    "replace_scoring",
    "return_hidden_states",
    "returns_hidden_states",
    "score_samples",
]

_NAME = "get_log_probs_and_entropy"

_model: weakref.ref[Any] | None = None
"""The model that returns hidden states, if this process has one."""


def replace_scoring(
    module: ModuleType, parameters: Sequence[str], replacement: Callable[..., Any], written_for: str
) -> None:
    """Replace a framework's `get_log_probs_and_entropy` where it is defined, and where it was imported.

    Args:
        module: the module that defines the function.
        parameters: the names that the function's parameters must have.
        replacement: called with the function, and with its arguments.
        written_for: the framework and its date, for the message.

    Raises:
        InvalidInputError: the function has other parameters.
    """
    original = getattr(module, _NAME)
    if [*inspect.signature(original).parameters] != [*parameters]:
        raise InvalidInputError(
            f"{module.__name__}: {_NAME}{inspect.signature(original)} has other parameters than"
            f" {', '.join(parameters)}; the adapter was written for {written_for}"
        )
    function = functools.wraps(original)(functools.partial(replacement, original))
    for importer in [*sys.modules.values()]:
        if getattr(importer, "__dict__", {}).get(_NAME) is original:
            setattr(importer, _NAME, function)


def build_model(
    get_provider: Callable[[Namespace], Callable[..., Any]],
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> Any:
    """Build a framework's own model, which returns hidden states on the last pipeline stage."""
    from megatron.training import get_args

    args = copy.copy(get_args())
    args.custom_model_provider_path = None
    model = get_provider(args)(pre_process, post_process, vp_stage)
    if post_process:
        return_hidden_states(model)
    return model


def return_hidden_states(model: Any) -> None:
    """Make a model return its hidden states [1, T, H] instead of logits. `install` then scores them.

    Raises:
        InvalidInputError: another model of this process does so already, or the model has multi-token
            prediction layers, whose loss reads logits of the same output layer.
    """
    global _model
    if returns_hidden_states():
        raise InvalidInputError("model: got a second one with an output layer, expected one per process")
    if number := getattr(model.config, "mtp_num_layers", None):
        raise InvalidInputError(f"mtp_num_layers: got {number}, expected none; they read the model's logits")
    layer = model.output_layer
    layer.forward = lambda hidden_states, *_, **__: (gather_hidden(hidden_states, layer), None)
    _model = weakref.ref(model)


def returns_hidden_states() -> bool:
    """Return whether a model of this process returns hidden states."""
    return _model is not None and _model() is not None


def score_samples(
    logits: Tensor,
    supports: Sequence[tuple[Any, Any]] | None,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    **_: Any,
) -> dict[str, list[Tensor]]:
    """Return each sample's `log_probs` and `entropy` of the response positions that are on this rank.

    The keywords are those of the frameworks' `get_log_probs_and_entropy`.

    Args:
        logits: [1, T, V / tp], or the hidden states of a model that returns them.
        supports: each sample's candidate ids, and their offsets by response token. None is possible for
            hidden states only, and scores over the whole vocabulary.

    Raises:
        InvalidInputError: offsets do not fit their sample, or a token is not in its set.
    """
    rows = _select_rows(logits.shape[1], args.allgather_cp, total_lengths, response_lengths)
    tokens = [ids[len(ids) - n :] for ids, n in zip(unconcat_tokens, response_lengths, strict=True)]
    sets = None if supports is None else rows.take_sets(_candidate_sets(supports, tokens))
    targets = rows.take(torch.cat(tokens))
    context = ReplayContext(rows, targets, sets, temperature=args.rollout_temperature, entropy=with_entropy)
    model = None if _model is None else _model()
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
        entropy = scores.entropy if entropy_requires_grad else scores.entropy.detach()
        answer["entropy"] = list(torch.split(entropy, sizes))
    return answer


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
        cu_seqlens=[*edges.tolist(), num_rows * cp_size],  # the end of the stream is padded
    )
    return layout.select_rows(totals - responses, responses)


def _candidate_sets(supports: Sequence[tuple[Any, Any]], tokens: Sequence[Tensor]) -> list[CandidateSets]:
    """Return each sample's candidate sets, from its support and its response tokens."""
    samples = []
    for (token_ids, offsets), sampled in zip(supports, tokens, strict=True):
        ids, edges = np.asarray(token_ids, np.int32), np.asarray(offsets, np.int64)
        if len(edges) != len(sampled) + 1 or edges[-1] != len(ids):
            raise InvalidInputError(
                f"offsets of candidates: got {len(edges)} up to {edges[-1:]}, expected {len(sampled) + 1} for"
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
