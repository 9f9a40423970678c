"""The real `GRPOTrainer` with replay, and a record of every micro-batch that it scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from sglang_topp import CandidateSets
from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_integrations.trl import ReplayMixin, SGLangRollouts

__all__ = [
    "PROMPTS",
    "MicroBatch",
    "RecordedRollouts",
    "ReplayTrainer",
    "check_ratios",
    "make_trainer",
    "share_of_even_ids",
]

PROMPTS = ["Once upon a time", "The answer is", "def main():", "Dear reader,"]


@dataclass
class MicroBatch:
    """What one micro-batch's loss was computed from."""

    mode: str
    is_fresh: bool
    """Whether no optimizer step was made since its generation."""
    logprobs: Tensor
    """float32 [B, C]"""
    old_logprobs: Tensor
    """float32 [B, C]"""
    full_logprobs: Tensor
    """float32 [B, C]: over the whole vocabulary, by TRL's own head; NaN if `scores_vocabulary` is False."""
    mask: Tensor
    """bool [B, C]: tokens with a loss."""
    sets: list[CandidateSets]
    inputs: dict[str, Any]

    @property
    def ratios(self) -> np.ndarray:
        """float64: the importance ratio of every token with a loss."""
        return (self.logprobs - self.old_logprobs)[self.mask].double().exp().numpy()


class ReplayTrainer(ReplayMixin, GRPOTrainer):
    """Records the micro-batches."""

    scores_vocabulary = True
    """Whether to score each micro-batch over the vocabulary too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batches: list[MicroBatch] = []
        self._generated_at = -1

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._generated_at = self.state.global_step
        return super()._generate_and_score_completions(inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if kwargs.get("compute_entropy"):
            self._scored = scores[0].detach().clone()
        return scores

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        full = torch.full_like(self._scored, torch.nan)
        if self.scores_vocabulary:
            with torch.no_grad():
                full, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
                    self,
                    self.model,
                    torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                    torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                    inputs["completion_ids"].shape[1],
                )
        is_fresh = self.state.global_step == self._generated_at
        self.micro_batches.append(
            MicroBatch(
                "train" if self.model.training else "eval",
                is_fresh,
                self._scored,
                inputs["old_per_token_logps"],
                full,
                (inputs["completion_mask"] * inputs["tool_mask"]).bool(),
                inputs["candidate_sets"],
                inputs,
            )
        )
        return loss


class RecordedRollouts(SGLangRollouts):
    """Keeps what the engine answered."""

    def __init__(self, client: RolloutClient, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.rollouts: list[Rollout] = []

    def generate(self, prompt_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[Rollout]:
        rollouts = super().generate(prompt_ids, sampling_params)
        assert [each.prompt_ids.tolist() for each in rollouts] == prompt_ids
        self.rollouts += rollouts
        return rollouts


def share_of_even_ids(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
    return [float(np.mean(np.array(ids) % 2 == 0)) for ids in completion_ids]


def make_trainer(
    model_path: Path,
    rollout_func: Callable[..., Any] | None,
    output: Path,
    *,
    trainer_class: type = ReplayTrainer,
    prompts: Sequence[Any] = PROMPTS,
    arguments: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Make a trainer of 2 steps of one generation each: 2 prompts, 4 samples of up to 12 tokens."""
    settings: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 2e-4,  # at 2e-3, some samples let the policy collapse to one token
        "lr_scheduler_type": "constant",
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "top_p": 0.8,
        "temperature": 1.0,
        "dataloader_pin_memory": False,
    }
    torch.manual_seed(0)
    given = {
        "model": str(model_path),
        "reward_funcs": share_of_even_ids,
        "args": GRPOConfig(str(output), **(settings | config)),
        "train_dataset": Dataset.from_dict({"prompt": list(prompts)}),
        "processing_class": AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        "rollout_func": rollout_func,
    }
    return trainer_class(**(given | (arguments or {})))


def check_ratios(
    micro_batches: Sequence[MicroBatch], *, of_mean: float = 1e-4, of_token: float = 1e-3
) -> None:
    """Check that every micro-batch before a generation's first optimizer step has ratios of 1."""
    fresh = [each for each in micro_batches if each.is_fresh and each.mask.any()]
    assert fresh
    for each in fresh:
        # Sets with a choice: without any, the ratio would be 1 whatever the trainer does.
        assert np.mean(np.concatenate([sets.sizes for sets in each.sets]) > 1) > 0.5
        assert abs(each.ratios.mean() - 1) < of_mean
        assert np.abs(each.ratios - 1).max() < of_token
