"""Let a model and a tool take turns, exactly in token ids, and collate what comes of it for a trainer.

The tool counts the letters of what the model wrote. Its tokens go behind the model's as ids
(`Rollout.extend`), and the model goes on from there (`RolloutClient.resume`): nothing is tokenised twice, so
that the trainer sees the very tokens that were sampled. The tool's tokens have no candidates and no loss.

    python examples/tool_loop.py --url http://127.0.0.1:30010     # a sidecar, or a patched SGLang
    python examples/tool_loop.py                                  # serves a small random model itself
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from rollout_loop import serve
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_topp.batch import collate_rl
from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_server.tiny_model import make_tiny_model

PROMPTS = ["Count your letters.", "Write three words."]
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "n": 2}


def main() -> int:
    """Run the demo; 0 where the batch is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a running server; without it, one is started")
    parser.add_argument("--turns", type=int, default=3, help="of the model (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="per turn (%(default)s)")
    args = parser.parse_args()

    with server(args.url) as url, RolloutClient(url) as client:
        info = client.server_info()
        tokenizer = AutoTokenizer.from_pretrained(info.get("model_path") or info["engine"]["model_path"])
        sampling = {**SAMPLING, "max_new_tokens": args.max_new_tokens}

        # -- the loop: each turn goes on from the ids of all before it --------------------------------
        rollouts = client.generate(PROMPTS, sampling, top_logprobs_source="sampler", on_abort="resume")
        for _ in range(args.turns - 1):
            rollouts = [rollout.extend(tool(tokenizer, rollout.text)) for rollout in rollouts]
            rollouts = client.resume(rollouts, sampling, top_logprobs_source="sampler", on_abort="resume")

    batch = collate_rl(
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.output_ids for rollout in rollouts],
        [np.zeros(len(rollout.output_ids), np.float32) for rollout in rollouts],  # your rewards
        [rollout.loss_mask for rollout in rollouts],
        [rollout.masked_logprobs for rollout in rollouts],
        [rollout.candidates for rollout in rollouts if rollout.candidates is not None],
        pad_token_id=0,
    )
    show(rollouts[0])
    drifted = sum(drifts(tokenizer, rollout) for rollout in rollouts)
    print(f"\ntokenised again, {drifted} of {len(rollouts)} responses would have been other tokens")
    sets = batch["candidates"].sets
    num_generated, num_sets = int(batch["loss_mask"].sum()), int((sets.sizes > 0).sum())
    print(f"{len(sets)} tokens of responses, {num_generated} of them generated: {num_sets} candidate sets")
    return 0 if num_generated == num_sets else 1


def tool(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """What the tool answers, as token ids."""
    letters = sum(character.isalpha() for character in text)
    ids: list[int] = tokenizer.encode(f"\n[{letters} letters]\n", add_special_tokens=False)
    return ids


def drifts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> bool:
    """Whether the response's text stands for other tokens than those that it was made of."""
    ids = rollout.output_ids.tolist()
    again: list[int] = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
    return again != ids


def show(rollout: Rollout) -> None:
    """A response, turn by turn: how many tokens, and whose."""
    mask = rollout.loss_mask
    starts = np.flatnonzero(np.diff(mask, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(mask)], strict=True):
        who = "model" if mask[start] else "tool"
        ids = rollout.output_ids[start:end].tolist()
        print(f"{who:<6}{len(ids):>4} tokens  {ids[:8]}{' …' if len(ids) > 8 else ''}")


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """The address of a server."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder, serve(make_tiny_model(folder)) as (sidecar_url, _):
        yield sidecar_url


if __name__ == "__main__":
    sys.exit(main())
