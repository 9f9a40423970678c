"""Train on the real engine: roll out at top-p, score over the candidate sets, update, and push the weights.

The example runs the whole training cycle with every part of this project. The model is small and random, and
is created when the example starts. The reward of a sample is the share of its token ids that are even. The
policy learns to sample even ids, so the reward rises. Every step starts with importance ratios of 1.

    python examples/train.py                    # a minute to start SGLang, seconds per step
    python examples/train.py --without-replay   # score over the whole vocabulary: the ratios are biased
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rollout_loop import serve
from tiny_model import make_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from sglang_topp.batch import RLBatch, collate_rollouts, split_micro_batches
from sglang_topp.replay import (
    ReplayMetrics,
    replay_metrics,
    replayed_old_logprobs,
    score,
)
from sglang_topp_client import RolloutClient

PROMPTS = ["Once upon a time", "The answer is", "def main():", "Dear reader,"]
GROUP = 8  # the number of samples per prompt
MICRO_BATCH_TOKENS = 512
CLIP = 0.2


def train(
    model_path: Path,
    rollout_url: str,
    engine_url: str,
    *,
    steps: int,
    top_p: float = 0.8,
    replay: bool = True,
) -> list[dict[str, float]]:
    """Train the model that the engine serves, and return the mean reward and metrics of each step.

    The metrics of a step are computed before the step's weight update. At the end, the engine has the weights
    of the last step, and reports the weight version `str(steps)`.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampling = {"top_p": top_p, "temperature": 1.0, "n": GROUP, "max_new_tokens": 32, "ignore_eos": True}
    history = []
    with RolloutClient(rollout_url, engine_url=engine_url) as client:
        for step in range(steps):
            rollouts = client.generate(PROMPTS, sampling, top_logprobs_source="sampler")
            assert step == 0 or {rollout.weight_version for rollout in rollouts} == {str(step)}
            rewards = np.array([np.mean(rollout.output_ids % 2 == 0) for rollout in rollouts])
            optimizer.zero_grad()
            batch = collate_rollouts(rollouts, advantages(rewards), pad_token_id=0)
            metrics = accumulate(model, batch, replay=replay)
            optimizer.step()
            client.push_weights(model, version=str(step + 1))
            history.append({"reward": float(rewards.mean())} | metrics.summary())
    return history


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Center and scale rewards [B] within each prompt's group; the samples of a prompt are adjacent."""
    grouped = rewards.reshape(-1, GROUP)
    centered = grouped - grouped.mean(1, keepdims=True)
    return (centered / (grouped.std(1, keepdims=True) + 1e-6)).ravel()


def accumulate(model: PreTrainedModel, batch: RLBatch, *, replay: bool) -> ReplayMetrics:
    """Add up the gradients of the micro-batches' losses, and return the metrics of the whole batch."""
    num_tokens = int(batch["response_mask"].sum())
    plan = split_micro_batches(batch["attention_mask"].sum(1), MICRO_BATCH_TOKENS)
    metrics = ReplayMetrics()
    for micro in plan.of(batch, rank=0):
        loss, micro_metrics = loss_sum(model, micro, replay=replay)
        (loss / num_tokens).backward()
        metrics += micro_metrics
    return metrics


def loss_sum(model: PreTrainedModel, batch: RLBatch, *, replay: bool) -> tuple[Tensor, ReplayMetrics]:
    """Return the sum of PPO's clipped loss over tokens, and the metrics of the batch."""
    attention_mask = batch["attention_mask"]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(batch["sequences"], attention_mask, positions).last_hidden_state

    # The state before a token predicts it. `scored` selects the response tokens row by row,
    # which is the order of the sets.
    scored = batch["response_mask"].bool()
    width = scored.shape[1]
    states = hidden[:, -width - 1 : -1][scored]
    targets = batch["sequences"][:, -width:][scored]
    sets, weight = batch["candidates"].sets, model.lm_head.weight
    new = score(states, weight, targets, sets).logprobs
    old = replayed_old_logprobs(sets, output_ids=targets)  # as in batch["logprobs"], which is padded
    if not replay:
        new = score(states, weight, targets).logprobs

    # If the rollout gave a token zero probability, the token's ratio is infinite. Without the clamp, an
    # infinite ratio would make the gradient NaN.
    advantage, ratio = batch["rewards"][scored], (new - old).clamp(-20, 20).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -gain.sum(), replay_metrics(new, old, sets)


def main() -> int:
    """Run the example. Return 0 if the reward rose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="training steps (%(default)s)")
    parser.add_argument("--top-p", type=float, default=0.8, help="threshold of the sampler (%(default)s)")
    parser.add_argument("--without-replay", action="store_true", help="score over the whole vocabulary")
    args = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_tiny_model(folder)
        with serve(model_path) as urls:
            history = train(
                model_path, *urls, steps=args.steps, top_p=args.top_p, replay=not args.without_replay
            )
    print(f"{'step':>4}{'reward':>9}{'mean ratio':>13}{'off by over 10 %':>19}")
    for step, row in enumerate(history):
        ratio, off = row["replay/ratio_mean"], row["replay/ratio_off_by_10_percent_share"]
        print(f"{step:>4}{row['reward']:>9.3f}{ratio:>13.4f}{off:>19.1%}")
    return 0 if history[-1]["reward"] > history[0]["reward"] else 1


if __name__ == "__main__":
    sys.exit(main())
