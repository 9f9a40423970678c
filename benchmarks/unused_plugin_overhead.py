"""Benchmark of the time that the installed plugin adds to requests that ask for no candidate sets.

The benchmark runs three servers of the installed SGLang: one with the plugin, and two whose `SGLANG_PLUGINS`
excludes it. The two are equal, so their ratio shows how much one process differs from another by chance. In
each round, each server answers the same 32 concurrent requests for 32 tokens each. While one server is timed,
the others are idle. The vocabulary has 151,936 tokens. Results for older SGLang
releases are kept as `results/unused_plugin_overhead_RELEASE.json`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.paired_timing import compare
from examples.tiny_model import make_tiny_model
from tests.engine.start_servers import run_engine

REQUESTS = 32
TOKENS = 32
SAMPLING = {"max_new_tokens": TOKENS, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
# Load only the plugin `sglang_topp_cpu`, which SGLang 0.5.12 needs on a CPU.
WITHOUT_PLUGIN = {"SGLANG_PLUGINS": "sglang_topp_cpu"}


def run() -> None:
    """Measure the time of the same requests without the plugin, and with the plugin installed but unused."""

    async def send(url: str, body: dict[str, Any]) -> None:
        limits = httpx.Limits(max_connections=REQUESTS)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            responses = await asyncio.gather(
                *(http.post("/generate", json={**body, "text": "x" * (8 + i)}) for i in range(REQUESTS))
            )
        for response in responses:
            response.raise_for_status()

    def sending(url: str, body: dict[str, Any]) -> Callable[[], None]:
        return lambda: asyncio.run(send(url, {"sampling_params": SAMPLING, **body}))

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", vocab_size=151_936, logit_std=7.0)
        with (
            run_engine(model, Path(folder) / "alone.log", env=WITHOUT_PLUGIN) as alone,
            run_engine(model, Path(folder) / "another.log", env=WITHOUT_PLUGIN) as another,
            run_engine(model, Path(folder) / "installed.log") as installed,
        ):
            for title, body in (("plain", {}), ("return_logprob", {"return_logprob": True})):
                compare(
                    f"{title}, {REQUESTS} requests x {TOKENS} tokens, vocabulary 151,936",
                    {
                        "SGLang alone": sending(alone.url, body),
                        "SGLang alone, another process": sending(another.url, body),
                        "with the plugin, unused": sending(installed.url, body),
                    },
                    rounds=9,
                    warmup=2,
                )
