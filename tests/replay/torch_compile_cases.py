"""The head inside compiled functions. `test_lm_head_weight_grad` runs this file."""

from __future__ import annotations

import pytest
import torch
from distillation_oracle import teacher_sets
from replay_oracle import random_sets, targets_of
from test_lm_head_weight_grad import SIZES, V, inputs

from sglang_topp.replay import distillation_loss, score

# The compiler reads `.grad` and suppresses this warning itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.mark.parametrize("way", ["dense", "buffer"])
def test_within_a_compiled_function(way):
    """The head is a graph break there."""
    sets = random_sets(SIZES, V)
    targets = targets_of(sets)

    def gradients(transform) -> list[torch.Tensor]:
        hidden, weight = inputs()
        buffer = torch.zeros_like(weight)
        weight_grad = buffer if way == "buffer" else way

        @transform
        def value(states: torch.Tensor) -> torch.Tensor:
            scores = score(states, weight, targets, sets, weight_grad=weight_grad)
            return scores.logprobs.sum() * 2

        value(hidden).backward()
        return [hidden.grad, buffer if way == "buffer" else weight.grad]

    compiled = gradients(torch.compile(backend="aot_eager"))
    assert all(map(torch.equal, compiled, gradients(lambda function: function)))


@pytest.mark.parametrize("outside", ["tail", "renormalized"])
def test_distillation_within_a_compiled_function(outside):
    sets = teacher_sets(
        3 * torch.randn(len(SIZES), V, generator=torch.Generator().manual_seed(0)), 0.8, [0] * len(SIZES)
    )

    def gradients(transform) -> list[torch.Tensor]:
        hidden, weight = inputs()

        @transform
        def value(states: torch.Tensor) -> torch.Tensor:
            return distillation_loss(states, weight, sets, direction="reverse", outside=outside).mean() * 2

        value(hidden).backward()
        return [hidden.grad, weight.grad]

    compiled = gradients(torch.compile(backend="aot_eager"))
    assert all(map(torch.equal, compiled, gradients(lambda function: function)))
