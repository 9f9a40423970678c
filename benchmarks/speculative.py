"""Benchmark of SGLang's throughput under speculative decoding, with and without candidate sets.

Each contender sends 32 concurrent requests of 32 tokens each. One patched SGLang on this machine serves all
contenders in turn. Timing starts when the first request is sent, and ends when the last response is read.

Without a GPU, the test suite's draft worker makes the drafts with the target model, and torch code replaces
the sampling kernels. The ratios therefore show the cost of candidate sets during verification, but not the
speedup of speculation.

On a GPU, the environment variables `SPECULATIVE_MODEL` and `SPECULATIVE_DRAFT` must hold the paths of a model
and its EAGLE draft model::

    SPECULATIVE_MODEL=/models/target SPECULATIVE_DRAFT=/models/eagle python -m benchmarks speculative
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.harness.paired_timing import compare
from examples.tiny_model import make_tiny_model
from tests.engine.start_servers import Engine, run_engine
from tests.speculative import chain_draft_worker

REQUESTS = 32
TOKENS = 32
SAMPLING = {
    "max_new_tokens": TOKENS,
    "temperature": 0.6,
    "top_p": 0.95,
    "ignore_eos": True,
    "custom_params": {"drafts": "likely"},
}
BASE64 = {"return_logprob": True, "return_logprobs_in_base64": True}
CONTENDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "return_logprob": {"return_logprob": True},
    "candidate sets, p = 0.95, base64": {**BASE64, "top_logprobs_p": 0.95},
    "sampler as source, base64": {**BASE64, "top_logprobs_source": "sampler"},
}
EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.8", "--max-total-tokens", "65536"),
)


def run() -> None:
    """Print each contender's throughput, relative to requests without log-probs and candidate sets."""

    async def send(url: str, body: dict[str, Any]) -> None:
        limits = httpx.Limits(max_connections=REQUESTS)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            prompts = ["x" * (8 + i) for i in range(REQUESTS)]
            asks = [{"sampling_params": SAMPLING, "text": prompt, **body} for prompt in prompts]
            for response in await asyncio.gather(*(http.post("/generate", json=ask) for ask in asks)):
                response.raise_for_status()

    with tempfile.TemporaryDirectory() as folder, _engine(Path(folder)) as (engine, title):
        compare(
            f"{title}, {REQUESTS} requests x {TOKENS} tokens",
            {
                label: (lambda body=body: asyncio.run(send(engine.url, body)))
                for label, body in CONTENDERS.items()
            },
            rounds=5,
        )


@contextmanager
def _engine(folder: Path) -> Iterator[tuple[Engine, str]]:
    """Run an engine with speculative decoding, and yield the engine and a title for the table."""
    target, draft = (os.environ.get(f"SPECULATIVE_{name}") for name in ("MODEL", "DRAFT"))
    arguments: Sequence[str] = chain_draft_worker.ARGUMENTS
    if torch.cuda.is_available():
        if not target or not draft:
            raise SystemExit("SPECULATIVE_MODEL and SPECULATIVE_DRAFT: expected a model and its EAGLE draft")
        model, env, title = Path(target), {}, "EAGLE"
        arguments = (*EAGLE, "--speculative-draft-model-path", draft)
    else:
        model = make_tiny_model(folder / "model", vocab_size=151_936, logit_std=7.0)
        env, title = chain_draft_worker.install(folder / "plugin"), "test worker, vocabulary 151,936"
    with run_engine(model, folder / "engine.log", *arguments, env=env) as engine:
        yield engine, title
