"""Train with TRL's `GRPOTrainer`, which samples from SGLang and scores over the candidate sets.

The model is small and random, and is created when the example starts. The reward of a sample is the share of
even token ids. For each step, the example prints the importance ratios and the kept mass. The kept mass is
the total probability of a token's candidate set. The sampler divides each probability by the kept mass. If
the trainer scored over the whole vocabulary, a token's ratio before the first update would therefore be the
kept mass, not 1.

    python examples/train_trl.py               # three steps: a minute to start SGLang, seconds per step
    python examples/train_trl.py --steps 20    # the reward rises
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rollout_loop import PROMPTS, TOLERANCE, serve
from tiny_model import make_tiny_model

from sglang_topp_client import RolloutClient


def train(model_path: Path, rollout_url: str, engine_url: str, *, steps: int) -> list[dict[str, float]]:
    """Train the model that the engine serves, and return the metrics that TRL logged for each step."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL warns that `rollout_func` is experimental
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from sglang_topp_integrations.trl import ReplayMixin, SGLangRollouts

    class Trainer(ReplayMixin, GRPOTrainer):
        """GRPO over candidate sets."""

    has_gpu = torch.cuda.is_available()
    with RolloutClient(rollout_url, engine_url=engine_url) as client:
        trainer = Trainer(
            model=str(model_path),
            reward_funcs=share_of_even_ids,
            args=GRPOConfig(
                str(model_path / "output"),
                top_p=0.8,
                max_completion_length=32,
                per_device_train_batch_size=32,
                num_generations=8,
                max_steps=steps,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                logging_steps=1,
                bf16=False,  # train in float32, because the engine serves in float32
                use_cpu=not has_gpu,
                dataloader_pin_memory=has_gpu,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
            rollout_func=SGLangRollouts(client, sampling_params={"ignore_eos": True}),
        )
        trainer.train()
    return [row for row in trainer.state.log_history if "replay/ratio_mean" in row]


def share_of_even_ids(completion_ids: list[list[int]], **others: Any) -> list[float]:
    """Return the reward of each completion: the share of its token ids that are even."""
    return [sum(token_id % 2 == 0 for token_id in ids) / len(ids) for ids in completion_ids]


def main() -> int:
    """Train a few steps. Return 0 if the largest importance ratio of every step is close to 1, or else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="training steps (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_tiny_model(folder, vocab_size=8192)
        with serve(model_path) as (rollout_url, engine_url):
            history = train(model_path, rollout_url, engine_url, steps=args.steps)
    print("step   reward   mean ratio   largest ratio   kept mass")
    for step, row in enumerate(history):
        print(
            f"{step:4}   {row['reward']:6.3f}   {row['replay/ratio_mean']:10.6f}"
            f"   {row['replay/ratio_max']:13.6f}   {row['replay/kept_mass_mean']:9.3f}"
        )
    return int(any(abs(row["replay/ratio_max"] - 1) > TOLERANCE for row in history))


if __name__ == "__main__":
    sys.exit(main())
