"""On-policy distillation on two real engines: the student rolls out, the teacher scores, the student learns.

The example creates two small random models. In each step, the student's engine samples rollouts, and the
teacher's engine returns the teacher's top-p set at every sampled token. The student then takes one optimizer
step on a distillation loss. The loss compares student and teacher on the tokens of each set, and on the total
probability outside the set. At the end of each step, the example pushes the new
weights to the student's engine.

After the last step, the example prints a table with one row per step. Each row has the KL between student
and teacher over the whole vocabulary, in both directions. The KL falls. To compute this KL, the example runs
a forward pass of the teacher in torch. The training itself does not need this forward pass.

Run the example in one of these ways::

    python examples/distill.py                          # two minutes to start both engines, seconds per step
    python examples/distill.py --outside renormalized   # ignore the probability outside the teacher's sets
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rollout_loop import serve
from tiny_model import make_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from sglang_topp.batch import RLBatch, collate_rollouts
from sglang_topp.replay import distillation_loss
from sglang_topp_client import RolloutClient

PROMPTS = ["Once upon a time", "The answer is", "def main():", "Dear reader,"]
GROUP = 8  # samples per prompt


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
    outside: Literal["tail", "renormalized"] = "tail",
) -> list[dict[str, float]]:
    """Distill the teacher into the student, and return each step's loss, two KLs, and mean set size.

    `loss` is the training loss. Over the whole vocabulary, `forward_kl` is KL(teacher || student), and
    `reverse_kl` is KL(student || teacher). `loss`, `forward_kl`, and `reverse_kl` are means over the
    student's rollout tokens, in nats. `candidates` is the mean size of the teacher's sets. All values of a
    step are measured before the step's optimizer update. After the last step, the student's engine has the
    final weights.
    """
    student = AutoModelForCausalLM.from_pretrained(student_path, dtype=torch.float32)
    teacher_model = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32).eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    sampling = {"temperature": 1.0, "n": GROUP, "max_new_tokens": 32, "ignore_eos": True}
    history = []
    with (
        RolloutClient(student_url, engine_url=student_engine_url) as actor,
        RolloutClient(teacher_url) as teacher,
    ):
        for step in range(steps):
            rollouts = actor.generate(PROMPTS, sampling)
            assert step == 0 or {rollout.weight_version for rollout in rollouts} == {str(step)}
            scores = teacher.score(rollouts, top_logprobs_p=top_p)
            batch = collate_rollouts(
                rollouts,
                np.zeros(len(rollouts)),  # no rewards
                candidates=[score.candidates for score in scores],
                pad_token_id=0,
            )
            hidden = states(student, batch)
            loss = distillation_loss(
                hidden,
                student.lm_head.weight,
                batch["candidates"].sets,
                direction=direction,
                outside=outside,
            ).mean()
            history.append({"loss": loss.item()} | distances(student, teacher_model, hidden, batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            actor.push_weights(student, version=str(step + 1))
    return history


def states(model: PreTrainedModel, batch: RLBatch) -> Tensor:
    """Return the hidden state before each generated token, [T, H], in the order of the sets."""
    attention_mask = batch["attention_mask"]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(batch["sequences"], attention_mask, positions).last_hidden_state
    scored = batch["response_mask"].bool()
    return hidden[:, -scored.shape[1] - 1 : -1][scored]


@torch.no_grad()
def distances(
    student: PreTrainedModel, teacher_model: PreTrainedModel, hidden: Tensor, batch: RLBatch
) -> dict[str, float]:
    """Return KL(teacher || student), KL(student || teacher), and the mean size of the teacher's sets.

    Both KLs are computed over the whole vocabulary.
    """
    log_p = torch.log_softmax(hidden @ student.lm_head.weight.t(), dim=1)
    log_q = torch.log_softmax(states(teacher_model, batch) @ teacher_model.lm_head.weight.t(), dim=1)
    return {
        "forward_kl": float((log_q.exp() * (log_q - log_p)).sum(1).mean()),
        "reverse_kl": float((log_p.exp() * (log_p - log_q)).sum(1).mean()),
        "candidates": float(batch["candidates"].sets.sizes.mean()),
    }


def main() -> int:
    """Run the example. Return 0 if the KL in the direction `--direction` fell, and 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="training steps (%(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="threshold of the sets (%(default)s)")
    parser.add_argument(
        "--direction", choices=("forward", "reverse"), default="forward", help="of the KL (%(default)s)"
    )
    parser.add_argument(
        "--outside",
        choices=("tail", "renormalized"),
        default="tail",
        help="treatment of tokens outside the teacher's sets (%(default)s)",
    )
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
