"""One of two processes that train together over gloo: `torchrun ... two_processes.py MODEL URL OUTPUT`.

Each process gets half of every group of four samples, and writes what it saw to `OUTPUT/RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from sglang_topp_client import RolloutClient
from sglang_topp_integrations.trl import _add_candidate_head
from tests.integrations.trl.candidate_rows import random_rows
from tests.integrations.trl.recording_trainer import RecordedRollouts, make_trainer


def main(model_path: Path, url: str, output: Path) -> None:
    with RolloutClient(url) as client:
        rollouts = RecordedRollouts(client)
        trainer = make_trainer(
            model_path,
            rollouts,
            output,
            per_device_train_batch_size=2,
            beta=0.1,
            ddp_backend="gloo",
        )
        trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    seen = {
        "prompts": [each.prompt_ids.tolist() for each in rollouts.rollouts],
        "versions": [each.weight_version for each in rollouts.rollouts],
        "ratios": [each.ratios.tolist() for each in trainer.micro_batches],
        "tokens": [each.get("replay/tokens") for each in trainer.state.log_history],
        "weights": float(sum(each.double().abs().sum() for each in trainer.model.parameters())),
        "sharded_head_error": sharded_head_error(model_path),
        "candidates": [int(np.sum(sets.sizes)) for each in trainer.micro_batches for sets in each.sets],
    }
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


def sharded_head_error(model_path: Path) -> float:
    """Return how far gradients through a sharded head are off, relative to each parameter's largest."""
    rows, input_ids = random_rows(vocab_size=512)
    gradients = []
    for is_sharded in (False, True):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        _add_candidate_head(model, 0.7)
        if is_sharded:
            fully_shard(model.lm_head)
            fully_shard(model)
            assert len(model.lm_head.weight.to_local()) == 256
        scores = model(input_ids=input_ids, candidate_rows=rows, compute_entropy=True)
        (scores["logprobs"].sum() + scores["entropy"].sum()).backward()
        grads = [each.grad for each in model.parameters()]
        gradients.append([each.full_tensor() if is_sharded else each for each in grads])
    return max(
        float((one - other).abs().max() / one.abs().max()) for one, other in zip(*gradients, strict=True)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
