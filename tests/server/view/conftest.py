"""Synthetic rollouts of many kinds, a tokenizer whose tokens are markup, and a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from sglang_topp import CandidateSets
from sglang_topp_client import Rollout, add_trainer_columns, save_rollouts
from sglang_topp_server.view.build_page import page_of_files

ROOT = Path(__file__).parents[3]
VOCAB = 4096
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script>",
    "<!--",
    "-->",
    "<img src=x onerror=hack()>",
    "&lt;",
]


def make_sets(rng: np.random.Generator, num_tokens: int, most: int = VOCAB // 2) -> CandidateSets:
    """Return sets of one to thousands of candidates. Most keep a mass of 0.9 or more, some far less."""
    sizes = np.where(rng.random(num_tokens) < 0.5, 1, 1 + rng.pareto(0.9, num_tokens) * 3).astype(int)
    sizes = np.minimum(sizes, most)
    mass = np.where(
        rng.random(num_tokens) < 0.05, rng.uniform(0.2, 0.9, num_tokens), 1 - rng.beta(1, 20, num_tokens)
    )
    parts, ids, sampled = [], [], []
    for size, kept in zip(sizes, mass, strict=True):
        weights = np.sort(rng.dirichlet(np.full(size, 0.5)) + 1e-9)[::-1]
        parts.append(np.log(weights / weights.sum() * kept).astype(np.float32))
        ids.append(rng.permutation(VOCAB)[:size])
        sampled.append(rng.choice(ids[-1]))
    logprobs, token_ids = np.concatenate([*parts, []]), np.concatenate([*ids, []])
    rows = np.repeat(np.arange(num_tokens), sizes)
    order = np.lexsort((token_ids, -logprobs, rows))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return CandidateSets(
        token_ids[order].astype(np.int32),
        logprobs[order].astype(np.float32),
        offsets,
        np.array(sampled, np.int32),
    )


def make_rollout(
    rng: np.random.Generator, prompt: int, sample: int, num_tokens: int, **changes: Any
) -> Rollout:
    sets = make_sets(rng, num_tokens)
    rollout = Rollout(
        prompt_index=prompt,
        sample_index=sample,
        request_id=f"request-{prompt}-{sample}",
        prompt_ids=np.array([prompt + 1, 2, 3], np.int32),
        output_ids=sets.sampled_ids,
        text=f"text {prompt} {sample}",
        logprobs=sets.sampled_logprobs,
        candidates=sets,
        finish_reason="stop",
        weight_version="8",
        cached_tokens=0,
        latency_s=1.5,
        top_logprobs_source="sampler",
        weight_spans=(("7", num_tokens // 2), ("8", num_tokens - num_tokens // 2)),
        sampling_params={"top_p": 0.9},
    )
    return replace(rollout, **changes)


def make_rollouts(seed: int = 0, num_prompts: int = 6, num_samples: int = 4) -> list[Rollout]:
    """Return groups of samples that begin alike: also aborted, resumed, tool, empty, and mask-only ones."""
    rng = np.random.default_rng(seed)
    made = []
    for prompt in range(num_prompts):
        start = make_sets(rng, 10)
        for sample in range(num_samples):
            rollout = make_rollout(rng, prompt, sample, int(rng.integers(20, 120)))
            sets = CandidateSets.concat([start[: 3 + sample], rollout.candidates[3 + sample :]])
            made.append(
                replace(rollout, output_ids=sets.sampled_ids, logprobs=sets.sampled_logprobs, candidates=sets)
            )
    made[1] = replace(made[1], finish_reason="abort")
    tool = made[2].extend([5, 6, 7])
    more = make_sets(rng, 30)
    made[2] = replace(
        tool,
        output_ids=np.concatenate([tool.output_ids, more.sampled_ids]),
        logprobs=np.concatenate([tool.logprobs, more.sampled_logprobs]),
        candidates=CandidateSets.concat([tool.candidates, more]),
        weight_spans=(*tool.weight_spans, ("9", 30)),
        finish_reason="length",
    )
    made[3] = replace(made[3], candidates=made[3].candidates.without_logprobs())
    none = made[4]
    made[4] = replace(
        none,
        output_ids=none.output_ids[:0],
        logprobs=none.logprobs[:0],
        candidates=none.candidates[:0],
        weight_spans=(),
        finish_reason="abort",
    )
    return made


def make_scores(rollouts: list[Rollout], seed: int = 1) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    noise = [rng.normal(0, 0.05, len(one.output_ids)).astype(np.float32) for one in rollouts]
    known = [one.candidates is not None and one.candidates.has_logprobs for one in rollouts]
    return {
        "trainer_logprobs": [one.logprobs + each for one, each in zip(rollouts, noise, strict=True)],
        "trainer_masked_logprobs": [
            one.masked_logprobs + each if is_known else None
            for one, each, is_known in zip(rollouts, noise, known, strict=True)
        ],
        "rewards": [None if i % 5 == 4 else i / 4 for i in range(len(rollouts))],
    }


@pytest.fixture(scope="session")
def make() -> Any:
    """Return this module, because pytest's import mode gives tests no way to import its helpers."""

    class Make:
        rollout = staticmethod(make_rollout)
        rollouts = staticmethod(make_rollouts)
        scores = staticmethod(make_scores)
        vocab, hostile = VOCAB, HOSTILE

    return Make


@pytest.fixture(scope="session")
def rollouts() -> list[Rollout]:
    return make_rollouts()


@pytest.fixture(scope="session")
def scored_file(tmp_path_factory: pytest.TempPathFactory, rollouts: list[Rollout]) -> Path:
    """Return a file of `rollouts` with a trainer's columns."""
    folder = tmp_path_factory.mktemp("rollouts")
    save_rollouts(folder / "plain.parquet", rollouts, row_group_size=5)
    add_trainer_columns(folder / "plain.parquet", folder / "scored.parquet", **make_scores(rollouts))
    return folder / "scored.parquet"


@pytest.fixture(scope="session")
def write_page(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`write_page(*paths, **options)` returns the page's file."""

    def write(*paths: Path, **options: Any) -> Path:
        page = tmp_path_factory.mktemp("pages") / "page.html"
        page.write_bytes(b"".join(page_of_files(paths, **options)))
        return page

    return write


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a byte-level tokenizer whose tokens are markup, whitespace, parts of characters, and words."""
    pieces = ["Ġ", "Ċ", "ĉ", "Ã", "©", "Ċ Ġ".replace(" ", ""), "âĢĭ", "âĢ®"]
    vocab = [*HOSTILE, *pieces]
    vocab += [f"Ġword{i}" for i in range(VOCAB - len(vocab))]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(vocab)}, "merges": []}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                "model": model,
            }
        )
    )
    return path


# -- the browser -----------------------------------------------------------------------------------


def find_chromium() -> str:
    """Return the path of Chromium: an installed one, or the one that `.ci/browser` unpacked without root."""
    unpacked = ROOT / ".browser" / "chromium"
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and unpacked.exists():
        found = str(unpacked)
    if found is None:
        pytest.fail(
            "no Chromium is installed, and these tests open pages in it: run .ci/browser, or install it"
            " (Debian: apt-get install chromium)",
            pytrace=False,
        )
    return found


# While Playwright is open, its event loop counts as running in this thread. Tests of other modules call
# asyncio.run, so it closes with the module.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that containers and root lack. The pages are our own, so it is off.
        launched = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`open_page(file, "#/…", **options of the context)`. An error in the console fails the test."""
    errors: list[str] = []
    contexts = []

    def open_page(file: Path | str, place: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.on(
            "console",
            lambda message: errors.append(message.text) if message.type in ("error", "warning") else None,
        )
        context.on("weberror", lambda error: errors.append(str(error.error)))
        page = context.new_page()
        page.goto((file.as_uri() if isinstance(file, Path) else file) + place)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
