"""A GRPO loss (PPO's clipped ratio, advantages within groups) with and without replay.

`grpo_loss` is the part to copy. Run the file to train a toy policy on tokens that it samples with top-p. With
replay, the loss scores the policy over the candidate sets from which the sampler drew, so the first step's
importance ratios are 1. Without replay, the loss scores the policy over the whole vocabulary, so the ratios
are biased.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.nucleus import top_p_candidates
from sglang_topp.replay import (
    Layout,
    ReplayMetrics,
    replay_metrics,
    replayed_old_logprobs,
    score,
)


class Sample(NamedTuple):
    """The attributes of a `sglang_topp_client.Rollout` that the loss reads."""

    prompt_ids: np.ndarray
    output_ids: np.ndarray
    candidates: CandidateSets


def group_advantages(rewards_BG: Tensor) -> Tensor:
    """Center and scale rewards [B, G] within each prompt's group of G samples."""
    centered = rewards_BG - rewards_BG.mean(dim=1, keepdim=True)
    return centered / (rewards_BG.std(dim=1, keepdim=True) + 1e-6)


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    samples: Sequence[Sample],
    advantages: Tensor,
    *,
    layout: Layout,
    temperature: float = 1.0,
    loss_mask: Tensor | None = None,
    replay: bool = True,
    clip: float = 0.2,
    entropy_bonus: float = 0.0,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, ReplayMetrics]:
    """Return the mean clipped policy-gradient loss over tokens, and the replay metrics.

    The loss of a token is `-min(ratio * A, clip(ratio, 1 - clip, 1 + clip) * A) - entropy_bonus * H`. `A` is
    the advantage of the token's sample, and `H` is the policy's entropy at the token.

    `hidden` holds this rank's final hidden states in `layout`, and `weight` is the LM head's weight.
    `advantages` has one number per sample, and `loss_mask` has one entry per response token. If `loss_mask`
    is None, every token with a candidate set contributes to the loss. Tool tokens have no candidate set, so
    they do not contribute to the loss. The replay metrics are computed over this rank's tokens only.
    """
    lengths = [len(sample.output_ids) for sample in samples]
    recorded = [sample.candidates for sample in samples]
    if loss_mask is None:
        loss_mask = torch.from_numpy(CandidateSets.concat(recorded).sizes > 0)
    prompts = [len(sample.prompt_ids) for sample in samples]
    rows = layout.select_rows(prompts, lengths, loss_mask=loss_mask)
    sets = rows.take_sets(recorded)
    output_ids = np.concatenate([sample.output_ids for sample in samples])
    targets = rows.take(torch.tensor(output_ids, dtype=torch.int64, device=hidden.device))
    picked = rows.select(hidden)
    old = replayed_old_logprobs(sets, output_ids=targets).to(hidden.device)
    over = sets if replay else None
    new = score(picked, weight, targets, over, temperature=temperature, entropy=True)
    assert new.entropy is not None

    per_sample = torch.tensor(lengths, device=hidden.device)
    advantage = rows.take(advantages.to(hidden.device).repeat_interleave(per_sample))
    # If the sampler's probability of a token is 0, the token's ratio is infinite, and the token's gradient
    # would be NaN. `clamp(-20, 20)` prevents the NaN, but PPO's clip would not.
    ratio = (new.logprobs - old).clamp(-20, 20).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    per_token = -gain - entropy_bonus * new.entropy
    # `scatter` collects the values of all context-parallel ranks. Every rank divides the same sum by the same
    # number of scored tokens, so all ranks get the same loss.
    loss = rows.scatter(per_token, cp_group).sum() / max(1, int(rows.scored.sum()))
    return loss, replay_metrics(new.logprobs, old, sets)


# -- a toy policy ----------------------------------------------------------------------------------------

VOCAB, WIDTH, PROMPT, RESPONSE, PROMPTS, GROUP = 64, 16, 3, 12, 4, 8


def rollout(hidden_BTH: Tensor, weight: Tensor, p: float, rng: np.random.Generator) -> list[Sample]:
    """Draw every response token from its candidate set, as SGLang's sampler does."""
    samples = []
    for hidden_TH in hidden_BTH[:, PROMPT - 1 : -1]:
        logprobs_TV = torch.log_softmax(hidden_TH @ weight.t(), dim=1)
        ids, logprobs, offsets = (x.numpy() for x in top_p_candidates(logprobs_TV, p))
        spans = [slice(start, stop) for start, stop in pairwise(offsets)]
        masses = [np.exp(logprobs[span], dtype=np.float64) for span in spans]
        drawn = [rng.choice(ids[span], p=mass / mass.sum()) for span, mass in zip(spans, masses, strict=True)]
        output_ids = np.array(drawn, np.int32)
        samples.append(
            Sample(np.zeros(PROMPT, np.int32), output_ids, CandidateSets(ids, logprobs, offsets, output_ids))
        )
    return samples


def reward(samples: Sequence[Sample]) -> Tensor:
    """Return the share of even token ids in each sample, [PROMPTS, GROUP]."""
    return torch.tensor([np.mean(s.output_ids % 2 == 0) for s in samples]).reshape(PROMPTS, GROUP)


def train(*, replay: bool, steps: int = 20, p: float = 0.8) -> list[dict[str, float]]:
    """Train the toy policy's head, and return the mean reward, the loss, and the replay metrics of each step.

    The reward, the loss, and the metrics of a step describe the policy before the step's optimizer update.
    """
    torch_rng, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    hidden = torch.randn(PROMPTS, 1, PROMPT + RESPONSE, WIDTH, generator=torch_rng).expand(-1, GROUP, -1, -1)
    hidden = hidden.reshape(PROMPTS * GROUP, PROMPT + RESPONSE, WIDTH)
    weight = (0.5 * torch.randn(VOCAB, WIDTH, generator=torch_rng)).requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=0.02)
    history = []
    for _ in range(steps):
        samples = rollout(hidden, weight.detach(), p, rng)
        rewards = reward(samples)
        loss, metrics = grpo_loss(
            hidden,
            weight,
            samples,
            group_advantages(rewards).flatten(),
            layout=Layout(attention_mask=torch.ones(PROMPTS * GROUP, PROMPT + RESPONSE)),  # no padding
            replay=replay,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append({"reward": float(rewards.mean()), "loss": float(loss.detach())} | metrics.summary())
    return history


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--top-p", type=float, default=0.8, help="threshold of the sampler (%(default)s)")
    arguments = parser.parse_args()
    for replay in (True, False):
        history = train(replay=replay, steps=arguments.steps, p=arguments.top_p)
        first, last = history[0], history[-1]
        print(
            f"{'with' if replay else 'without'} replay: first step's ratio {first['replay/ratio_mean']:.4f}"
            f" ({first['replay/ratio_off_by_10_percent_share']:.1%} of tokens off by over 10 %),"
            f" reward {first['reward']:.3f} -> {last['reward']:.3f}"
        )


if __name__ == "__main__":
    main()
