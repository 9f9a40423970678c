"""Draw the documentation's pictures into this folder, or into the folder that the first argument names.

`make pictures` runs this script. matplotlib and `sglang_topp_client.plots` draw the plots. Chromium, which
`.ci/browser` installs, takes screenshots of the HTML page that `sglang-topp view` writes. The script needs no
engine: it samples tokens itself, from a small trained model, with a fixed seed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.tiny_model import make_trained_model
from sglang_topp import CandidateSets
from sglang_topp.nucleus import top_p_candidates
from sglang_topp.replay import score
from sglang_topp_client import Rollout, add_trainer_columns, plots, save_rollouts
from sglang_topp_server.view.build_page import page_of_files
from sglang_topp_server.view.token_text import TokenTexts

ROOT = Path(__file__).parents[2]
TARGET = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
MAX_BYTES = 150_000
BLUE, ORANGE, GRAY = "#0072b2", "#e69f00", "#b0b0b0"


def main() -> int:
    """Draw every picture. Return 1 if any picture is larger than 150 KB, else 0."""
    mpl.use("svg")
    disable_progress_bar()
    plt.rcParams |= {"svg.hashsalt": "sglang-topp", "font.size": 10, "axes.spines.top": False}
    plt.rcParams |= {"axes.spines.right": False, "figure.constrained_layout.use": True}
    draw_one_set()
    draw_drift()
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_trained_model(Path(folder, "model"))
        draw_demo(model_path)
        take_screenshots(model_path, Path(folder))
    made = sorted(path for path in TARGET.iterdir() if path.suffix in (".svg", ".png"))
    for path in made:
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")
    return int(any(path.stat().st_size > MAX_BYTES for path in made))


def save(name: str) -> None:
    """Write the current figure to the file `name`, without a date, and close the figure."""
    plt.savefig(TARGET / name, metadata={"Date": None}, facecolor="white")
    plt.close()


# -- one distribution ------------------------------------------------------------------------------


def draw_one_set() -> None:
    """Draw a distribution and its candidate set at p = 0.8. Two tokens are tied at the cutoff."""
    q = np.array([0.34, 0.21, 0.14, 0.09, 0.06, 0.06, 0.04, 0.025, 0.015, 0.01, 0.006, 0.004])
    token_ids, _, _ = top_p_candidates(torch.from_numpy(np.log(q))[None].float(), 0.8)
    size = len(token_ids)
    mass = q[:size].sum()
    _, ax = plt.subplots(figsize=(7, 2.8))
    ax.bar(range(len(q)), q, color=[BLUE if i < size else GRAY for i in range(len(q))])
    for i, value in enumerate(q):
        ax.text(i, value + 0.006, f"{value:.2g}", ha="center", fontsize=8)
    ax.axvline(size - 0.5, color="black", linestyle="--", linewidth=1)
    ax.text(size - 0.35, 0.3, "cut off by top-p 0.8", fontsize=9)
    ax.text(size - 0.65, 0.3, f"candidate set: kept mass {mass:.2f}", ha="right", fontsize=9)
    bracket = {"arrowstyle": "-[, widthB=2.2"}
    tie = "a tie at\nthe cutoff:\nboth are kept"
    ax.annotate(tie, (4.5, 0.1), (4.5, 0.17), ha="center", fontsize=9, arrowprops=bracket)
    ax.set(xlabel="tokens, most probable first", ylabel="probability", xticks=[], ylim=(0, 0.37))
    save("candidate-set.svg")


# -- the gradient without replay -------------------------------------------------------------------


def draw_drift() -> None:
    """Draw the entropy over 100 exact gradient steps, without and with replay.

    Every token has the same advantage, so an unbiased gradient would be 0.
    """
    generator = torch.Generator().manual_seed(0)
    start = 1.5 * torch.randn(200, generator=generator, dtype=torch.float64)
    _, ax = plt.subplots(figsize=(7, 2.8))
    for label, is_replayed, color in (("without replay", False, ORANGE), ("with replay", True, BLUE)):
        logits = start.clone().requires_grad_()
        entropies = []
        for _ in range(101):
            logprobs = torch.log_softmax(logits, 0)
            entropies.append(-(logprobs.exp() * logprobs).sum().item())
            kept, _, _ = top_p_candidates(logprobs.detach()[None].float(), 0.8)
            log_mass = logprobs[kept].logsumexp(0)
            drawn_with = (logprobs[kept] - log_mass).detach().exp()
            scored = logprobs[kept] - log_mass if is_replayed else logprobs[kept]
            (gradient,) = torch.autograd.grad((drawn_with * scored).sum(), logits)
            logits = (logits + gradient).detach().requires_grad_()
        ax.plot(entropies, color=color, label=label)
    ax.set(
        xlabel="gradient steps, the same advantage for every token", ylabel="entropy (nats)", ylim=(0, None)
    )
    ax.legend()
    save("drift.svg")


# -- the demo's model ------------------------------------------------------------------------------


@torch.no_grad()
def sample(model: Any, prompt_ids: list[int], top_p: float, num: int, length: int) -> list[CandidateSets]:
    """Sample `num` continuations of a prompt, as SGLang's sampler would, and return their candidate sets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([prompt_ids] * num)
    steps = []
    for _ in range(length):
        logprobs = torch.log_softmax(model(ids, logits_to_keep=1).logits[:, 0], 1)
        kept, values, offsets = top_p_candidates(logprobs, top_p)
        spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
        drawn = [torch.multinomial(values[a:b].exp(), 1, generator=generator).item() for a, b in spans]
        sampled = torch.stack([kept[a + at] for (a, _), at in zip(spans, drawn, strict=True)])
        arrays = (kept, values, offsets, sampled.int())
        steps.append(CandidateSets(*(array.numpy() for array in arrays)))
        ids = torch.cat([ids, sampled[:, None].long()], 1)
    return [CandidateSets.concat([step[i : i + 1] for step in steps]) for i in range(num)]


@torch.no_grad()
def score_samples(
    model: Any, prompt_ids: list[int], samples: list[CandidateSets]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each sample's log-probs under the model, over the vocabulary and over the candidate sets."""
    scored = []
    for sets in samples:
        targets = torch.tensor(sets.sampled_ids).long()
        ids = torch.cat([torch.tensor(prompt_ids), targets])
        states = model.model(ids[None]).last_hidden_state[0, len(prompt_ids) - 1 : -1]
        scores = score(states, model.lm_head.weight, targets, sets, full=True)
        scored.append((scores.full_logprobs.numpy(), scores.logprobs.numpy()))
    return scored


def draw_demo(model_path: Path) -> None:
    """Sample 2,048 tokens at top-p 0.8, and draw their ratios, kept mass, and set sizes."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    prompt_ids = AutoTokenizer.from_pretrained(model_path)("Once upon a time").input_ids
    samples = sample(model, prompt_ids, top_p=0.8, num=32, length=64)
    full, masked = map(np.concatenate, zip(*score_samples(model, prompt_ids, samples), strict=True))
    sets = CandidateSets.concat(samples)
    plt.subplots(figsize=(7, 3.2))
    plots.ratios(full, sets.sampled_logprobs, sets, masked_new=masked)
    save("ratios.svg")

    class Sampled:
        candidates = sets

    _, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    plots.kept_mass([Sampled()], left)
    plots.set_sizes([Sampled()], right)
    right.set_ylim(1, right.get_ylim()[1] * 30)  # room for the legend
    save("kept-mass.svg")


# -- screenshots -----------------------------------------------------------------------------------

PROMPTS = [
    "Once upon a time",
    "The cat sat on the",
    "What is the capital of France? The answer is",
    "One fox",
]


def sampled_rollouts(model_path: Path) -> Iterator[tuple[Rollout, np.ndarray, np.ndarray]]:
    """Sample eight rollouts of four prompts at top-p 0.8, with the log-probs of a trainer in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    trainer = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    for prompt_index, prompt in enumerate(PROMPTS):
        prompt_ids = tokenizer(prompt).input_ids
        samples = sample(policy, prompt_ids, top_p=0.8, num=8, length=64)
        ends = [np.append(sets.sampled_ids, 0).tolist().index(0) + 1 for sets in samples]
        samples = [sets[:end] for sets, end in zip(samples, ends, strict=True)]
        scored = score_samples(trainer, prompt_ids, samples)
        for at, (sets, (full, masked)) in enumerate(zip(samples, scored, strict=True)):
            length = len(sets)
            half = length // 2 if at == 3 else 0  # a weight push in the middle of sample 3
            rollout = Rollout(
                prompt_index=prompt_index,
                sample_index=at,
                request_id=f"{prompt_index}-{at}",
                prompt_ids=np.array(prompt_ids, np.int32),
                output_ids=sets.sampled_ids,
                text=tokenizer.decode(sets.sampled_ids.tolist(), skip_special_tokens=True),
                logprobs=sets.sampled_logprobs,
                candidates=sets,
                finish_reason="stop" if sets.sampled_ids[-1] == 0 else "length",
                weight_version="8",
                cached_tokens=0,
                latency_s=1.0,
                top_logprobs_source="sampler",
                weight_spans=(("7", half), ("8", length - half)) if half else (("8", length),),
                sampling_params={"temperature": 1.0, "top_p": 0.8},
            )
            yield rollout, full, masked


def take_screenshots(model_path: Path, folder: Path) -> None:
    """Write the HTML page of sampled rollouts, and take screenshots of its first screen and token view."""
    rollouts, full, masked = zip(*sampled_rollouts(model_path), strict=True)
    save_rollouts(folder / "rollouts.parquet", rollouts)
    add_trainer_columns(
        folder / "rollouts.parquet",
        folder / "step-8.parquet",
        trainer_logprobs=full,
        trainer_masked_logprobs=masked,
        rewards=[len(set(rollout.text.split())) / len(rollout.text.split()) for rollout in rollouts],
    )
    page_file = folder / "step-8.html"
    texts = TokenTexts(model_path)
    page_file.write_bytes(b"".join(page_of_files([folder / "step-8.parquet"], tokenizer=texts)))

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    executable = chromium or ROOT / ".browser" / "chromium"
    if not Path(executable).exists():
        raise SystemExit("no Chromium is installed, which takes the screenshots: run .ci/browser")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start as root, nor in a container without extra rights. The script opens
        # only the page that it wrote itself, so the sandbox is not needed.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 860}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready]")
        save_screenshot(page.screenshot(), folder, "view-first-screen.png")
        at = int(np.abs(rollouts[3].candidates.sizes - 12).argmin())
        page.goto(f"{page_file.as_uri()}#/rollout/3/{at}")
        page.wait_for_selector(f"[data-t='{at}'][aria-selected=true]")
        save_screenshot(page.screenshot(), folder, "view-tokens.png")
        browser.close()


def save_screenshot(png: bytes, folder: Path, name: str) -> None:
    """Write a screenshot with a palette of 128 colors, which takes a third of the original bytes."""
    (folder / name).write_bytes(png)
    with Image.open(folder / name) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(TARGET / name, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
