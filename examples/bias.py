"""Train with GRPO on the real engine: with replay, without, and with truncated importance sampling alone.

The task is to close brackets. Ten letters open them, and capitals close them, as in "c a A b d D B C". A
small transformer learns from right texts, until some of the texts that it writes are right. GRPO then rewards
each text that closes every bracket and has the right length. The real SGLang samples at top-p, and the
candidate sets and the scores come from `sglang_topp`. Every batch of rollouts gets several optimizer steps of
PPO's clipped loss. The three losses (`WAYS`) have an importance ratio exp(new - old). M is the kept mass, the
total probability of a token's candidate set::

    loss          new log-probs         old log-probs         ratio before the first step of a batch
    replay        over the sets         over the sets         1
    without       over the vocabulary   over the sets         M
    truncated IS  over the vocabulary   over the vocabulary   1

"truncated IS" also multiplies each token's loss by min(p / q, 2). p and q are the token's probabilities in
the rollout: p under the policy, and q under the sampler. TRL applies this weight only to rollouts of vLLM, so
the example calls the functions on which the adapter for TRL stands, in a loop of its own.

    python examples/bias.py --results bias.json --plot bias.png     # 45 runs, 20 minutes
    python examples/bias.py --top-p 0.9 --seeds 2 --steps 20        # a short look

A command that was interrupted continues from its file of results. docs/explanation/training-bias.md shows
those of the first one, and of 200 steps at top-p 0.7.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollout_loop import serve
from scipy import stats
from tiny_model import make_trained_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from sglang_topp import CandidateSets
from sglang_topp.replay import replayed_old_logprobs, score
from sglang_topp_client import Rollout, RolloutClient

WAYS = ("replay", "without", "truncated IS")
KINDS = tuple("abcdefghij")
PAIRS, OPENED = 8, 3  # the brackets of a text, and how many of them the prompt opens
PROMPTS, GROUP = 8, 8  # per batch of rollouts: prompts, and samples of each
UPDATES = 4  # optimizer steps per batch of rollouts, each on a quarter of it
HIDDEN_SIZE, TRAINING_STEPS = 256, 200  # of the policy that all runs start from: 1.3 million parameters
CLIP, LARGEST_WEIGHT, LEARNING_RATE = 0.2, 2.0, 2e-5


# -- the task --------------------------------------------------------------------------------------


def random_prompt(rng: random.Random) -> str:
    """Return a text that opens `OPENED` brackets, such as "c a b"."""
    return " ".join(rng.choices(KINDS, k=OPENED))


def right_texts(count: int) -> list[str]:
    """Return random texts for which `is_right` holds."""
    rng, texts = random.Random(0), []
    for _ in range(count):
        text = random_prompt(rng).split()
        opened, num_opened = list(text), OPENED
        while opened or num_opened < PAIRS:
            if num_opened < PAIRS and (not opened or rng.random() < 0.5):
                opened.append(rng.choice(KINDS))
                text.append(opened[-1])
                num_opened += 1
            else:
                text.append(opened.pop().upper())
        texts.append(" ".join(text))
    return texts


def is_right(text: str) -> bool:
    """Return whether the text has `PAIRS` pairs of brackets, and closes what was opened last first."""
    opened: list[str] = []
    for bracket in text.split():
        if bracket in KINDS:
            opened.append(bracket)
        elif not opened or bracket != opened.pop().upper():
            return False
    return not opened and len(text.split()) == 2 * PAIRS


def roll_out(client: RolloutClient, prompts: Sequence[str], top_p: float, *, sets: bool) -> list[Rollout]:
    """Sample `GROUP` continuations of each prompt."""
    return client.generate(
        prompts,
        {"top_p": top_p, "temperature": 1.0, "n": GROUP, "max_new_tokens": 2 * PAIRS},
        top_logprobs_source="sampler" if sets else None,
    )


def rewards_of(rollouts: Sequence[Rollout], prompts: Sequence[str]) -> Tensor:
    """Return [prompts, GROUP]: 1 for each text that is right, else 0."""
    right = [is_right(prompts[rollout.prompt_index] + rollout.text) for rollout in rollouts]
    return torch.tensor(right, dtype=torch.float32).reshape(-1, GROUP)


# -- the losses ------------------------------------------------------------------------------------


def hidden_states(policy: PreTrainedModel, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Return the state before each generated token [T, H], and the token ids [T], rollout after rollout."""
    ids = [np.concatenate([rollout.prompt_ids, rollout.output_ids]) for rollout in rollouts]
    rows = [torch.from_numpy(each).long() for each in ids]
    starts = torch.tensor([len(rollout.prompt_ids) for rollout in rollouts])[:, None]
    ends = torch.tensor([len(row) for row in rows])[:, None]
    ids_BS = pad_sequence(rows, batch_first=True)  # on the right, where no token of a row looks
    at_S = torch.arange(1, ids_BS.shape[1])
    generated_BS = (at_S >= starts) & (at_S < ends)
    return policy.model(ids_BS).last_hidden_state[:, :-1][generated_BS], ids_BS[:, 1:][generated_BS]


def loss(
    way: str, policy: PreTrainedModel, rollouts: Sequence[Rollout], advantages_B: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return PPO's clipped loss, averaged over tokens, its mean ratio, and the share of clipped tokens."""
    states_TH, targets_T = hidden_states(policy, rollouts)
    sets = CandidateSets.concat([rollout.candidates for rollout in rollouts])
    drawn_with_T = replayed_old_logprobs(sets, output_ids=targets_T)
    reported_T = torch.tensor(sets.sampled_logprobs)
    head = policy.lm_head.weight
    new_T = score(states_TH, head, targets_T, sets if way == "replay" else None).logprobs
    ratio_T = (new_T - (reported_T if way == "truncated IS" else drawn_with_T)).exp()
    advantage_T = advantages_B.repeat_interleave(torch.tensor([len(r.output_ids) for r in rollouts]))
    free_T, clipped_T = ratio_T * advantage_T, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantage_T
    gain_T = torch.minimum(free_T, clipped_T)
    if way == "truncated IS":
        gain_T = gain_T * (reported_T - drawn_with_T).exp().clamp(max=LARGEST_WEIGHT)
    measures = {"ratio": ratio_T.mean().item(), "clipped": (clipped_T < free_T).float().mean().item()}
    return -gain_T.mean(), measures


# -- one run ---------------------------------------------------------------------------------------


def train(
    client: RolloutClient, model_path: Path, way: str, top_p: float, seed: int, *, steps: int, estimates: int
) -> dict[str, Any]:
    """Train a policy for `steps` batches of rollouts, and return its history.

    All losses start from the same policy, so only the runs with replay measure `gradient_cosines`.
    """
    policy, start = (AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    rng = random.Random(seed)  # all ways train on the same prompts
    name = f"{way}, top-p {top_p}, seed {seed}"
    torch.manual_seed(seed)
    history, cosines = [], {}
    for step in range(steps + 1):
        client.push_weights(policy, version=f"{name}, step {step}")
        if way == "replay" and step == 0:
            cosines = gradient_cosines(client, policy, top_p, random.Random(1000 + seed), estimates)
        prompts = [random_prompt(rng) for _ in range(PROMPTS)]
        rollouts = roll_out(client, prompts, top_p, sets=True)
        assert {rollout.weight_version for rollout in rollouts} == {f"{name}, step {step}"}
        rewards = rewards_of(rollouts, prompts)
        measures = {"reward": rewards.mean().item()} | measure(policy, start, rollouts)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        updates = []
        for rows in torch.randperm(len(rollouts)).chunk(UPDATES):
            optimizer.zero_grad()
            value, of_update = loss(way, policy, [rollouts[i] for i in rows], advantages.flatten()[rows])
            updates.append(of_update)
            if step < steps:  # after the last step, the loss is only measured
                value.backward()
                optimizer.step()
        measures["first_ratio"] = updates[0]["ratio"]
        measures |= {name: float(np.mean([each[name] for each in updates])) for name in updates[0]}
        history.append({name: round(value, 5) for name, value in measures.items()})
    prompts = [random_prompt(rng) for _ in range(8 * PROMPTS)]
    at_top_p_1 = rewards_of(roll_out(client, prompts, 1.0, sets=False), prompts).mean().item()
    run = {"way": way, "top_p": top_p, "seed": seed, "history": history, "reward_at_top_p_1": at_top_p_1}
    return run | {"cosines": cosines}


@torch.no_grad()
def measure(policy: PreTrainedModel, start: PreTrainedModel, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over the generated tokens: entropy and KL in nats over the vocabulary, and the sets."""
    new_TV, start_TV = (
        torch.log_softmax(model.lm_head(hidden_states(model, rollouts)[0]), 1) for model in (policy, start)
    )
    sets = CandidateSets.concat([rollout.candidates for rollout in rollouts])
    return {
        "entropy": -(new_TV.exp() * new_TV).sum(1).mean().item(),
        "kl_to_start": (new_TV.exp() * (new_TV - start_TV)).sum(1).mean().item(),
        "candidates": float(sets.sizes.mean()),
        "kept_mass": float(np.exp(sets.log_kept_mass).mean()),
    }


def gradient_cosines(
    client: RolloutClient, policy: PreTrainedModel, top_p: float, rng: random.Random, num_prompts: int
) -> dict[str, float]:
    """Return, for each loss, the cosine of its first gradient with an unbiased one.

    The unbiased one is the gradient of the expected reward at `top_p`, in which the candidate sets are
    constants. Its estimate has its own rollouts, so noise keeps every cosine below 1.
    """
    prompts = [random_prompt(rng) for _ in range(num_prompts)]

    def batch() -> tuple[list[Rollout], Tensor]:
        rollouts = roll_out(client, prompts, top_p, sets=True)
        rewards = rewards_of(rollouts, prompts)
        return rollouts, (rewards - rewards.mean(1, keepdim=True)).flatten()

    def gradient(way: str, rollouts: Sequence[Rollout], advantages: Tensor) -> Tensor:
        value, _ = loss(way, policy, rollouts, advantages)
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, list(policy.parameters()))])

    unbiased, same = gradient("replay", *batch()), batch()
    return {way: torch.cosine_similarity(gradient(way, *same), unbiased, dim=0).item() for way in WAYS}


# -- all runs --------------------------------------------------------------------------------------


def main() -> int:
    """Run the example, print its table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--top-p", type=float, nargs="+", default=[0.7, 0.9, 0.95], help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="batches of rollouts per run (%(default)s)")
    parser.add_argument("--estimates", type=int, default=64, help="prompts per gradient (%(default)s)")
    parser.add_argument("--results", type=Path, help="write every run to this file, and continue from it")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file (needs matplotlib)")
    args = parser.parse_args()
    disable_progress_bar()
    lengths = {"steps": args.steps, "estimates": args.estimates}
    runs: list[dict[str, Any]] = []
    if args.results is not None and args.results.exists():
        runs = json.loads(args.results.read_text())
        if any(run | lengths != run for run in runs):
            parser.error(f"--results: the runs in {args.results} have another --steps or --estimates")
    kinds = [(way, top_p, seed) for seed in range(args.seeds) for top_p in args.top_p for way in WAYS]
    done = [(run["way"], run["top_p"], run["seed"]) for run in runs]
    if missing := [kind for kind in kinds if kind not in done]:
        with tempfile.TemporaryDirectory() as folder:
            model_path = make_trained_model(
                folder, right_texts(10_000), hidden_size=HIDDEN_SIZE, steps=TRAINING_STEPS
            )
            with serve(model_path) as (_, engine_url), RolloutClient(engine_url) as client:
                for kind in missing:
                    started = time.monotonic()
                    runs.append(train(client, model_path, *kind, **lengths) | lengths)
                    runs[-1]["seconds"] = round(time.monotonic() - started)
                    print(*kind, f"{runs[-1]['seconds']} s", file=sys.stderr, flush=True)
                    if args.results is not None:
                        unfinished = args.results.with_suffix(".tmp")
                        unfinished.write_text("[" + ",\n".join(map(json.dumps, runs)) + "]\n")
                        unfinished.replace(args.results)
    show(runs)
    if args.plot is not None:
        plot(runs, args.plot)
    return 0


def mean_and_band(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over the seeds, and half the width of its 95 % confidence interval (Student's t)."""
    if len(values) == 1:
        return values[0], float("nan")
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return float(np.mean(values)), float(half)


MEASURES = {  # that the picture shows
    "reward": "reward",
    "entropy": "entropy, nats",
    "kl_to_start": "KL to the start, nats",
    "clipped": "clipped tokens",
    "ratio": "mean ratio",
}
LAST = 10  # batches over which the table averages at the end of a run


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Print a Markdown table with a row for each top-p and loss: mean over the seeds, and its interval."""

    def over(name: str, part: slice) -> list[float]:
        return [float(np.mean([batch[name] for batch in run["history"][part]])) for run in chosen]

    columns = ["top-p", "loss", "reward, all batches", "reward at top-p 1", f"entropy, last {LAST}", "cosine"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for top_p, way in itertools.product(sorted({run["top_p"] for run in runs}), WAYS):
        chosen = [run for run in runs if (run["top_p"], run["way"]) == (top_p, way)]
        cosines = [run["cosines"][way] for run in runs if run["top_p"] == top_p and run["cosines"]]
        cells = [over("reward", slice(None)), [run["reward_at_top_p_1"] for run in chosen]]
        cells += [over("entropy", slice(-LAST, None)), cosines]
        pairs = [mean_and_band(cell) for cell in cells]
        shown = [f"{mean:.2f}" + ("" if np.isnan(half) else f" ± {half:.2f}") for mean, half in pairs]
        print(f"| {top_p} | {way} | {' | '.join(shown)} |")


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the measures over the batches, five at a time: the mean over the seeds, and its band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    top_ps = sorted({run["top_p"] for run in runs})
    shape = {"nrows": len(MEASURES), "ncols": len(top_ps), "figsize": (8, 9), "layout": "constrained"}
    figure, axes = plt.subplots(**shape, sharex=True, sharey="row", squeeze=False)
    for (row, name), (column, top_p) in itertools.product(enumerate(MEASURES), enumerate(top_ps)):
        ax = axes[row, column]
        for way, color in zip(WAYS, ("#0072b2", "#e69f00", "#009e73"), strict=True):
            chosen = [run["history"] for run in runs if (run["top_p"], run["way"]) == (top_p, way)]
            curves = np.array([[measures[name] for measures in history] for history in chosen])
            parts = np.array_split(np.arange(curves.shape[1]), -(-curves.shape[1] // 5))
            bands = [mean_and_band(curves[:, part].mean(1).tolist()) for part in parts]
            x, (means, halves) = [part.mean() for part in parts], np.array(bands).T
            ax.plot(x, means, color=color, label=way)
            ax.fill_between(x, means - halves, means + halves, color=color, alpha=0.2, lw=0)
        axes[row, 0].set_ylabel(MEASURES[name])
    for column, top_p in enumerate(top_ps):
        axes[0, column].set_title(f"top-p {top_p}")
        axes[-1, column].set_xlabel("batches of rollouts")
    axes[0, -1].legend()
    figure.savefig(path, dpi=92)  # 736 pixels, the width of the site's column


if __name__ == "__main__":
    sys.exit(main())
