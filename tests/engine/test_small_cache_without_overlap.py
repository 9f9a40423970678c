"""The scheduler loop without overlap, incremental streams, no radix cache, and a small KV cache.

The cache is so small that requests are retracted and prefilled again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from sglang_topp import CandidateSets, formats
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.logit_processors import Slow
from tests.engine.pushed_weights import check_answer, restore_weights, versions_of
from tests.engine.requests_during_push import InFlight
from tests.engine.start_servers import Engine, chunks_of, read_events, run_engine
from tests.skip_missing_features import can_flush_while_paused, needs

WANTED = {"return_logprob": True, "top_logprobs_p": 0.9}
BOTH_FORMS = pytest.mark.parametrize("base64", [True, False], ids=["base64", "list"])


@pytest.fixture(scope="module")
def tight_engine(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    with run_engine(
        model_path,
        log_folder / "tight.log",
        "--disable-overlap-schedule",
        "--disable-radix-cache",
        "--incremental-streaming-output",
        "--max-total-tokens",
        "512",
        "--max-running-requests",
        "16",
        "--schedule-conservativeness",
        "0.05",
        "--enable-custom-logit-processor",
    ) as running:
        yield running


@BOTH_FORMS
def test_incremental_chunks_join_to_the_whole(tight_engine: Engine, base64: bool) -> None:
    chunks = tight_engine.stream(
        text="hello",
        sampling_params={"max_new_tokens": 30, "temperature": 1.0, "ignore_eos": True},
        return_logprobs_in_base64=base64,
        **WANTED,
    )
    assert len(chunks) > 1  # SGLang merges chunks if its HTTP process falls behind
    output_ids: list[int] = []
    parts = []
    for chunk in chunks:
        # Each chunk holds the tokens and the sets since the last one.
        parts.append(formats.decode_top_p(chunk["meta_info"], chunk["output_ids"]))
        output_ids += chunk["output_ids"]
    whole = CandidateSets.concat(parts)
    assert len(whole) == len(output_ids) == 30
    merged = formats.merge_stream_chunks([chunk["meta_info"] for chunk in chunks])
    assert formats.decode_top_p(merged, output_ids) == whole


@BOTH_FORMS
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_incremental_streams_in_openais_form_end_with_the_whole(
    tight_engine: Engine, route: str, base64: bool
) -> None:
    extra = {**WANTED, "return_logprobs_in_base64": base64, "ignore_eos": True}
    del extra["return_logprob"]
    with openai.OpenAI(base_url=f"{tight_engine.url}/v1", api_key="none", timeout=180) as client:
        if route == "chat":
            *others, last = client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "hello"}],
                max_completion_tokens=30,
                n=2,
                stream=True,
                extra_body=extra,
            )
        else:
            *others, last = client.completions.create(
                model="default", prompt="hello", max_tokens=30, n=2, stream=True, extra_body=extra
            )
    assert len(others) > 1  # SGLang merges chunks if its HTTP process falls behind
    for entry in last.sglext["candidate_sets"]:
        assert len(formats.decode_top_p(entry, entry["output_ids"], vocab_size=512)) == 30


async def test_chunks_that_sglang_merges_keep_their_sets(tight_engine: Engine) -> None:
    """A slow reader gets several chunks as one, with all their positions, in both forms."""

    async def read(http: httpx.AsyncClient, base64: bool) -> tuple[int, int]:
        body = {
            "text": "hello",
            "sampling_params": {"max_new_tokens": 60, "temperature": 1.0, "ignore_eos": True},
            "return_logprobs_in_base64": base64,
            "top_logprobs_num": 2,
            "stream": True,
            **WANTED,
        }
        tokens, chunks = 0, 0
        async with http.stream("POST", "/generate", json=body) as answer:
            async for event in read_events(answer):
                chunk = json.loads(event)
                sets = formats.decode_top_p(chunk["meta_info"], chunk["output_ids"])
                if base64:
                    assert chunk["meta_info"]["output_top_logprobs_shape"] == [len(sets), 2]
                tokens += len(sets)
                chunks += 1
        return tokens, chunks

    async with httpx.AsyncClient(base_url=tight_engine.url, timeout=300) as http:
        results = await asyncio.gather(*(read(http, i % 2 == 0) for i in range(6)))
    assert [tokens for tokens, _ in results] == [60] * 6


@BOTH_FORMS
async def test_retracted_requests_have_one_set_per_token(tight_engine: Engine, base64: bool) -> None:
    async def send(http: httpx.AsyncClient, i: int) -> Any:
        body = {
            "text": "x" * (10 + i),
            # With `ignore_eos`, SGLang reserves the whole length. Without it, SGLang admits more requests
            # than it can finish.
            "sampling_params": {"max_new_tokens": 100, "temperature": 1.0, "logit_bias": {"0": -100.0}},
            "return_logprobs_in_base64": base64,
            "logprob_start_len": 0,
            **WANTED,
        }
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    # After a retraction, SGLang admits fewer requests for a while, so a round may have no retraction.
    for _ in range(10):
        async with httpx.AsyncClient(base_url=tight_engine.url, timeout=300) as http:
            answers = await asyncio.gather(*(send(http, i) for i in range(12)))
        for answer in answers:
            assert len(checked_sets(answer, 0.9)) == 100
            reported = answer["meta_info"]["input_token_logprobs"]
            ids = [token_id for _, token_id, _ in reported]
            sets = formats.decode_top_p(answer["meta_info"], ids, side="input")
            expected = np.array([logprob for logprob, _, _ in reported[1:]], np.float32)
            np.testing.assert_array_equal(sets.sampled_logprobs[1:], expected)
        if sum(answer["meta_info"]["num_retractions"] for answer in answers):
            return
    raise AssertionError("no request was retracted")


@BOTH_FORMS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_aborted_while_it_waits(tight_engine: Engine, base64: bool, stream: bool) -> None:
    """Another code path of SGLang's writes its answer, which has the fields, but empty."""

    def body(rid: str, **fields: Any) -> dict[str, Any]:
        return {
            "rid": f"{rid}-{base64}-{stream}",
            "text": "hello",
            "sampling_params": {"max_new_tokens": 450, "ignore_eos": True},
            "return_logprobs_in_base64": base64,
            **WANTED,
            **fields,
        }

    async with httpx.AsyncClient(base_url=tight_engine.url, timeout=300) as http:
        # The cache holds one of these at a time, so the last one and later requests have to wait.
        names = [f"fills-{i}" for i in range(6)]
        slow = {"custom_logit_processor": Slow().to_str()}
        fillers = [asyncio.create_task(http.post("/generate", json=body(name, **slow))) for name in names]
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(http.post("/generate", json=body("waits", stream=stream)))
        while not waiting.done():
            await asyncio.sleep(0.1)
            await http.post("/abort_request", json={"rid": body("waits")["rid"]})
        assert not fillers[-1].done()
        for name in names:
            await http.post("/abort_request", json={"rid": body(name)["rid"]})
        aborted = await waiting
        others = [(await filler).json() for filler in fillers]
    if stream:
        (answer,) = chunks_of(aborted.content)
    else:
        answer = aborted.json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(checked_sets(answer, 0.9)) == 0
    # Another request was aborted in mid-generation, or had finished. Its visible tokens have their sets.
    assert sum(len(checked_sets(other, 0.9)) for other in others) > 0


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join incremental chunks to one answer."""
    parts = [chunk["meta_info"] for chunk in chunks]
    reported = [entry for part in parts for entry in part["output_token_logprobs"]]
    return {
        "text": "".join(chunk["text"] for chunk in chunks),
        "output_ids": [token_id for chunk in chunks for token_id in chunk["output_ids"]],
        "prompt_token_ids": chunks[-1]["prompt_token_ids"],
        "meta_info": {**parts[-1], **formats.merge_stream_chunks(parts), "output_token_logprobs": reported},
    }


@needs(Feature.WEIGHT_VERSIONS)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_incremental_chunks_over_new_weights(
    tight_engine: Engine, weight_folders: dict[str, Path], reference_models: dict[str, Any], mode: str
) -> None:
    """The answers continue after a pause, and one is aborted. No token of the chunks is lost or repeated."""
    is_flushed = mode == "retract" and can_flush_while_paused()
    pushed = ("other-1", "other-2") if is_flushed else ("head-1", "head-2")
    async with InFlight.at(tight_engine.url) as requests:
        for name, base64 in (("base64", True), ("list", False), ("aborted", True)):
            requests.send(
                name,
                text=name,
                sampling_params={"max_new_tokens": 140, "temperature": 1.0, "ignore_eos": True},
                custom_logit_processor=Slow().to_str(),
                return_logprobs_in_base64=base64,
                top_logprobs_num=2,
                stream=True,
                **WANTED,
            )
        for version in pushed:
            # A busy machine receives few large chunks, so waiting for several could outlast a request.
            await asyncio.gather(*(requests.move(name, 1) for name in ("base64", "list", "aborted")))
            await requests.pause(mode)
            await requests.push(weight_folders[version], version, flush_cache=is_flushed)
            if version == pushed[-1]:
                await requests.abort("aborted")
            await requests.go_on()
        await requests.answers()
        await asyncio.to_thread(restore_weights, tight_engine, weight_folders["default"])

    for name in requests.streams:
        chunks = requests.chunks(name)
        answer = joined(chunks)
        versions = check_answer(answer, 0.9, reference_models)
        if name == "aborted":
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 2 <= len(versions) < 140
            # It was waiting again, so there is no new token to send.
            assert mode == "in_place" or (chunks[-1]["output_ids"], chunks[-1]["text"]) == ([], "")
        else:
            assert len(versions) == 140
            assert list(dict.fromkeys(versions)) == ["default", *pushed]
        if name != "list":
            assert answer["meta_info"]["output_top_logprobs_shape"] == [len(versions), 2]
        shown = 0
        for chunk in chunks:
            shown += len(chunk["output_ids"])
            seen = {**chunk, "output_ids": answer["output_ids"][:shown]}
            assert versions_of(seen) == versions[:shown]
