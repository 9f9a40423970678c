"""Benchmark of a GRPOTrainer step in TRL: compare scoring over candidate sets with TRL's own fused head.

A step is the forward and backward pass of one micro-batch, on the CPU in float32. Both contenders get the
same batch and the same weights. With candidate sets, the step also checks and indexes the sets, and computes
the metrics that `ReplayMixin` logs. The benchmark needs `trl`, which `make setup` installs.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness.paired_timing import compare
from benchmarks.harness.peak_memory import Work, compare_peaks
from benchmarks.replay import make_sets
from examples.tiny_model import make_tiny_model
from sglang_topp_integrations.trl import ReplayMixin

__all__ = ["run", "step"]

# Each shape is: rows, tokens per completion, hidden size, number of layers, and vocabulary size.
SHAPE = (4, 256, 512, 4, 32_768)
PROMPT = 64


class ReplayTrainer(ReplayMixin, GRPOTrainer):
    """GRPO over candidate sets."""


def run() -> None:
    rows, width, hidden, layers, vocab = SHAPE
    shape = f"{rows} x {width} tokens, H = {hidden}, {layers} layers, V = {vocab}"
    steps = {"TRL's fused head": step(False, *SHAPE), "replay": step(True, *SHAPE)}
    compare(
        f"GRPO training step; {shape}, {torch.get_num_threads()} threads",
        steps,
        rounds=9,
        target=1 / 1.1,
        picture="trl",
    )
    compare_peaks(
        "GRPO training step, peak memory beyond the model and its gradient",
        steps,
        target=1,
        picture="trl",
    )


def step(replay: bool, rows: int, width: int, hidden: int, layers: int, vocab: int) -> Work:
    """Return a function that runs one training step and returns the gradients of all parameters."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    trainer_class: Any = ReplayTrainer if replay else GRPOTrainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=Qwen2ForCausalLM(config).float(),
            reward_funcs=lambda completions, **others: [0.0] * len(completions),
            args=GRPOConfig(
                folder, top_p=0.97, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none"
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=AutoTokenizer.from_pretrained(make_tiny_model(Path(folder, "tokenizer"))),
            rollout_func=lambda prompts, trainer: {},
        )
    trainer.current_gradient_accumulation_steps = 1
    inputs = _batch(rows, width, vocab)
    return functools.partial(_forward_backward, trainer, inputs)


def _batch(rows: int, width: int, vocab: int) -> dict[str, Any]:
    sets = make_sets(rows * width, vocab)
    ids = torch.tensor(sets.sampled_ids, dtype=torch.int64).reshape(rows, width)
    return {
        "prompt_ids": torch.randint(vocab, (rows, PROMPT), generator=torch.Generator().manual_seed(0)),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.int64),
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "advantages": torch.linspace(-1, 1, rows),
        "num_items_in_batch": torch.tensor(rows * width),
        "old_per_token_logps": torch.full((rows, width), -1.0),
        "candidate_sets": [sets[row * width : (row + 1) * width] for row in range(rows)],
    }


def _forward_backward(trainer: Any, inputs: dict[str, Any]) -> list[Tensor]:
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, dict(inputs)).backward()
    return [each.grad for each in trainer.model.parameters()]


if __name__ == "__main__":
    run()
