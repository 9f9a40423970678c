"""Roll out at top-p, score the same tokens again, and compare the importance ratios without and with replay.

The example first trains a small model on simple English. The real SGLang serves it, the client decodes the
candidate sets, and a transformers forward pass acts as the trainer. Both use the same weights, so correct
importance ratios are 1. With replay, they are 1 up to rounding. Without replay, each ratio is the total
probability of its token's set.

    python examples/rollout_loop.py            # about two minutes, mostly the start of SGLang
    python examples/rollout_loop.py --help
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tiny_model import make_trained_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_client.wire.records import to_frame

PROMPTS = [
    "The cat sat on the",
    "What is the capital of France? The answer is",
    "Once upon a time",
    "One fox",
]
OFF = 0.1  # the output calls a ratio "off" if it differs from 1 by more than this value
TOLERANCE = 1e-3  # SGLang and transformers round float32 values differently


def main() -> int:
    """Run the demo, and return the exit status.

    The status is 0 if every importance ratio over the candidate sets is 1 within `TOLERANCE`, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--top-p", type=float, default=0.8, help="threshold of the sampler (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="per prompt (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per sample (%(default)s)")
    parser.add_argument("--model-path", type=Path, help="your own model, instead of the trained one")
    args = parser.parse_args()

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model_path = args.model_path or make_trained_model(folder)
        with serve(model_path) as (sidecar_url, _), RolloutClient(sidecar_url) as client:
            ready = time.monotonic()
            # -- a trainer makes this call in every step -----------------------------------------------
            rollouts = client.generate(
                PROMPTS,
                {"top_p": args.top_p, "temperature": 1.0, "n": args.samples, "ignore_eos": True}
                | {"max_new_tokens": args.max_new_tokens},
                top_logprobs_source="sampler",  # request the sets that the sampler drew from
            )
        rolled_out = time.monotonic()
        trainer = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        scores = [score(trainer, rollout) for rollout in rollouts]
        tokenizer = Tokenizer.from_file(str(Path(model_path, "tokenizer.json")))

    # `masked_logprobs` holds each generated token's log-prob, renormalized over the set that the sampler drew
    # from.
    behavior = np.concatenate([rollout.masked_logprobs for rollout in rollouts])
    without = np.exp(np.concatenate([full for full, _ in scores]) - behavior)
    replayed = np.exp(np.concatenate([masked for _, masked in scores]) - behavior)

    for prompt, rollout in zip(PROMPTS[:2], rollouts[:: args.samples], strict=False):
        show_positions(prompt, rollout, tokenizer, count=6)
    show_sizes(rollouts)
    print(f"\nimportance ratios over {len(behavior)} tokens, top-p {args.top_p}")
    print(f"{'':<28}{'mean':>8}{'off by over 10 %':>20}")
    for label, ratios in (("over the whole vocabulary", without), ("over the candidate sets", replayed)):
        print(f"{label:<28}{ratios.mean():>8.4f}{np.mean(np.abs(ratios - 1) > OFF):>20.1%}")
    print(
        f"\n{ready - started:.0f} s to make and serve the model, {rolled_out - ready:.1f} s to roll out,"
        f" {time.monotonic() - started:.0f} s in all"
    )
    worst = float(np.abs(replayed - 1).max())
    if not worst < TOLERANCE:
        print(f"FAILED: a replayed ratio is off by {worst:.2g}, expected less than {TOLERANCE}")
        return 1
    return 0


@contextmanager
def serve(model_path: Path) -> Iterator[tuple[str, str]]:
    """Run the patched SGLang and its sidecar on free ports, and yield the sidecar's and the engine's URL.

    From now on, a plain `kill` raises SystemExit in this process, so it ends the servers, too.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "serve", "--model-path", str(model_path)]
    command += ["--port", "0", "--engine-port", "0"]
    command += ["--", "--dtype", "float32", "--max-total-tokens", "16384", "--mem-fraction-static", "0.2"]
    command.append("--sleep-on-idle")  # without this option, an idle engine takes a core from the trainer
    env = dict(os.environ)
    if not torch.accelerator.is_available():
        env.setdefault("SGLANG_PLATFORM", "sglang_topp_cpu")  # by default, SGLang needs an accelerator
    with (model_path / "server.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        try:
            assert process.stdout is not None
            # The server prints one line to standard output: "… is ready: sidecar URL engine URL".
            words = process.stdout.readline().split()
            if "sidecar" not in words:
                log.seek(0)
                raise SystemExit(f"{log.read()[-4000:]}\nthe server did not start")
            yield words[words.index("sidecar") + 1], words[words.index("engine") + 1]
        finally:
            process.terminate()
            process.communicate()


@torch.no_grad()
def score(model: PreTrainedModel, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Return two log-probs of each generated token: over the whole vocabulary, and over its candidate set."""
    candidates = rollout.candidates
    assert candidates is not None
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.output_ids])).long()
    logits = model(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    sampled = logprobs.gather(1, ids[len(rollout.prompt_ids) :, None])[:, 0]

    # Candidate i belongs to the set of the output token at `positions[i]`. The log-prob of candidate i under
    # the trainer's policy is `kept[i]`.
    sets = candidates.to_torch(logprobs.device)
    positions = torch.repeat_interleave(sets.offsets.diff())
    kept = logprobs[positions, sets.token_ids]
    kept_mass = torch.zeros(len(candidates)).index_add_(0, positions, kept.exp())
    return sampled.numpy(), (sampled - kept_mass.log()).numpy()


def show_positions(prompt: str, rollout: Rollout, tokenizer: Tokenizer, count: int) -> None:
    """Print the first positions' candidates with their probabilities. The sampled token is in brackets."""
    assert rollout.candidates is not None
    print(f"{prompt} …\nkept mass  candidates")
    for t in range(min(count, len(rollout.output_ids))):
        token_ids, logprobs = rollout.candidates[t]
        decoded = [tokenizer.decode([i], skip_special_tokens=False) for i in token_ids.tolist()]
        texts = [text.strip() or repr(text) for text in decoded]
        shown = [f"{text} {np.exp(logprob):.2f}" for text, logprob in zip(texts, logprobs, strict=True)]
        at = token_ids.tolist().index(rollout.output_ids[t])
        shown[at] = f"[{shown[at]}]"
        others = len(shown) - 6 - (at >= 6)
        shown = shown[:6] + [shown[at]] * (at >= 6) + [f"… {others} more"] * (others > 0)
        print(f"{np.exp(rollout.candidates.log_kept_mass[t]):>9.4f}  {'  '.join(shown)}")
    print()


def show_sizes(rollouts: list[Rollout]) -> None:
    """Print set sizes, and how many bytes the rollouts take when the sidecar sends them."""
    sets = [rollout.candidates for rollout in rollouts if rollout.candidates is not None]
    sizes = np.concatenate([each.sizes for each in sets])
    num_bytes = sum(len(to_frame(rollout)) for rollout in rollouts)
    print(
        f"candidates per token: mean {sizes.mean():.1f}, median {np.median(sizes):.0f},"
        f" p99 {np.percentile(sizes, 99):.0f}; {num_bytes / len(sizes):.0f} bytes per token on the wire"
    )


if __name__ == "__main__":
    sys.exit(main())
