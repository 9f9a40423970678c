"""Megatron's data parallelism, optimizers, and older interface, and the ranks that have nothing to score."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp_integrations.megatron import scoring_output_layer
from sglang_topp_integrations.megatron.samples import return_hidden_states
from tests.integrations.megatron.cpu_ranks import (
    VOCAB,
    Ranks,
    make_hybrid_model,
    make_model,
    packed_inputs,
    run,
)
from tests.integrations.megatron.packed_rollouts import make_batch
from tests.integrations.megatron.test_scores import (
    by_adapter,
    by_dense_mask,
    deviation,
    gradients,
    make_context,
    run_schedule,
)

ASKED = {"replay": True, "vocab_size": VOCAB, "entropy": True, "temperature": 0.7}


@pytest.mark.parametrize(
    "ranks",
    [Ranks(dp=2), Ranks(tp=2, sequence_parallel=True), Ranks(cp=2), Ranks(pp=2)],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["optimizer", "distributed-optimizer"])
def test_three_steps_equal_those_with_a_dense_mask(
    ranks: Ranks, tied: bool, distributed_optimizer: bool
) -> None:
    for results in run(ranks, _three_steps, tied, distributed_optimizer):
        (values, weights, moved) = results
        assert values < 2e-5
        assert weights < 2e-5
        assert moved > 0.05


def _three_steps(ranks: Ranks, tied: bool, distributed_optimizer: bool) -> tuple[float, float, float]:
    batch = make_batch(ranks, "mixed")
    before = {
        name: weight.detach().clone()
        for name, weight in make_model(ranks, torch.float32, tied).named_parameters()
    }
    results = []
    for forward, fused in ((by_adapter(ranks, ASKED), True), (by_dense_mask(ranks, ASKED), False)):
        module = make_model(ranks, torch.float32, tied)
        if module.post_process:
            # The switch by which Megatron's layers add their gradient to `main_grad`. Its kernel needs a GPU.
            module.output_layer.gradient_accumulation_fusion = fused
        model = DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
            ),
            module,
        )
        module.config.finalize_model_grads_func = finalize_model_grads
        settings = OptimizerConfig(
            optimizer="adam", lr=0.02, clip_grad=1.0, use_distributed_optimizer=distributed_optimizer
        )
        optimizer = get_megatron_optimizer(settings, [model])
        for _ in range(3):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            found = run_schedule(ranks, model, batch, forward)
            if module.post_process:
                weight = module.shared_embedding_or_output_weight() if tied else module.output_layer.weight
                assert weight.grad_added_to_main_grad is fused
            optimizer.step()
        results.append((found, {name: weight.detach() for name, weight in module.named_parameters()}))
    (values, weights), (expected_values, expected_weights) = results
    return (
        deviation(values, expected_values),
        deviation(weights, expected_weights),
        deviation(weights, before),
    )


def test_gradients_on_two_context_parallel_ranks_equal_those_of_one_process() -> None:
    (alone,) = run(Ranks(), _main_grads)
    for grads in run(Ranks(cp=2), _main_grads):
        assert deviation(grads, alone) < 1e-5


def _main_grads(ranks: Ranks) -> dict[str, Tensor]:
    batch = make_batch(ranks, "mixed", max_tokens=128)
    module = make_model(ranks, torch.float32, tied=False)
    module.output_layer.gradient_accumulation_fusion = True
    model = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module)
    module.config.finalize_model_grads_func = finalize_model_grads
    # One weight for all positions, because the ranks have different ones.
    run_schedule(ranks, model, batch, by_adapter(ranks, ASKED), lambda scores, _: sum(scores.values()).sum())
    return {name: weight.main_grad.clone() for name, weight in module.named_parameters()}


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(3, 1), (3, 1)], id="no response on rank 0"),
        pytest.param([(4, 0), (7, 0)], id="no response"),
        pytest.param([(5, 9)], id="no sample in the second row"),
    ],
)
@pytest.mark.parametrize("kind", ["mixed", "one", "tools"])
def test_a_rank_without_positions_takes_part_in_every_collective(lengths: Any, kind: str) -> None:
    for worst in run(Ranks(tp=2, cp=2, sequence_parallel=True), _few_positions, lengths, kind):
        assert worst < 1e-5


def _few_positions(ranks: Ranks, lengths: Any, kind: str) -> float:
    packed = Ranks(tp=2, cp=2, dp=2 if len(lengths) == 1 else 1)
    batch = make_batch(packed, kind, lengths=lengths)
    model = make_model(ranks, torch.float32, tied=False)
    run_schedule(ranks, model, batch, by_adapter(ranks, ASKED))
    found = gradients(model)
    run_schedule(ranks, model, batch, by_dense_mask(ranks, ASKED))
    return deviation(found, gradients(model))


@pytest.mark.parametrize(
    "ranks",
    [Ranks(), Ranks(tp=2, sequence_parallel=True), Ranks(cp=2), Ranks(pp=2)],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("make", [make_model, make_hybrid_model])
def test_the_output_layer_scores_without_an_output_processor(ranks: Ranks, tied: bool, make: Any) -> None:
    for worst, is_restored in run(ranks, _score_by_layer, tied, make):
        assert worst < 1e-13
        assert is_restored


def _score_by_layer(ranks: Ranks, tied: bool, make: Any) -> tuple[float, bool]:
    batch = make_batch(ranks, "mixed")
    model = make(ranks, torch.float64, tied)

    def forward(model: Any, batch: Any, row: int) -> Any:
        context = make_context(batch, row, ASKED)
        with scoring_output_layer(model, context):
            output = model(**packed_inputs(ranks, batch, row))
        return output, lambda output: {
            "logprobs": output.view(-1),
            "entropy": context.scores.entropy,
        }

    found = run_schedule(ranks, model, batch, forward), gradients(model)
    expected = run_schedule(ranks, model, batch, by_dense_mask(ranks, ASKED)), gradients(model)
    is_restored = not model.post_process or "forward" not in vars(model.output_layer)
    return max(deviation(*pair) for pair in zip(found, expected, strict=True)), is_restored


def test_the_output_layer_of_a_scaling_model_is_refused() -> None:
    run(Ranks(), _refuse)


def _refuse(ranks: Ranks) -> None:
    batch = make_batch(ranks, "mixed")
    model = make_model(ranks, torch.float32, tied=False)
    context = make_context(batch, 0, ASKED)
    for name in ("mtp_num_layers", "use_mup"):
        setattr(model.config, name, 1)
        with pytest.raises(InvalidInputError, match=name), scoring_output_layer(model, context):
            pass
        if name == "mtp_num_layers":
            with pytest.raises(InvalidInputError, match=name):
                return_hidden_states(model)
        setattr(model.config, name, None)
    del batch["candidates"]
    with pytest.raises(InvalidInputError, match="candidates"):
        make_context(batch, 0, ASKED)
