"""Draw the documentation's pictures into this folder, or into the folder that the first argument names.

`make pictures` runs this script. matplotlib and `sglang_topp_client.plots` draw the plots. Chromium, which
`.ci/browser` installs, takes screenshots of the HTML page that `sglang-topp view` writes. The script needs no
engine: it samples tokens itself, from small models, with a fixed seed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.tiny_model import make_tiny_model
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
    draw_demo()
    with tempfile.TemporaryDirectory() as folder:
        take_screenshots(Path(folder))
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


def draw_demo() -> None:
    """Sample 2,048 tokens from a small random model, and draw their ratios, kept mass, and set sizes."""
    prompt, num_samples, length = [3, 1, 4, 1, 5], 32, 64
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = make_tiny_model(folder, vocab_size=32_000, logit_std=7.0)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ids = torch.tensor([prompt] * num_samples)
        by_step = []
        for _ in range(length):
            logprobs = torch.log_softmax(model(ids, logits_to_keep=1).logits[:, 0], 1)
            kept, values, offsets = top_p_candidates(logprobs, 0.8)
            spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
            drawn = [torch.multinomial(values[a:b].exp(), 1, generator=generator).item() for a, b in spans]
            sampled = torch.tensor([kept[a + at] for (a, _), at in zip(spans, drawn, strict=True)])
            by_step.append(
                CandidateSets(kept.numpy(), values.numpy(), offsets.numpy(), sampled.int().numpy())
            )
            ids = torch.cat([ids, sampled[:, None].long()], 1)
        # The trainer runs the model once over the whole sequences. `states` has the order of the sets: the
        # first token of every sample, then the second token of every sample, and so on.
        states = model.model(ids).last_hidden_state[:, len(prompt) - 1 : -1].transpose(0, 1).flatten(0, 1)
        targets = ids[:, len(prompt) :].T.flatten()
        sets = CandidateSets.concat(by_step)
        full = score(states, model.lm_head.weight, targets).logprobs.numpy()
        masked = score(states, model.lm_head.weight, targets, sets).logprobs.numpy()
    plt.subplots(figsize=(7, 3.2))
    plots.ratios(full, sets.sampled_logprobs, sets, masked_new=masked)
    save("ratios.svg")

    class Sampled:
        candidates = sets

    _, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    plots.kept_mass([Sampled()], left)
    plots.set_sizes([Sampled()], right)
    right.set_ylim(1, right.get_ylim()[1] * 4)  # room for the legend
    save("kept-mass.svg")


# -- screenshots -----------------------------------------------------------------------------------


class WordModel:
    """A trigram model of the words in LICENSE: a policy that samples readable text."""

    def __init__(self, weights: tuple[float, float, float]) -> None:
        words = re.findall(r"[\w'-]+|[^\w\s]", (ROOT / "LICENSE").read_text())
        self.vocab = sorted(set(words))
        self._ids = {word: i for i, word in enumerate(self.vocab)}
        self._weights = weights
        ids = self.encode(words)
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for before, last, following in zip(ids, ids[1:], ids[2:], strict=False):
            for context in ((before, last), (last,), ()):
                self._counts[context][following] += 1

    def encode(self, words: list[str]) -> list[int]:
        """Return the token ids of `words`. Each word must occur in the text of the file LICENSE."""
        return [self._ids[word] for word in words]

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Return float32 [V]: the log-probs of the next word."""
        q = np.full(len(self.vocab), 1e-9)
        for weight, context in zip(self._weights, (tuple(ids[-2:]), tuple(ids[-1:]), ()), strict=True):
            counts = self._counts[context]
            for token_id, count in counts.items():
                q[token_id] += weight * count / counts.total()
        return np.log(q / q.sum()).astype(np.float32)

    def write_tokenizer(self, path: Path) -> None:
        """Write a byte-level `tokenizer.json`, in which each word and each punctuation mark is one token."""
        vocab = {("" if re.match(r"[.,;:)]", word) else "Ġ") + word: i for i, word in enumerate(self.vocab)}
        model = {"type": "BPE", "vocab": vocab, "merges": []}
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        path.write_text(
            json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model})
        )


def sample(policy: WordModel, prompt: int, sample: int, rng: np.random.Generator) -> Rollout:
    """Sample a rollout from `policy` at top-p 0.9, as SGLang's sampler would."""
    prompts = [["the", "License"], ["Derivative", "Works"], ["the", "Work"], ["patent", "license"]]
    prompt_ids = policy.encode(prompts[prompt])
    ids, parts = list(prompt_ids), []
    for _ in range(int(rng.integers(60, 160))):
        kept, logprobs, offsets = top_p_candidates(torch.from_numpy(policy.logprobs(ids))[None], 0.9)
        mass = logprobs.double().exp().numpy()
        ids.append(int(rng.choice(kept.numpy(), p=mass / mass.sum())))
        parts.append(CandidateSets(kept.numpy(), logprobs.numpy(), offsets.numpy(), [ids[-1]]))
    sets, output_ids = CandidateSets.concat(parts), np.array(ids[len(prompt_ids) :], np.int32)
    half = len(output_ids) // 2 if sample == 3 else 0  # a weight push in the middle of sample 3
    words = [policy.vocab[i] for i in output_ids]
    return Rollout(
        prompt_index=prompt,
        sample_index=sample,
        request_id=f"{prompt}-{sample}",
        prompt_ids=np.array(prompt_ids, np.int32),
        output_ids=output_ids,
        text="".join(word if re.match(r"[.,;:)]", word) else f" {word}" for word in words),
        logprobs=sets.sampled_logprobs,
        candidates=sets,
        finish_reason="length" if sample else "stop",
        weight_version="8",
        cached_tokens=0,
        latency_s=1.0,
        top_logprobs_source="sampler",
        weight_spans=(("7", half), ("8", len(output_ids) - half))
        if sample == 3
        else (("8", len(output_ids)),),
        sampling_params={"temperature": 1.0, "top_p": 0.9},
    )


def take_screenshots(folder: Path) -> None:
    """Write the HTML page of sampled rollouts, and take screenshots of its first screen and token view."""
    policy, trainer = WordModel((0.5, 0.46, 0.04)), WordModel((0.53, 0.44, 0.03))
    rng = np.random.default_rng(0)
    rollouts = [sample(policy, prompt, at, rng) for prompt in range(4) for at in range(8)]
    new, masked = [], []
    for rollout in rollouts:
        ids, start = [*rollout.prompt_ids.tolist(), *rollout.output_ids.tolist()], len(rollout.prompt_ids)
        rows = np.stack([trainer.logprobs(ids[:at]) for at in range(start, len(ids))])
        drawn = rows[np.arange(len(rows)), rollout.output_ids]
        mass = [np.logaddexp.reduce(row[rollout.candidates[t][0]]) for t, row in enumerate(rows)]
        new.append(drawn)
        masked.append((drawn - np.array(mass)).astype(np.float32))
    save_rollouts(folder / "rollouts.parquet", rollouts)
    rewards = [float(np.mean(rollout.output_ids % 2 == 0)) for rollout in rollouts]
    add_trainer_columns(
        folder / "rollouts.parquet",
        folder / "step-8.parquet",
        trainer_logprobs=new,
        trainer_masked_logprobs=masked,
        rewards=rewards,
    )
    policy.write_tokenizer(folder / "tokenizer.json")
    page_file = folder / "step-8.html"
    texts = TokenTexts(folder / "tokenizer.json")
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
