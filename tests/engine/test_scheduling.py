"""Each token has one exact set, whatever the scheduler does with its request.

The cases: chunked prefill mixed with decoding, streams with an interval, changed logits, preemption,
sessions, and pauses. The expected sets come from SGLang's own log-probs of all tokens, in the same request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_topp import formats
from tests.engine.candidate_set_checks import check_whole
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.logit_processors import NoNumber, Slow, num_sampled
from tests.engine.start_servers import Engine, read_events, run_engine

SAMPLING = {"temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
WHOLE = {"return_logprob": True, "top_logprobs_p": 0.8, "top_logprobs_num": VOCAB_SIZE}
PROMPT_IDS = [97 + i % 26 for i in range(150)]


@pytest.fixture(scope="module")
def modes(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    arguments = ["--chunked-prefill-size", "64", "--enable-mixed-chunk", "--stream-interval", "3"]
    arguments += ["--enable-custom-logit-processor", "--enable-priority-scheduling"]
    arguments += ["--priority-scheduling-preemption-threshold", "5", "--max-running-requests", "4"]
    arguments += ["--max-total-tokens", "512", "--schedule-conservativeness", "0.05"]
    arguments += ["--enable-streaming-session"]
    with run_engine(model_path, log_folder / "modes.log", *arguments) as running:
        yield running


@pytest.fixture
async def http(modes: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=modes.url, timeout=300) as client:
        yield client


async def ask(http: httpx.AsyncClient, input_ids: list[int], max_new_tokens: int, **fields: Any) -> Any:
    """Return the answer to a request for sets and whole distributions. Any status but 200 fails the test."""
    sampling = {**SAMPLING, "max_new_tokens": max_new_tokens, **fields.pop("sampling", {})}
    body = {"input_ids": input_ids, "sampling_params": sampling, **WHOLE, **fields}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def follow(
    http: httpx.AsyncClient, input_ids: list[int], max_new_tokens: int, begun: asyncio.Event
) -> Any:
    """Send it as a slow stream with the prompt's sets. Return the last chunk, which holds everything."""
    sampling = {**SAMPLING, "max_new_tokens": max_new_tokens}
    body = {"input_ids": input_ids, "sampling_params": sampling, "logprob_start_len": 0, **WHOLE}
    body |= {"custom_logit_processor": Slow().to_str(), "priority": 0, "stream": True}
    async with http.stream("POST", "/generate", json=body) as answer:
        async for event in read_events(answer):
            last = event
            begun.set()
    return json.loads(last)


async def under_way(
    http: httpx.AsyncClient, prompts: list[list[int]], max_new_tokens: int
) -> list[asyncio.Task[Any]]:
    """Yield these requests once each of them has begun to answer."""
    begun = [asyncio.Event() for _ in prompts]
    tasks = [
        asyncio.create_task(follow(http, input_ids, max_new_tokens, event))
        for input_ids, event in zip(prompts, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    return tasks


async def test_chunks_of_a_prompt_beside_decoding(http: httpx.AsyncClient) -> None:
    plain = {"top_logprobs_p": None, "top_logprobs_num": 0, "return_logprob": False}
    decoding = [
        asyncio.create_task(ask(http, [70 + i], 40, **(plain if i % 2 else {}), priority=0)) for i in range(3)
    ]
    await asyncio.sleep(0.3)
    scored = await ask(http, PROMPT_IDS, 5, logprob_start_len=0, priority=0)
    assert len(check_whole(scored, 0.8, PROMPT_IDS)) == 5
    for i, answer in enumerate(await asyncio.gather(*decoding)):
        assert len(answer["output_ids"]) == 40
        if i % 2:
            assert not formats.has_top_p(answer["meta_info"])
        else:
            check_whole(answer, 0.8)


def test_streams_in_steps_of_three(modes: Engine) -> None:
    chunks = modes.stream(
        input_ids=PROMPT_IDS[:100],
        sampling_params={**SAMPLING, "max_new_tokens": 20},
        logprob_start_len=90,
        priority=0,
        **WHOLE,
    )
    steps = [len(check_whole(chunk, 0.8, PROMPT_IDS[90:100])) for chunk in chunks]
    assert steps[-1] == 20
    assert max(later - earlier for earlier, later in pairwise(steps)) > 1


class OnlyAbove(CustomLogitProcessor):
    """Forbids every token below the id that a request names."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            logits[row, : params["least"]] = -float("inf")
        return logits


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_changed_logits_are_what_the_sets_are_taken_from(
    http: httpx.AsyncClient, temperature: float
) -> None:
    def constrained(least: int) -> Any:
        sampling = {"custom_params": {"least": least}, "temperature": temperature}
        processor = OnlyAbove().to_str()
        return ask(http, [80], 12, sampling=sampling, custom_logit_processor=processor, priority=0)

    answers = await asyncio.gather(constrained(500), constrained(300), ask(http, [81], 12, priority=0))
    for answer, least in zip(answers, (500, 300, 0), strict=True):
        sets = check_whole(answer, 0.8)
        assert len(sets) == 12
        assert sets.token_ids.min() >= least


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_a_set_ends_at_once(
    http: httpx.AsyncClient, tmp_path: Path, stream: bool
) -> None:
    """SGLang sends the tokens of an unstreamed request after every 50th one."""
    seen = tmp_path / "seen"
    sampling = {**SAMPLING, "temperature": 0, "custom_params": {"at": 5, "slow_after": 5, "seen": str(seen)}}
    body = {"input_ids": [80], "sampling_params": {**sampling, "max_new_tokens": 300}, "stream": stream}
    answer = await http.post(
        "/generate", json={**body, **WHOLE, "custom_logit_processor": NoNumber().to_str(), "priority": 0}
    )
    assert stream or answer.status_code == 500
    # With overlap scheduling, the processor sees the output without its last token.
    assert "no candidate set at position " in answer.text
    assert "NaN" in answer.text
    assert num_sampled(seen) <= 5 + 25  # the HTTP process aborts it meanwhile


async def test_preempted_requests_have_one_set_per_token(http: httpx.AsyncClient) -> None:
    prompts = [[70 + i, *PROMPT_IDS[:20]] for i in range(4)]
    low = await under_way(http, prompts, 80)
    # Every place of the batch is taken.
    assert len(check_whole(await ask(http, [90], 5, priority=10), 0.8)) == 5
    answers = await asyncio.gather(*low)
    for input_ids, answer in zip(prompts, answers, strict=True):
        assert len(check_whole(answer, 0.8, input_ids)) == 80
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


async def test_the_turns_of_a_session(http: httpx.AsyncClient) -> None:
    session = (await http.post("/open_session", json={"capacity_of_str_len": 1000})).json()
    context: list[int] = []
    rid = None
    for turn in ([70, 71, 72], [80], [90, 91]):
        params = {"id": session, "rid": rid}
        answer = await ask(http, turn, 8, session_params=params, logprob_start_len=0, priority=0)
        context += turn
        assert answer["meta_info"]["prompt_tokens"] == len(context)
        assert len(check_whole(answer, 0.8, context)) == 8
        context += answer["output_ids"]
        rid = answer["meta_info"]["id"]
    assert (await http.post("/close_session", json={"session_id": session})).status_code == 200


async def test_a_streaming_session_scores_no_prompt(http: httpx.AsyncClient) -> None:
    order = {"capacity_of_str_len": 1000, "streaming": True}
    session = (await http.post("/open_session", json=order)).json()
    turn = {"session_params": {"id": session}, "priority": 0}
    body = {"input_ids": [70, 71, 72], "sampling_params": {**SAMPLING, "max_new_tokens": 8}, **WHOLE, **turn}
    refused = await http.post("/generate", json={**body, "logprob_start_len": 0})
    assert refused.status_code == 400
    assert "logprob_start_len: got 0 in a streaming session" in refused.text
    for ids in ([70, 71, 72], [80]):
        answer = await ask(http, ids, 8, **turn)
        assert len(check_whole(answer, 0.8)) == 8
    assert (await http.post("/close_session", json={"session_id": session})).status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_pause_loses_no_set_and_doubles_none(http: httpx.AsyncClient, mode: str) -> None:
    prompts = [[70 + i, *PROMPT_IDS[:15]] for i in range(3)]
    running = await under_way(http, prompts, 100)
    assert (await http.post("/pause_generation", json={"mode": mode})).status_code == 200
    try:
        await asyncio.sleep(0.5)
        if mode != "abort":
            assert not any(each.done() for each in running)
    finally:
        assert (await http.post("/continue_generation", json={})).status_code == 200
    for ids, answer in zip(prompts, await asyncio.gather(*running), strict=True):
        sets = check_whole(answer, 0.8, ids)
        if mode == "abort":
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(sets) < 100
        else:
            assert len(sets) == 100
