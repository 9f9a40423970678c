"""Train a small policy with and without replay, and measure its gradients' bias, its reward, and its KL.

The policy is a small network that predicts the next token from the last token alone. The generated tokens
form a Markov chain with few states, so dynamic programming computes the exact expected reward and the exact
gradient of this reward. The script also estimates gradients from samples, and compares these estimates with
the exact gradients. Candidate sets and scores come from `sglang_topp`.

The script trains the policy with four losses (`WAYS`). Each loss has an importance ratio exp(new - old):
`new` is a token's log-prob under the current policy, and `old` is its log-prob when it was sampled. Each loss
normalizes `new` and `old` over the candidate sets or over the vocabulary. M is the total probability of a
token's candidate set. The last column is the ratio before the first optimizer step of a batch, when new and
old log-probs come from the same policy::

    loss          new log-probs         old log-probs         first ratio
    replay        over the sets         over the sets         1
    without       over the vocabulary   over the sets         M
    uncorrected   over the vocabulary   over the vocabulary   1
    truncated IS  over the vocabulary   over the vocabulary   1

"truncated IS" also multiplies each token's loss by min(p / q, 2). p and q are the token's probabilities in
the rollout: p under the policy, and q under the sampler.

Run the script in one of these ways::

    python examples/bias.py                     # minutes on two cores; prints a table
    python examples/bias.py --short             # seconds
    python examples/bias.py --plot bias.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sglang_topp import CandidateSets
from sglang_topp.nucleus import top_p_candidates
from sglang_topp.replay import replayed_old_logprobs, score_logits

WAYS = ("replay", "without", "uncorrected", "truncated IS")
VOCAB, LENGTH = 48, 24
CLIP, LARGEST_WEIGHT = 0.2, 2.0
MINI_BATCHES = 4  # optimizer steps per batch of rollouts; the ratios change after the first step


@dataclass(frozen=True)
class Rollouts:
    """N trajectories of T tokens: the state before each token, each token, and one reward per trajectory."""

    states_NT: Tensor
    targets_NT: Tensor
    rewards_N: Tensor


class Task:
    """The rewards in [0, 1] for every pair of a token and the next token. Most of the rewards are low."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.reward_VV = torch.rand(VOCAB, VOCAB, generator=generator) ** 4

    def exact_reward(self, transitions_VV: Tensor) -> Tensor:
        """Return the exact expected reward per token of a Markov chain that starts at token 0."""
        state_V = torch.zeros(VOCAB)
        state_V[0] = 1
        total = torch.zeros(())
        for _ in range(LENGTH):
            total = total + (state_V[:, None] * transitions_VV * self.reward_VV).sum()
            state_V = state_V @ transitions_VV
        return total / LENGTH

    def visits(self, transitions_VV: Tensor) -> Tensor:
        """Return [V]: for each token, the expected share of a trajectory's steps that start at this token."""
        state_V = torch.zeros(VOCAB)
        state_V[0] = 1
        total_V = torch.zeros(VOCAB)
        for _ in range(LENGTH):
            total_V += state_V / LENGTH
            state_V = state_V @ transitions_VV
        return total_V


def make_policy(seed: int) -> nn.Module:
    """Return a network that maps states [B] to logits [B, V], as peaked as a language model's logits."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, VOCAB))
    with torch.no_grad():
        policy[-1].weight *= 5
    return policy


def all_logits(policy: nn.Module) -> Tensor:
    """Return the logits [V, V] of the next token (column) after each token (row)."""
    return policy(torch.arange(VOCAB))


def nucleus_mask(logits_VV: Tensor, top_p: float) -> Tensor:
    """Return bool [V, V]: whether the sampler may draw a token (column) after another token (row)."""
    token_ids, _, offsets = top_p_candidates(torch.log_softmax(logits_VV.detach(), 1), top_p)
    mask_VV = torch.zeros(VOCAB, VOCAB, dtype=torch.bool)
    mask_VV[torch.repeat_interleave(offsets.diff()), token_ids.long()] = True
    return mask_VV


def sampler(logits_VV: Tensor, mask_VV: Tensor) -> Tensor:
    """Return the probabilities [V, V] from which the sampler draws, differentiable in the logits."""
    return logits_VV.masked_fill(~mask_VV, -torch.inf).softmax(1)


@torch.no_grad()
def roll_out(task: Task, policy: nn.Module, top_p: float, num: int, generator: torch.Generator) -> Rollouts:
    """Sample trajectories from the policy at `top_p`."""
    logits_VV = all_logits(policy)
    probabilities_VV = sampler(logits_VV, nucleus_mask(logits_VV, top_p))
    state_N = torch.zeros(num, dtype=torch.int64)
    states, targets = [], []
    for _ in range(LENGTH):
        next_N = torch.multinomial(probabilities_VV[state_N], 1, generator=generator)[:, 0]
        states.append(state_N)
        targets.append(next_N)
        state_N = next_N
    states_NT, targets_NT = torch.stack(states, 1), torch.stack(targets, 1)
    return Rollouts(states_NT, targets_NT, task.reward_VV[states_NT, targets_NT].mean(1))


@torch.no_grad()
def candidate_sets(policy: nn.Module, rollouts: Rollouts, top_p: float) -> CandidateSets:
    """Return the candidate set of each token, as the engine would report the set."""
    logprobs_VV = torch.log_softmax(all_logits(policy), 1)
    targets = rollouts.targets_NT.flatten()
    arrays = top_p_candidates(logprobs_VV[rollouts.states_NT.flatten()], top_p, targets)
    return CandidateSets(*(array.numpy() for array in arrays), targets.int().numpy())


def loss(way: str, logits_TV: Tensor, targets_T: Tensor, sets: CandidateSets, advantage_T: Tensor) -> Tensor:
    """Return PPO's clipped loss, averaged over tokens. `way` is one of the four losses in `WAYS`."""
    drawn_with_T = replayed_old_logprobs(sets, output_ids=targets_T)
    reported_T = torch.from_numpy(sets.sampled_logprobs.copy())
    new_T = score_logits(logits_TV, targets_T, sets if way == "replay" else None).logprobs
    ratio_T = (new_T - (drawn_with_T if way in ("replay", "without") else reported_T)).exp()
    gain_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantage_T)
    if way == "truncated IS":
        gain_T = gain_T * (reported_T - drawn_with_T).exp().clamp(max=LARGEST_WEIGHT)
    return -gain_T.mean()


def gradient(value: Tensor, policy: nn.Module) -> Tensor:
    """Return the gradient of `value` with respect to all parameters of the policy, as one vector."""
    parts = torch.autograd.grad(value, list(policy.parameters()))
    return torch.cat([part.flatten() for part in parts])


def gradient_cosines(
    task: Task, policy: nn.Module, top_p: float, num: int, generator: torch.Generator
) -> dict[str, dict[str, float]]:
    """Return, for each loss in `WAYS`, the cosines of its negative gradient with two exact gradients.

    All four losses use the same trajectories, `num` in all. The result maps the name of each loss to two
    cosines, with the keys `sampled` and `policy`. The cosine `sampled` compares the loss's negative gradient
    with the gradient of the sampler's expected reward. The gradient of the sampler's expected reward treats
    the current candidate sets as constants. The cosine `policy` compares the loss's negative gradient with
    the gradient of the expected reward at top-p 1.
    """
    logits_VV = all_logits(policy)
    mask_VV = nucleus_mask(logits_VV, top_p)
    everything = torch.ones_like(mask_VV)
    exact = {
        "sampled": gradient(task.exact_reward(sampler(logits_VV, mask_VV)), policy),
        "policy": gradient(task.exact_reward(sampler(all_logits(policy), everything)), policy),
    }
    rollouts = roll_out(task, policy, top_p, num, generator)
    sets = candidate_sets(policy, rollouts, top_p)
    advantage_NT = (rollouts.rewards_N - rollouts.rewards_N.mean())[:, None].expand(-1, LENGTH)
    cosines: dict[str, dict[str, float]] = {}
    for way in WAYS:
        logits_TV = all_logits(policy)[rollouts.states_NT.flatten()]
        estimate = -gradient(
            loss(way, logits_TV, rollouts.targets_NT.flatten(), sets, advantage_NT.flatten()), policy
        )
        cosines[way] = {
            name: float(torch.cosine_similarity(estimate, other, dim=0)) for name, other in exact.items()
        }
    return cosines


@torch.no_grad()
def measure(task: Task, policy: nn.Module, first_VV: Tensor, top_p: float) -> dict[str, float]:
    """Return the exact reward at `top_p` and at top-p 1, two KLs in nats per token, and the mean set size.

    `kl_sampler_to_policy` is KL(sampler || policy). `kl_to_first_policy` is KL(policy || first policy). Both
    KLs and the set size are averages over states, weighted by how often the sampler visits each state.
    """
    logits_VV = all_logits(policy)
    mask_VV = nucleus_mask(logits_VV, top_p)
    transitions_VV, logprobs_VV = sampler(logits_VV, mask_VV), torch.log_softmax(logits_VV, 1)
    visits_V = task.visits(transitions_VV)
    kept_V = (logprobs_VV.exp() * mask_VV).sum(1)
    from_first_V = (logprobs_VV.exp() * (logprobs_VV - torch.log_softmax(first_VV, 1))).sum(1)
    return {
        "reward": float(task.exact_reward(transitions_VV)),
        "reward_at_top_p_1": float(task.exact_reward(logprobs_VV.exp())),
        "kl_sampler_to_policy": float(-(visits_V * kept_V.log()).sum()),
        "kl_to_first_policy": float((visits_V * from_first_V).sum()),
        "candidates": float((visits_V * mask_VV.sum(1)).sum()),
    }


def train(
    way: str, top_p: float, seed: int, *, steps: int, trajectories: int
) -> Iterator[tuple[nn.Module, dict[str, float]]]:
    """Yield the policy and the result of `measure` before each training step, and after the last step."""
    task, policy = Task(seed), make_policy(seed)
    first_VV = all_logits(policy).detach()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    for _ in range(steps):
        yield policy, measure(task, policy, first_VV, top_p)
        rollouts = roll_out(task, policy, top_p, trajectories, generator)
        sets = candidate_sets(policy, rollouts, top_p)
        rewards_N = rollouts.rewards_N
        advantage_NT = ((rewards_N - rewards_N.mean()) / (rewards_N.std() + 1e-6))[:, None].expand(-1, LENGTH)
        rows = trajectories // MINI_BATCHES
        for start in range(0, trajectories, rows):
            part, tokens = slice(start, start + rows), slice(start * LENGTH, (start + rows) * LENGTH)
            optimizer.zero_grad()
            logits_TV = all_logits(policy)[rollouts.states_NT[part].flatten()]
            targets_T = rollouts.targets_NT[part].flatten()
            loss(way, logits_TV, targets_T, sets[tokens], advantage_NT[part].flatten()).backward()
            optimizer.step()
    yield policy, measure(task, policy, first_VV, top_p)


def run(
    top_ps: Sequence[float], seeds: Sequence[int], *, steps: int, trajectories: int, estimates: int
) -> dict[str, Any]:
    """Train a policy for each loss, threshold, and seed. Return the training curves and the gradient cosines.

    Only the training runs with the loss "replay" measure the cosines, at four steps of each run.
    """
    curves: list[dict[str, Any]] = []
    cosines: list[dict[str, Any]] = []
    for top_p in top_ps:
        for seed in seeds:
            for way in WAYS:
                history = []
                for step, (policy, measures) in enumerate(
                    train(way, top_p, seed, steps=steps, trajectories=trajectories)
                ):
                    history.append(measures)
                    if way == "replay" and step in (0, steps // 10, steps // 3, steps):
                        at = gradient_cosines(
                            Task(seed), policy, top_p, estimates, torch.Generator().manual_seed(1000 + seed)
                        )
                        cosines.append({"top_p": top_p, "seed": seed, "step": step, "cosines": at})
                curves.append({"top_p": top_p, "seed": seed, "way": way, "history": history})
    return {"steps": steps, "curves": curves, "cosines": cosines}


def main() -> int:
    """Run the example, print the tables, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one seed and a few steps")
    parser.add_argument("--steps", type=int, default=100, help="training steps (%(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file (needs matplotlib)")
    args = parser.parse_args()
    if args.short:
        results = run((0.8,), (0,), steps=24, trajectories=64, estimates=4096)
    else:
        results = run((0.8, 0.95), (0, 1, 2), steps=args.steps, trajectories=128, estimates=16384)
    show(results)
    if args.json is not None:
        args.json.write_text(json.dumps(results) + "\n")
    if args.plot is not None:
        plot(results, args.plot)
    return 0


def show(results: dict[str, Any]) -> None:
    """Print the cosines and measures, averaged over the seeds, with the range of each measure."""
    print("cosine of the expected gradient with the exact one: of the sampled reward | of the policy's")
    print(f"{'top-p':>6}{'step':>6}  " + "".join(f"{way:>18}" for way in WAYS))
    for top_p, step in sorted({(each["top_p"], each["step"]) for each in results["cosines"]}):
        chosen = [
            each["cosines"] for each in results["cosines"] if (each["top_p"], each["step"]) == (top_p, step)
        ]
        cells = [
            f"{np.mean([c[way]['sampled'] for c in chosen]):.3f} | "
            f"{np.mean([c[way]['policy'] for c in chosen]):.3f}"
            for way in WAYS
        ]
        print(f"{top_p:>6}{step:>6}  " + "".join(f"{cell:>18}" for cell in cells))
    names = ("reward", "reward_at_top_p_1", "kl_sampler_to_policy", "kl_to_first_policy", "candidates")
    for top_p in sorted({curve["top_p"] for curve in results["curves"]}):
        print(f"\nafter {results['steps']} steps at top-p {top_p}")
        print(f"{'':<14}" + "".join(f"{name:>26}" for name in names))
        for way in ("before", *WAYS):
            histories = [
                curve["history"]
                for curve in results["curves"]
                if curve["top_p"] == top_p and curve["way"] == (WAYS[0] if way == "before" else way)
            ]
            values = [
                [history[0 if way == "before" else -1][name] for history in histories] for name in names
            ]
            cells = [f"{np.mean(v):.3f} ({min(v):.3f} .. {max(v):.3f})" for v in values]
            print(f"{way:<14}" + "".join(f"{cell:>26}" for cell in cells))


def plot(results: dict[str, Any], path: Path) -> None:
    """Plot the reward and KL(sampler || policy) over the steps, with one line per loss and seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    top_ps = sorted({curve["top_p"] for curve in results["curves"]})
    figure, axes = plt.subplots(2, len(top_ps), figsize=(5 * len(top_ps), 6), sharex=True, squeeze=False)
    for column, top_p in enumerate(top_ps):
        for row, (name, label) in enumerate(
            [("reward", "exact reward per token"), ("kl_sampler_to_policy", "KL(sampler || policy), nats")]
        ):
            ax = axes[row, column]
            for index, way in enumerate(WAYS):
                for curve in results["curves"]:
                    if (curve["top_p"], curve["way"]) == (top_p, way):
                        values = [measures[name] for measures in curve["history"]]
                        named = {"label": way} if curve["seed"] == 0 else {}
                        ax.plot(values, color=f"C{index}", alpha=0.8, linewidth=1.2, **named)
            ax.set_ylabel(label)
            ax.set_title(f"top-p {top_p}")
    axes[0, 0].legend()
    for ax in axes[-1]:
        ax.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
