"""A DTensor is refused in the place of every tensor, and what the message recommends works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from distillation_oracle import teacher_sets
from replay_oracle import random_sets, targets_of

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import (
    distillation_loss,
    score,
    score_logits,
)

SIZES, V, H = [3, 0, 5], 16, 8
SETS = random_sets(SIZES, V)
TARGETS = targets_of(SETS).clamp(min=0)
TEACHER = teacher_sets(torch.zeros(len(SIZES), V), 0.5, [0] * len(SIZES))
FROM_HEAD = {
    "candidate_logprobs": (score, {"targets": TARGETS, "sets": SETS}),
    "head_logprobs": (score, {"targets": TARGETS}),
    "tail": (
        distillation_loss,
        {"teacher_sets": TEACHER, "direction": "forward", "outside": "tail"},
    ),
    "renormalized": (
        distillation_loss,
        {"teacher_sets": TEACHER, "direction": "reverse", "outside": "renormalized"},
    ),
}
FROM_LOGITS = {
    "masked_logprobs": (score_logits, {"targets": TARGETS, "sets": SETS}),
    "full_logprobs": (score_logits, {"targets": TARGETS}),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def arguments(function: str) -> tuple[object, dict[str, object], dict[str, torch.Tensor]]:
    tensors = {"hidden": torch.ones(len(SIZES), H), "weight": torch.ones(V, H), "bias": torch.ones(V)}
    if function in FROM_LOGITS:
        return *FROM_LOGITS[function], {"logits": torch.ones(len(SIZES), V)}
    return *FROM_HEAD[function], tensors


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("function", [*FROM_HEAD, *FROM_LOGITS])
def test_every_tensor(function, sharded, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    call, options, tensors = arguments(function)
    for name, tensor in tensors.items():
        wrapped = distribute_tensor(tensor, mesh, [Shard(0) if sharded else Replicate()])
        with pytest.raises(
            InvalidInputError, match=rf"{name}: it is a DTensor.* {name}\.full_tensor\(\).*unshard"
        ):
            call(**tensors | {name: wrapped}, **options)
        call(**tensors | {name: wrapped.full_tensor()}, **options)


def test_an_unsharded_fsdp2_head_gets_its_gradient(mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    head, plain = torch.nn.Linear(H, V, bias=False), torch.nn.Linear(H, V, bias=False)
    plain.load_state_dict(head.state_dict())
    hidden = torch.randn(len(SIZES), H)
    fully_shard(head, mesh=mesh)
    with pytest.raises(InvalidInputError, match="weight: it is a DTensor"):
        score(hidden, head.weight, TARGETS, SETS)
    score(hidden, head.weight.full_tensor(), TARGETS, SETS).logprobs.sum().backward()
    score(hidden, plain.weight, TARGETS, SETS).logprobs.sum().backward()
    torch.testing.assert_close(head.weight.grad.full_tensor(), plain.weight.grad)
    head.unshard()
    got = score(hidden, head.weight, TARGETS, SETS).logprobs
    assert torch.equal(got, score(hidden, plain.weight, TARGETS, SETS).logprobs)
