"""One of two processes that train together over gloo: `torchrun ... two_processes.py MODEL URL OUTPUT`.

Each process gets half of every group of four samples. It trains with DDP, with FSDP, and with FSDP in
bfloat16, and writes what it saw to `OUTPUT/RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from sglang_topp_client import RolloutClient
from sglang_topp_integrations.trl import _add_candidate_head
from tests.integrations.trl.candidate_rows import random_rows
from tests.integrations.trl.recording_trainer import PROMPTS, RecordedRollouts, ReplayTrainer, make_trainer

RUNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "fsdp_bf16": {"fsdp": True, "bf16": True},
}


class TrainerOnCPU(ReplayTrainer):
    """Lets Accelerate shard a model on a CPU. It accepts FSDP only for processes that have accelerators."""

    scores_vocabulary = False  # between loss and backward, another forward would change what FSDP's hooks do

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.fsdp:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


def main(model_path: Path, url: str, output: Path) -> None:
    with RolloutClient(url) as client:
        seen = {name: train(model_path, client, output, **config) for name, config in RUNS.items()}
    seen["head_errors"] = {
        each: sharded_head_error(model_path, shares_a_group=each) for each in (True, False)
    }
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


def train(model_path: Path, client: RolloutClient, output: Path, **config: Any) -> dict[str, Any]:
    rollouts = RecordedRollouts(client)
    trainer = make_trainer(
        model_path,
        rollouts,
        output,
        trainer_class=TrainerOnCPU,
        arguments={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS})},
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        num_generations_eval=4,
        beta=0.1,
        ddp_backend="gloo",
        **config,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    batches = trainer.micro_batches
    logprobs = torch.cat([each.logprobs[each.mask & (each.logprobs != 0)] for each in batches])
    return {
        "wrapper": type(trainer.model_wrapped).__name__,
        "prompts": [each.prompt_ids.tolist() for each in rollouts.rollouts],
        "versions": [each.weight_version for each in rollouts.rollouts],
        "ratios": [each.ratios.tolist() for each in batches],
        "tokens": [each.get("replay/tokens") for each in trainer.state.log_history],
        "evaluated_ratio": evaluated["eval_replay/ratio_mean"],
        "weights": float(sum(whole(each).double().abs().sum() for each in trainer.model.parameters())),
        "share_of_bf16_logprobs": float((logprobs == logprobs.bfloat16()).double().mean()),
        "candidates": [int(np.sum(sets.sizes)) for each in batches for sets in each.sets],
    }


def sharded_head_error(model_path: Path, *, shares_a_group: bool) -> float:
    """Return how far gradients through a sharded head are off, relative to each parameter's largest.

    The ranks score different rows, and FSDP averages their gradients. The head is in one FSDP group with the
    last norm, as Accelerate shards it by default, or in a group of its own.
    """
    rank = dist.get_rank()
    gradients = []
    for is_sharded in (False, True):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        _add_candidate_head(model, 0.7)
        if is_sharded:
            group: list[nn.Module] = [model.model.norm, model.lm_head] if shares_a_group else [model.lm_head]
            fully_shard(group, reshard_after_forward=False)
            fully_shard(model)
            assert len(model.lm_head.weight.to_local()) == 256
        for step in range(2):  # in the second step, the first one must have left no trace
            model.zero_grad()
            for micro_batch in range(2):
                rows, input_ids = random_rows(vocab_size=512, seed=4 * step + 2 * micro_batch + rank)
                scores = model(input_ids=input_ids, candidate_rows=rows, compute_entropy=True)
                (scores["logprobs"].sum() + scores["entropy"].sum()).backward()
        grads = [whole(each.grad) for each in model.parameters()]
        if not is_sharded:
            for each in grads:
                dist.all_reduce(each)
                each /= dist.get_world_size()
        gradients.append(grads)
    return max(
        float((one - other).abs().max() / one.abs().max()) for one, other in zip(*gradients, strict=True)
    )


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
