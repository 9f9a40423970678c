"""Replay with all inputs on a GPU creates no tensor on another device, and NumPy reads none.

The values equal those of the same calls on the CPU.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from distillation_oracle import teacher_sets
from replay_oracle import EMPTY, SINGLE, error, random_sets, targets_of
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import (
    DistillationLoss,
    Layout,
    Scores,
    distillation_loss,
    replay_metrics,
    replayed_old_logprobs,
    score,
    score_logits,
)
from tests.fake_gpu import fake_gpu, forbid_waits, gpu

V, H = 30, 20
SETS = random_sets([3, SINGLE, 7, EMPTY, V, 2, 12], V)
TARGETS = targets_of(SETS).clamp(min=0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# One position without a set, one with the whole vocabulary.
TEACHER_SETS = CandidateSets.concat(
    [
        teacher_sets(2 * draw(6, V), 0.8, [0] * 6, empty=(3,)),
        teacher_sets(draw(1, V), 1.0, [0]),
    ]
)
# A real GPU adds in another order than the CPU. On an H200, the largest difference was 1.3e-6.
ROUNDING = 2e-6 if torch.cuda.is_available() else 1e-6
TEMPERATURE = 0.5 + draw(len(SETS)).abs()


def candidate_head(device: str, hidden: Tensor, weight: Tensor, bias: Tensor, **options) -> Scores:
    return score(
        hidden,
        weight,
        TARGETS.to(device),
        SETS,
        bias=bias,
        temperature=TEMPERATURE.to(device),
        softcap=5.0,
        logit_scale=0.4,
        entropy=True,
        per_candidate=True,
        kl_to=torch.tensor(SETS.logprobs, device=device),
        backend="torch",
        **options,
    )


def head_into_weight_grad(device: str, hidden: Tensor, weight: Tensor, bias: Tensor) -> Scores:
    weight.grad = torch.ones_like(weight)
    return candidate_head(device, hidden, weight, bias, weight_grad=weight.grad)


def full_head(device: str, hidden: Tensor, weight: Tensor, bias: Tensor) -> Scores:
    return score(
        hidden,
        weight,
        TARGETS.to(device),
        bias=bias,
        temperature=TEMPERATURE.to(device),
        softcap=5.0,
        logit_scale=0.4,
        entropy=True,
        chunk_rows=3,
    )


def distilled(outside: str, direction: str, device: str, *inputs: Tensor) -> DistillationLoss:
    hidden, weight, bias = inputs
    return distillation_loss(
        hidden,
        weight,
        TEACHER_SETS,
        direction=direction,
        outside=outside,
        loss_mask=torch.tensor([1, 1, 1, 1, 1, 0, 1], device=device),
        bias=bias,
        temperature=TEMPERATURE.to(device),
        softcap=5.0,
        logit_scale=0.4,
        chunk_rows=3,
        backend="torch",
    )


DISTILLED = [
    functools.partial(distilled, outside, direction)
    for outside in ("tail", "renormalized")
    for direction in ("forward", "reverse")
]


def from_logits(device: str, hidden: Tensor, weight: Tensor, bias: Tensor) -> Scores:
    logits = hidden @ weight.t() + bias
    return score_logits(
        logits,
        TARGETS.to(device),
        SETS,
        temperature=TEMPERATURE.to(device),
        entropy=True,
        full=True,
        chunk_rows=3,
    )


def full_from_logits(device: str, hidden: Tensor, weight: Tensor, bias: Tensor) -> Scores:
    return score_logits(
        hidden @ weight.t() + bias, TARGETS.to(device), temperature=0.7, entropy=True, chunk_rows=3
    )


def values_and_gradients(
    scored: Callable[..., Scores | DistillationLoss], device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    inputs = {"hidden": draw(len(SETS), H), "weight": draw(V, H), "bias": draw(V)}
    leaves = {name: value.to(device, dtype).requires_grad_() for name, value in inputs.items()}
    scores = scored(device, *leaves.values())
    values = {
        name: value
        for name, value in vars(scores).items()
        if value is not None and value.dtype.is_floating_point
    }
    weighted = [(value * torch.arange(1.0, len(value) + 1, device=device)).sum() for value in values.values()]
    sum(weighted).backward()
    return values | {f"grad of {name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scored", [candidate_head, head_into_weight_grad, full_head, from_logits, full_from_logits, *DISTILLED]
)
def test_scores_and_gradients(scored, dtype):
    with gpu():
        got = values_and_gradients(scored, "cuda", dtype)
    want = values_and_gradients(scored, "cpu", dtype)
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value.device.type == "cuda", name
        assert value.dtype == want[name].dtype
        # In half precision, the GPU rounds a chunk's gradient before the product, and the CPU converts the
        # factors to float32.
        assert error(value.cpu(), want[name].double()) < max(ROUNDING, 2 * torch.finfo(value.dtype).eps), name


@pytest.mark.parametrize("weight_grad", ["buffer", "dense"])
def test_the_last_id_keeps_its_gradient(weight_grad):
    """Only the GPU knows how many ids occur, so segments without candidates follow the last one's."""
    sets = random_sets([3, 5, 2, 4], V)

    def run(device: str) -> Tensor:
        hidden, weight = (draw(n, H).to(device, torch.bfloat16).requires_grad_() for n in (len(sets), V))
        buffer = torch.zeros_like(weight)
        got = score(
            hidden,
            weight,
            targets_of(sets).to(device),
            sets,
            weight_grad=buffer if weight_grad == "buffer" else weight_grad,
            backend="torch",
        )
        got.logprobs.sum().backward()
        return buffer if weight_grad == "buffer" else weight.grad

    with gpu():
        got = run("cuda")
    want = run("cpu")
    assert want[int(sets.token_ids.max())].any()
    assert error(got.cpu(), want.double()) <= torch.finfo(torch.bfloat16).eps


def test_layout_old_logprobs_and_metrics():
    layout, mask = Layout(cp_size=2, cp_rank=1), torch.tensor([1, 0, 1, 1, 1, 1, 0])
    prompts, responses, ids = torch.tensor([2, 3]), torch.tensor([3, 4]), targets_of(SETS)

    def run(device: str) -> dict[str, Tensor]:
        rows = layout.select_rows(prompts.to(device), responses.to(device), loss_mask=mask.to(device))
        hidden = draw(rows.num_hidden_rows, H).to(device).requires_grad_()
        picked = rows.select(hidden)
        spread = rows.scatter(picked.sum(1))
        spread.sum().backward()
        kept = rows.take(ids.to(device))
        old = replayed_old_logprobs(rows.take_sets(SETS), output_ids=kept)
        whole = replayed_old_logprobs(SETS, output_ids=ids.to(device))
        metrics = replay_metrics(whole.to(device), whole.to(device), SETS, loss_mask=mask.to(device))
        assert metrics.summary()["replay/ratio_mean"] == 1.0
        return {"picked": picked, "spread": spread, "kept": kept, "grad": hidden.grad, "old": old.to(device)}

    with gpu():
        got = run("cuda")
    for name, want in run("cpu").items():
        assert got[name].device.type == "cuda", name
        assert error(got[name].cpu(), want.double()) <= (ROUNDING if torch.cuda.is_available() else 0), name


def test_a_row_selection_never_waits():
    rows = Layout(cp_size=2, cp_rank=1).select_rows([2, 3], [3, 4], loss_mask=[1, 0, 1, 1, 1, 1, 0])
    hidden = draw(rows.num_hidden_rows, H)
    with gpu():
        states, ids = hidden.to("cuda").requires_grad_(), TARGETS.to("cuda")
        ones = torch.ones((), device="cuda")
        for _ in range(2):
            with forbid_waits():
                picked, kept = rows.select(states), rows.take(ids)
                (rows.scatter(picked.sum(1)).sum() * ones).backward()
    assert torch.equal(picked.cpu(), rows.select(hidden))
    assert torch.equal(kept.cpu(), rows.take(TARGETS))


@pytest.mark.parametrize("replay", [True, False])
def test_the_example_loss(replay):
    path = Path(__file__).parents[2] / "examples" / "grpo_loss.py"
    spec = importlib.util.spec_from_file_location("grpo_loss_on_a_gpu", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        sets = random_sets([3, 5, 2], V)
        samples = [module.Sample(np.zeros(2, np.int32), sets.sampled_ids, sets)]

        def run(device: str) -> tuple[Tensor, Tensor]:
            hidden, weight = draw(5, H).to(device).requires_grad_(), draw(V, H).to(device).requires_grad_()
            # The kernels run elsewhere, in Triton's interpreter.
            patch.setattr(
                module,
                "score",
                lambda *args, **options: score(*args, **options, backend="torch"),
            )
            loss, _ = module.grpo_loss(
                hidden, weight, samples, torch.ones(1, device=device), layout=Layout(), replay=replay
            )
            loss.backward()
            return loss.detach(), hidden.grad

        with gpu():
            loss, grad = run("cuda")
        want, want_grad = run("cpu")
    assert error(loss.cpu(), want.double()) < ROUNDING
    assert error(grad.cpu(), want_grad.double()) < 1e-5


def test_mixed_devices_are_named():
    with (
        gpu(),
        pytest.raises(InvalidInputError, match="targets: it is on cpu, and hidden is on cuda:0"),
    ):
        score(draw(len(SETS), H).to("cuda"), draw(V, H).to("cuda"), TARGETS, SETS)


def test_the_fake_gpu_refuses_what_a_gpu_refuses():
    with fake_gpu():
        on_gpu, index = torch.zeros(3, device="cuda"), torch.tensor([0, 1])
        with pytest.raises(RuntimeError, match="same device"):
            on_gpu.index_select(0, index)
        with pytest.raises(RuntimeError, match="same device"):
            on_gpu + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(on_gpu)
        assert (on_gpu + torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]
        assert torch.equal(on_gpu.cpu(), torch.zeros(3))
        assert torch.ones(2).to("cuda:0").is_cuda
