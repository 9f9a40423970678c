"""Adapter for Megatron-core: score the policy over candidate sets where the logits would be computed.

::

    context = ReplayContext.of_row(batch, row, device=device, cp_rank=cp_rank)
    logprobs = model(
        input_ids, position_ids, None, packed_seq_params=packed_seq_params,
        output_processor=score_output, output_processor_context=context,
    )

`GPTModel.forward` takes an output processor from Megatron-core 0.18 on. `scoring_output_layer` serves
releases before, and `HybridModel`. Both read the hidden states and this rank's rows of the LM head, under
any tensor, sequence, context, and pipeline parallelism. No logits of the whole vocabulary are computed.

Shape legend: R scored positions of this context-parallel rank, S tokens and B sequences of its hidden states,
H hidden size, V rows of the LM head on this tensor-parallel rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.batch import PackedBatch
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import CandidateTensors, RowSelection, Scores, score

__all__ = ["ReplayContext", "gather_hidden", "score_hidden", "score_output", "scoring_output_layer"]


@dataclass(eq=False)
class ReplayContext:
    """What the last pipeline stage scores in one micro-batch, and the scores.

    Make one per micro-batch, on every tensor-parallel rank with the same values.

    Args:
        rows: the rows of this rank's hidden states that predict the scored tokens.
        targets: integers [R], the scored tokens, on the device of the model.
        candidates: the candidate sets of the R positions, or None to score over the whole vocabulary.
            To score over the same sets again, pass `sets.to_torch(device)`.
        temperature: above 0, one number or [R].
        entropy: also compute the entropy.
        full: with candidates, also score over the whole vocabulary.
        vocab_size: the number of token ids without the padding of the LM head, or None if it has none.
    """

    rows: RowSelection
    targets: Tensor
    candidates: CandidateSets | CandidateTensors | None
    temperature: float | Tensor = 1.0
    entropy: bool = False
    full: bool = False
    vocab_size: int | None = None
    scores: Scores | None = field(default=None, init=False)
    """The scores of the R positions that the last forward pass computed, or None on other pipeline stages."""

    @classmethod
    def of_row(
        cls,
        batch: PackedBatch,
        row: int,
        *,
        device: torch.device | str,
        cp_rank: int = 0,
        replay: bool = True,
        **options: Any,
    ) -> ReplayContext:
        """Build the context of one row of a packed RL batch.

        The scored positions are those with a loss. `rows.take(values[batch["response_mask"][row].bool()])`
        selects the elements of a scored field `values` [W], such as advantages, that belong to them.

        Args:
            cp_rank: this rank's index among the context-parallel ranks for which the batch was packed.
            replay: False scores over the whole vocabulary.
            options: `temperature`, `entropy`, `full`, and `vocab_size`.

        Raises:
            InvalidInputError: the batch is not an RL batch, or has no candidate sets although `replay` is
                True.
        """
        for name in ("response_mask", *(["candidates"] if replay else [])):
            if name not in batch:
                raise InvalidInputError(f"batch: it has no {name!r}; collate rollouts with candidate sets")
        scored = batch["response_mask"][row].bool()
        num_scored = [scored[start:stop].sum() for start, stop in pairwise(batch["cu_seqlens"][row].tolist())]
        samples = slice(len(batch["samples"][row]))  # a row without samples has one sequence of padding
        lengths, responses = batch["seq_lengths"][row][samples], torch.tensor(num_scored)[samples]
        rows = replace(batch["layouts"][row], cp_rank=cp_rank).select_rows(
            lengths - responses, responses, loss_mask=batch["loss_mask"][row][scored]
        )
        targets = rows.take(batch["sequences"][row].roll(-1)[scored]).to(device)
        sets = None
        if replay:
            sets = rows.take_sets(batch["candidates"][row].take(scored.nonzero().squeeze(1).numpy()))
        return cls(rows, targets, None if sets is None else sets.to_torch(device), **options)


def score_output(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    context: ReplayContext,
    **_: Any,
) -> Tensor:
    """Score a micro-batch: an `output_processor` for `GPTModel.forward`, whose context is a `ReplayContext`.

    Returns:
        [R]: the log-probs of `context.targets`. `context.scores` has them too, and the other scores. The
        gradient of the hidden states is whole on every tensor-parallel rank. That of the LM head is added to
        `weight.main_grad` if Megatron's own layer would do so (`gradient_accumulation_fusion`).

    Raises:
        InvalidInputError: the hidden states do not have the layout of `context.rows`, or `score` refuses an
            argument.
    """
    scale = float(scale_logits(torch.ones((), dtype=torch.float64)))  # of MuP
    hidden_states = gather_hidden(hidden_states, output_layer).transpose(0, 1)
    context.scores = score_hidden(hidden_states, output_layer, output_weight, context, logit_scale=scale)
    return context.scores.logprobs


@contextmanager
def scoring_output_layer(model: Any, context: ReplayContext) -> Iterator[None]:
    """While the context is open, make the model return log-probs [1, R, 1] instead of logits.

    For models without an `output_processor`. On a pipeline stage without an output layer, nothing changes.

    Raises:
        InvalidInputError: the model has multi-token prediction layers, which use the same output layer, or
            scales its logits (MuP).
    """
    module = unwrap_model(model)
    layer = getattr(module, "output_layer", None)
    if layer is None:
        yield
        return
    for name in ("mtp_num_layers", "use_mup"):
        if value := getattr(module.config, name, None):
            raise InvalidInputError(f"{name}: got {value}, expected none; use output_processor")
    layer.forward = functools.partial(_forward, layer, context)
    try:
        yield
    finally:
        del layer.forward


def _forward(
    layer: Any, context: ReplayContext, hidden_states: Tensor, weight: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Take the place of `ColumnParallelLinear.forward`. The model transposes the result's first two axes."""
    hidden_states = gather_hidden(hidden_states, layer).transpose(0, 1)
    context.scores = score_hidden(hidden_states, layer, weight, context)
    return context.scores.logprobs.view(-1, 1, 1), None


def gather_hidden(hidden_states: Tensor, layer: Any) -> Tensor:
    """Return hidden states [S, B, H] from [S, B, H], or from [S / tp, B, H] under sequence parallelism."""
    if not layer.sequence_parallel:
        return hidden_states
    # `score` returns the whole gradient of the hidden states, so each rank takes its rows of it. By default,
    # the gradients of all ranks would be summed.
    gathered: Tensor = gather_from_sequence_parallel_region(
        hidden_states, tensor_parallel_output_grad=False, group=_tp_group(layer)
    )
    return gathered


def score_hidden(
    hidden_states: Tensor, layer: Any, weight: Tensor | None, context: ReplayContext, logit_scale: float = 1.0
) -> Scores:
    """Score gathered hidden states [B, S, H].

    `weight` is the embedding that the LM head is tied to, or None if `layer` has its own weight.
    """
    weight = layer.weight if weight is None else weight
    group = _tp_group(layer)
    scores: Scores = score(
        context.rows.select(hidden_states),
        weight,
        context.targets,
        context.candidates,
        bias=layer.bias,
        temperature=context.temperature,
        logit_scale=logit_scale,
        entropy=context.entropy,
        full=context.full and context.candidates is not None,
        tp_group=group if group.size() > 1 else None,
        vocab_start=group.rank() * len(weight),
        vocab_size=context.vocab_size,
        weight_grad=_main_grad(layer, weight),
    )
    return scores


def _tp_group(layer: Any) -> dist.ProcessGroup:
    # Layers of older releases do not have it.
    group: dist.ProcessGroup = (
        getattr(layer, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    )
    return group


def _main_grad(layer: Any, weight: Tensor) -> Any:
    """Return the buffer that Megatron's own output layer would add the weight's gradient to, or "dense"."""
    buffer = getattr(weight, "main_grad", None)
    if not layer.gradient_accumulation_fusion or getattr(weight, "overwrite_main_grad", False):
        return "dense"
    return "dense" if buffer is None else buffer
