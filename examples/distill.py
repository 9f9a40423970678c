"""On-policy distillation on two real engines: the student rolls out, the teacher scores, the student learns.

Both models are small, random and made on the spot. Each step the student's engine samples, the teacher's
engine gives its top-p set at every sampled token, the student takes one step towards them, and its new
weights are pushed to its engine. The distance is measured over the whole vocabulary, by the teacher's
own forward pass, which training itself never needs: it falls.

    python examples/distill.py                          # two minutes to start both, seconds a step
    python examples/distill.py --outside renormalised   # only what is inside of the teacher's sets counts
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rollout_loop import serve
from torch import Tensor
from train import push
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from sglang_topp.batch import RLBatch, collate_rl
from sglang_topp.replay import distillation_loss
from sglang_topp_client import Rollout, RolloutClient, Score
from sglang_topp_server.tiny_model import make_tiny_model

PROMPTS = ["Once upon a time", "The answer is", "def main():", "Dear reader,"]
GROUP = 8  # samples of each prompt


def distill(
    student_path: Path,
    teacher_path: Path,
    *,
    student_url: str,
    student_engine_url: str,
    teacher_url: str,
    steps: int,
    top_p: float = 0.95,
    direction: Literal["forward", "reverse"] = "forward",
    outside: Literal["tail", "renormalised"] = "tail",
) -> list[dict[str, float]]:
    """Distil the teacher into the student; each step's loss and distances before its update.

    `loss` is what is trained, `forward_kl` and `reverse_kl` are over the whole vocabulary, all in nats a
    token of the student's own rollouts. The student's engine is left with the last step's weights.
    """
    student = AutoModelForCausalLM.from_pretrained(student_path, dtype=torch.float32)
    judge = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32).eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    sampling = {"temperature": 1.0, "n": GROUP, "max_new_tokens": 32, "ignore_eos": True}
    history = []
    with (
        RolloutClient(student_url) as actor,
        RolloutClient(teacher_url) as teacher,
        tempfile.TemporaryDirectory() as folder,
    ):
        for step in range(steps):
            rollouts = actor.generate(PROMPTS, sampling)
            assert step == 0 or {rollout.weight_version for rollout in rollouts} == {str(step)}
            batch = collate(rollouts, teacher.score(rollouts, top_logprobs_p=top_p))
            hidden = states(student, batch)
            loss = distillation_loss(
                hidden,
                student.lm_head.weight,
                batch["candidates"].sets,
                direction=direction,
                outside=outside,
            ).mean()
            history.append({"loss": loss.item()} | distances(student, judge, hidden, batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            push(student, student_engine_url, Path(folder), version=str(step + 1))
    return history


def collate(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> RLBatch:
    """One batch of left-padded sequences, with the teacher's sets at the generated tokens."""
    lengths = [len(rollout.output_ids) for rollout in rollouts]
    return collate_rl(
        prompts=[rollout.prompt_ids for rollout in rollouts],
        responses=[rollout.output_ids for rollout in rollouts],
        rewards=[np.zeros(n) for n in lengths],
        loss_masks=[np.ones(n, np.int8) for n in lengths],
        candidates=[score.candidates for score in scores if score.candidates is not None],
        pad_token_id=0,
    )


def states(model: PreTrainedModel, batch: RLBatch) -> Tensor:
    """[T, H]: the hidden state before each generated token, in the order of the sets."""
    attention_mask = batch["attention_mask"]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(batch["sequences"], attention_mask, positions).last_hidden_state
    scored = batch["response_mask"].bool()
    return hidden[:, -scored.shape[1] - 1 : -1][scored]


@torch.no_grad()
def distances(
    student: PreTrainedModel, judge: PreTrainedModel, hidden: Tensor, batch: RLBatch
) -> dict[str, float]:
    """The mean KL over the whole vocabulary, both ways, and the mean size of the teacher's sets."""
    log_p = torch.log_softmax(hidden @ student.lm_head.weight.t(), dim=1)
    log_q = torch.log_softmax(states(judge, batch) @ judge.lm_head.weight.t(), dim=1)
    return {
        "forward_kl": float((log_q.exp() * (log_q - log_p)).sum(1).mean()),
        "reverse_kl": float((log_p.exp() * (log_p - log_q)).sum(1).mean()),
        "candidates": float(batch["candidates"].sets.sizes.mean()),
    }


def main() -> int:
    """Run it; 0 where the KL that is trained fell over the whole vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="%(default)s")
    parser.add_argument("--top-p", type=float, default=0.95, help="of the teacher's sets (%(default)s)")
    parser.add_argument("--direction", choices=("forward", "reverse"), default="forward", help="%(default)s")
    parser.add_argument("--outside", choices=("tail", "renormalised"), default="tail", help="%(default)s")
    args = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        teacher_path = make_tiny_model(Path(folder, "teacher"), seed=0)
        student_path = make_tiny_model(Path(folder, "student"), seed=1)
        with serve(teacher_path) as (teacher_url, _), serve(student_path) as (student_url, engine_url):
            history = distill(
                student_path,
                teacher_path,
                student_url=student_url,
                student_engine_url=engine_url,
                teacher_url=teacher_url,
                steps=args.steps,
                top_p=args.top_p,
                direction=args.direction,
                outside=args.outside,
            )
    print(f"{'':>4}{'':>8}     over the whole vocabulary")
    print(f"{'step':>4}{'loss':>8}{'forward KL':>14}{'reverse KL':>14}{'candidates':>14}")
    for step, row in enumerate(history):
        print(
            f"{step:>4}{row['loss']:>8.3f}{row['forward_kl']:>14.3f}{row['reverse_kl']:>14.3f}"
            f"{row['candidates']:>14.1f}"
        )
    trained = f"{args.direction}_kl"
    return 0 if history[-1][trained] < history[0][trained] else 1


if __name__ == "__main__":
    sys.exit(main())
