"""Many requests of every kind at once: each gets all of its own sets."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import numpy as np

from sglang_topp import formats
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.start_servers import Engine, chunks_of

REQUESTS = 64


async def _send(http: httpx.AsyncClient, index: int, rng: random.Random) -> str:
    p = rng.choice([None, 0.5, 0.8, 0.95, 1.0])
    body: dict[str, Any] = {
        "rid": f"mixed-{index:02}",  # SGLang aborts every request whose id begins with the given one
        "text": "x" * rng.randint(1, 150),
        "sampling_params": {
            "max_new_tokens": rng.randint(1, 48),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_p": rng.choice([0.8, 1.0]),
            "ignore_eos": True,
        },
        "return_logprob": p is not None or rng.random() < 0.5,
        "top_logprobs_p": p,
        "return_logprobs_in_base64": rng.random() < 0.7,
        "stream": rng.random() < 0.4,
    }
    await asyncio.sleep(rng.random())
    if rng.random() < 0.15:
        body["sampling_params"]["max_new_tokens"] = 2000
        sending = asyncio.create_task(http.post("/generate", json=body))
        # SGLang forgets an abort that arrives before its request.
        while not sending.done():
            await asyncio.sleep(0.3 * rng.random())
            await http.post("/abort_request", json={"rid": body["rid"]})
        answer = await sending
        if answer.status_code != 200:
            return "aborted"
        chunks = chunks_of(answer.content) if body["stream"] else [answer.json()]
    elif body["stream"]:
        chunks = chunks_of((await http.post("/generate", json=body)).content)
    else:
        chunks = [(await http.post("/generate", json=body)).json()]

    for chunk in chunks:
        if chunk["meta_info"]["finish_reason"] and chunk["meta_info"]["finish_reason"]["type"] == "abort":
            # One set per visible token holds for an aborted request as well.
            if p and chunk["output_ids"]:
                checked_sets(chunk, p)
            return "aborted"
        if p:
            checked_sets(chunk, p)
        else:
            assert not formats.has_top_p(chunk["meta_info"])
    assert len(chunks[-1]["output_ids"]) == body["sampling_params"]["max_new_tokens"]
    return "with sets" if p else "without"


async def test_mixed_requests(engine: Engine) -> None:
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=2 * REQUESTS)
    async with httpx.AsyncClient(base_url=engine.url, timeout=300, limits=limits) as http:
        outcomes = await asyncio.gather(
            *(_send(http, index, random.Random(rng.random())) for index in range(REQUESTS))
        )
    assert outcomes.count("with sets") > 20
    assert outcomes.count("without") > 4
    assert outcomes.count("aborted") > 0


async def test_parallel_samples_beside_other_requests(engine: Engine) -> None:
    """SGLang first computes their prompt by a request for no tokens, in one pass with other requests."""

    async def send(http: httpx.AsyncClient, n: int) -> None:
        body = {
            "text": "hello",
            "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "n": n},
            "return_logprob": True,
            "top_logprobs_p": 0.9,
        }
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        for sample in answer.json() if n > 1 else [answer.json()]:
            assert len(checked_sets(sample, 0.9)) == 6

    async with httpx.AsyncClient(base_url=engine.url, timeout=300) as http:
        await asyncio.gather(*(send(http, 1 + 2 * (i % 2)) for i in range(24)))


async def test_prompts_whose_scoring_is_interrupted(engine: Engine) -> None:
    """A pause during the prefill, as before a weight push, makes SGLang score the prompt again."""

    async def send(http: httpx.AsyncClient, i: int) -> int:
        body = {
            "text": chr(97 + i) * 2000,
            "sampling_params": {"max_new_tokens": 40, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_p": 0.9,
            "return_logprobs_in_base64": True,
        }
        answer = (await http.post("/generate", json=body)).json()
        checked_sets(answer, 0.9)
        reported = answer["meta_info"]["input_token_logprobs"]
        sets = formats.decode_top_p(
            answer["meta_info"], [token_id for _, token_id, _ in reported], side="input"
        )
        expected = np.array([logprob for logprob, _, _ in reported[1:]], np.float32)
        np.testing.assert_array_equal(sets.sampled_logprobs[1:], expected)
        return int(answer["meta_info"]["num_retractions"])

    async with httpx.AsyncClient(base_url=engine.url, timeout=300) as http:
        sending = asyncio.gather(*(send(http, i) for i in range(4)))
        for _ in range(4):
            await asyncio.sleep(0.15)
            await http.post("/pause_generation", json={"mode": "retract"})
            await http.post("/continue_generation", json={})
        assert sum(await sending) > 0
