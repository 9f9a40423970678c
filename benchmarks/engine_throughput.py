"""Benchmark of a patched SGLang: throughput and response size, with and without candidate sets.

Each contender sends 32 concurrent requests of 32 tokens each. The vocabulary has 151,936 tokens. One patched
SGLang on this machine serves all contenders in turn, and then another one those of a mixture of 8 experts, 2
of them for each token, in 2 layers. Timing starts when the first request is sent, and ends when the last
response is read. Sizes are response bytes per generated token.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.paired_timing import compare, compare_counts
from examples.tiny_model import make_tiny_model
from tests.engine.start_servers import run_engine

REQUESTS = 32
TOKENS = 32
SAMPLING = {"max_new_tokens": TOKENS, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True}

CONTENDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "return_logprob": {"return_logprob": True},
    "top_logprobs_num=128": {"return_logprob": True, "top_logprobs_num": 128},
    "native return_sampling_mask, top_k 4096": {
        "return_logprob": True,
        "return_sampling_mask": True,
        "sampling_params": {**SAMPLING, "top_k": 4096},
    },
    "candidate sets, p = 0.95, base64": {
        "return_logprob": True,
        "top_logprobs_p": 0.95,
        "return_logprobs_in_base64": True,
    },
    "sampler as source, base64": {
        "return_logprob": True,
        "top_logprobs_source": "sampler",
        "return_logprobs_in_base64": True,
    },
    "return_logprob, top_k 20": {"return_logprob": True, "sampling_params": {**SAMPLING, "top_k": 20}},
    "sampler as source, top_k 20, base64": {
        "return_logprob": True,
        "top_logprobs_source": "sampler",
        "return_logprobs_in_base64": True,
        "sampling_params": {**SAMPLING, "top_k": 20},
    },
}

OF_EXPERTS: dict[str, dict[str, Any]] = {
    "experts: plain": {},
    "experts: with routes": {"return_routed_experts": True},
    "experts: with sets": CONTENDERS["candidate sets, p = 0.95, base64"],
    "experts: with sets and routes": {
        **CONTENDERS["candidate sets, p = 0.95, base64"],
        "return_routed_experts": True,
    },
}


def run() -> None:
    """Print the throughput relative to plain generation, and the response sizes."""
    bytes_per_token: dict[str, float] = {}

    async def send(url: str, label: str) -> None:
        body = {"sampling_params": SAMPLING, **(CONTENDERS | OF_EXPERTS)[label]}
        limits = httpx.Limits(max_connections=REQUESTS)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            responses = await asyncio.gather(
                *(http.post("/generate", json={**body, "text": "x" * (8 + i)}) for i in range(REQUESTS))
            )
        for response in responses:
            response.raise_for_status()
        bytes_per_token[label] = sum(len(response.content) for response in responses) / (REQUESTS * TOKENS)

    def compare_on(title: str, contenders: Iterable[str], num_experts: int, *options: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = make_tiny_model(
                Path(folder) / "model", vocab_size=151_936, logit_std=7.0, num_experts=num_experts
            )
            with run_engine(model, Path(folder) / "engine.log", *options) as engine:
                compare(
                    f"{title}, {REQUESTS} requests x {TOKENS} tokens, vocabulary 151,936",
                    {
                        label: (lambda label=label: asyncio.run(send(engine.url, label)))
                        for label in contenders
                    },
                    rounds=5,
                    picture="engine_throughput",
                )

    compare_on("engine", CONTENDERS, 0)
    compare_on("engine with experts", OF_EXPERTS, 8, "--enable-return-routed-experts")
    compare_counts("size of the responses", "bytes per token", bytes_per_token)
