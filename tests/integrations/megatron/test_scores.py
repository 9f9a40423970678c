"""The adapter on a real two-layer `GPTModel`, against a dense mask over its own output layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from sglang_topp_integrations.megatron import ReplayContext, score_output
from tests.integrations.megatron.cpu_ranks import VOCAB, Ranks, make_model, packed_inputs, run
from tests.integrations.megatron.packed_rollouts import dense_scores, make_batch, weighted_sum

LAYOUTS = [
    Ranks(),
    Ranks(tp=2),
    Ranks(tp=2, sequence_parallel=True),
    Ranks(cp=2),
    Ranks(pp=2),
    Ranks(tp=2, cp=2, sequence_parallel=True),
]
# Beyond rounding, both compute the same. In bfloat16, Megatron rounds the logits, and the adapter does not.
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-4}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy, temperature": {"entropy": True, "temperature": 0.7},
    "full": {"full": True, "entropy": True, "temperature": 1.3},
}
Forward = Callable[[Any, Any, int], tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]]


@pytest.mark.parametrize("ranks", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scores_and_gradients_equal_those_of_a_dense_mask(ranks: Ranks, tied: bool) -> None:
    for rank, deviations in enumerate(run(ranks, _compare, tied)):
        assert len(deviations) == 45
        for case, (limit, *deviation) in deviations.items():
            assert max(deviation) <= limit, f"rank {rank}: {case}: {deviation}"


def _compare(ranks: Ranks, tied: bool) -> dict[str, tuple[float, ...]]:
    deviations = {}
    for dtype, limit in LIMITS.items():
        model = make_model(ranks, dtype, tied, deallocate_pipeline_outputs=ranks.pp > 1)
        for kind in ("mixed", "one", "large", "whole", None):
            batch = make_batch(ranks, kind or "mixed")
            for label, options in OPTIONS.items():
                if kind is None:
                    options = options | {"full": False}
                asked = {"replay": kind is not None, "vocab_size": VOCAB, **options}
                found, expected = (
                    (run_schedule(ranks, model, batch, forward), gradients(model))
                    for forward in (by_adapter(ranks, asked), by_dense_mask(ranks, asked))
                )
                case = f"{dtype}, {kind} sets, {label}"
                deviations[case] = limit, *(deviation(*pair) for pair in zip(found, expected, strict=True))
    return deviations


def by_adapter(ranks: Ranks, asked: dict[str, Any]) -> Forward:
    def forward(model: Any, batch: Any, row: int) -> Any:
        context = make_context(batch, row, asked)
        inputs = packed_inputs(ranks, batch, row)
        output = model(**inputs, output_processor=score_output, output_processor_context=context)

        def scores(logprobs: Tensor) -> dict[str, Tensor]:
            assert context.scores is not None
            assert torch.equal(logprobs, context.scores.logprobs)
            return {name: value for name, value in vars(context.scores).items() if value is not None}

        return output, scores

    return forward


def by_dense_mask(ranks: Ranks, asked: dict[str, Any]) -> Forward:
    def forward(model: Any, batch: Any, row: int) -> Any:
        def scores(logits: Tensor) -> dict[str, Tensor]:
            found = dense_scores(ranks, logits, batch, row, asked.get("temperature", 1.0), asked["replay"])
            names = ["logprobs"]
            names += ["entropy"] * asked.get("entropy", False)
            names += ["full_logprobs", "full_entropy"] * asked.get("full", False)
            return {name: found[name] for name in names}

        return model(**packed_inputs(ranks, batch, row)), scores

    return forward


def make_context(batch: Any, row: int, asked: dict[str, Any]) -> ReplayContext:
    rank = parallel_state.get_context_parallel_rank()
    return ReplayContext.of_row(batch, row, device="cpu", cp_rank=rank, **asked)


def run_schedule(
    ranks: Ranks,
    model: Any,
    batch: Any,
    forward: Forward,
    loss: Callable[[dict[str, Tensor], int], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run Megatron's schedule over this data-parallel rank's rows of a batch, and return the scores.

    The loss of a row is `loss(scores, row)`. By default, every score of every position has another weight.
    """
    model.zero_grad()
    found: dict[str, Tensor] = {}

    def step(rows: Iterator[int], model: Any) -> Any:
        row = next(rows)
        output, scores_of = forward(model, batch, row)

        def row_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            scores = scores_of(output)
            found.update({f"{name} {row}": value.detach() for name, value in scores.items()})
            if loss is not None:
                return loss(scores, row), {}
            return weighted_sum(scores, torch.linspace(-1, 2, len(scores["logprobs"]))), {}

        return output, row_loss

    num_rows, width = batch["sequences"].shape
    num_rows //= ranks.dp
    first = num_rows * parallel_state.get_data_parallel_rank()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(first, first + num_rows)),
        model=model,
        num_microbatches=num_rows,
        seq_length=width,
        micro_batch_size=1,
        forward_only=False,
    )
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def deviation(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest value if that is above 1."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        if value.numel():
            difference = (found[name].double() - value.double()).abs().max()
            worst = max(worst, float(difference / value.double().abs().max().clamp(min=1)))
    return worst
