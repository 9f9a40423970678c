"""Interrupted and resumed rollouts on the real engine equal uninterrupted ones.

Decoding is greedy, so there is one right answer. The expected sets come from a transformers forward pass, as
in `test_pushes_during_requests`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from sglang_topp.errors import BadRequestError
from sglang_topp_client import AsyncRolloutClient, Rollout
from sglang_topp_client.wire.records import from_record, to_record
from sglang_topp_patches.releases import Feature
from tests.engine.pushed_weights import check_sets, restore_weights
from tests.engine.requests_during_push import InFlight
from tests.engine.start_servers import Engine, run_sidecar
from tests.skip_missing_features import skip_without

skip_without(Feature.RESUMED)

P = 0.9
PROMPTS = ["The quick brown fox", "a", "0123456789" * 8]
LENGTH = 12
GREEDY = {"max_new_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
# Only tokens that have a text: one without a text could come between two tokens of a stop string.
SPELLED = {**GREEDY, "logit_bias": {str(token): -1000.0 for token in range(257, 512)}}
LONG = {"max_new_tokens": 3000, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[AsyncRolloutClient]:
    async with AsyncRolloutClient(engine.url) as client:
        yield client


@pytest.fixture
def as_before(engine: Engine, model_path: Path) -> Iterator[None]:
    """The engine is shared, so restore its weights afterwards, and continue generation."""
    yield
    restore_weights(engine, model_path)


def check(rollout: Rollout, reference_models: dict[str, Any], p: float = P) -> None:
    """Check that each token has one set, from the weights that the rollout names for it."""
    assert rollout.candidates is not None
    assert rollout.weight_versions is not None
    assert len(rollout.output_ids) == len(rollout.logprobs) == len(rollout.weight_versions)
    np.testing.assert_array_equal(rollout.candidates.sampled_logprobs, rollout.logprobs)
    prompt, output = rollout.prompt_ids.tolist(), rollout.output_ids.tolist()
    check_sets(rollout.candidates, p, rollout.weight_versions, prompt, output, reference_models)


def check_begins(whole: Rollout, part: Rollout) -> None:
    """Check that `whole` begins with `part`, bit for bit."""
    num_tokens = len(part.output_ids)
    assert whole.candidates is not None
    np.testing.assert_array_equal(whole.prompt_ids, part.prompt_ids)
    np.testing.assert_array_equal(whole.output_ids[:num_tokens], part.output_ids)
    np.testing.assert_array_equal(whole.logprobs[:num_tokens], part.logprobs)
    assert whole.candidates[:num_tokens] == part.candidates
    assert (whole.weight_versions or ())[:num_tokens] == part.weight_versions
    assert (whole.prompt_index, whole.sample_index) == (part.prompt_index, part.sample_index)


async def parts_of(
    client: AsyncRolloutClient, prompts: list[Any], sampling: dict[str, Any], lengths: range
) -> list[Rollout]:
    """Return each prompt's rollout, cut by the engine after each number of tokens."""
    each = [{**sampling, "max_new_tokens": length} for _ in prompts for length in lengths]
    repeated = [prompt for prompt in prompts for _ in lengths]
    return await client.generate(repeated, each, top_logprobs_p=P)


async def test_cut_at_every_token(client: AsyncRolloutClient, reference_models: dict[str, Any]) -> None:
    wholes = await client.generate(PROMPTS, GREEDY, top_logprobs_p=P, on_abort="resume")
    parts = await parts_of(client, PROMPTS, GREEDY, range(1, LENGTH))
    # Cut before the first token, and after the last one.
    empty = await client.generate(PROMPTS, {**GREEDY, "max_new_tokens": 0}, top_logprobs_p=P)
    parts += [*empty, *wholes]
    resumed = await client.resume(parts, GREEDY, top_logprobs_p=P)
    truth = {whole.prompt_ids.tobytes(): whole for whole in wholes}
    for part, rollout in zip(parts, resumed, strict=True):
        whole = truth[part.prompt_ids.tobytes()]
        assert rollout.output_ids.tolist() == whole.output_ids.tolist(), len(part.output_ids)
        assert (rollout.text, rollout.finish_reason) == (whole.text, "length")
        assert rollout.latency_s >= part.latency_s
        check_begins(rollout, part)
    for rollout in resumed[:: LENGTH // 2]:
        check(rollout, reference_models)


async def test_cut_twice(client: AsyncRolloutClient) -> None:
    (whole,) = await client.generate([PROMPTS[0]], GREEDY, top_logprobs_source="sampler", on_abort="return")
    (part,) = await client.generate(
        [PROMPTS[0]], {**GREEDY, "max_new_tokens": 5}, top_logprobs_source="sampler"
    )
    for length in (6, 7, 10, LENGTH):
        longer = {**GREEDY, "max_new_tokens": length}
        (more,) = await client.resume(part, longer, top_logprobs_source="sampler")
        check_begins(more, part)
        part = more
    assert part.output_ids.tolist() == whole.output_ids.tolist()
    assert part.text == whole.text
    np.testing.assert_array_equal(part.candidates.sizes, 1)


def stops_of(text: str) -> list[str]:
    """Return some strings of several characters that occur in this text, the earliest first."""
    found = {text[i : i + 3]: i for i in reversed(range(len(text) - 3)) if "\ufffd" not in text[i : i + 3]}
    return [stop for stop, at in sorted(found.items(), key=lambda item: item[1]) if at > 1][:3]


def test_a_stop_string_whose_last_character_has_two_tokens(engine: Engine, model_path: Path) -> None:
    """Once the first of them is there, the text before it may still begin the stop string."""
    *prompt_ids, first, second = AutoTokenizer.from_pretrained(model_path).encode("hello aé")
    sampling = {
        "n": 32,
        "max_new_tokens": 4,
        "temperature": 50.0,  # both of the biased tokens are about as likely, and others are not
        "logit_bias": {str(token): 1000.0 for token in (first, second)},
        "stop": ["aé"],
        "stream_interval": 1,
    }
    body = {"input_ids": prompt_ids, "resumed_tokens": 1, "sampling_params": sampling}
    last = {chunk["index"]: chunk for chunk in engine.stream(**body)}
    stopped = [chunk for chunk in last.values() if chunk["output_ids"][:2] == [first, second]]
    assert stopped, "none of 32 samples holds the stop string"
    for chunk in stopped:
        assert chunk["meta_info"]["finish_reason"] == {"type": "stop", "matched": "aé"}
        assert chunk["text"] == ""


@pytest.mark.parametrize("way", ["stop", "kept", "regex"])
async def test_a_stop_string_across_the_cut(client: AsyncRolloutClient, way: str) -> None:
    long = {**SPELLED, "max_new_tokens": 30}
    (free,) = await client.generate([PROMPTS[0]], long, top_logprobs_p=P)
    stops = stops_of(free.text)
    assert stops, free.text
    stopping: dict[str, Any] = {"stop": stops, "no_stop_trim": way == "kept"}
    if way == "regex":
        # SGLang searches as many tokens as the longest match has characters, and some characters have several
        # tokens.
        stopping = {"stop_regex": [f".{{0,9}}{re.escape(stop)}" for stop in stops]}
    sampling = {**long, **stopping}
    (whole,) = await client.generate([PROMPTS[0]], sampling, top_logprobs_p=P, on_abort="resume")
    assert whole.finish_reason == "stop"
    num_tokens = len(whole.output_ids)
    assert 1 < num_tokens < 30
    # The part is cut without the stop string, because an engine that stops there has already found it.
    parts = await parts_of(client, [PROMPTS[0]], long, range(1, num_tokens))
    for part, rollout in zip(parts, await client.resume(parts, sampling, top_logprobs_p=P), strict=True):
        assert rollout.output_ids.tolist() == whole.output_ids.tolist(), len(part.output_ids)
        assert (rollout.text, rollout.finish_reason) == (whole.text, "stop"), len(part.output_ids)
        check_begins(rollout, part)
    (same,) = await client.resume(whole, sampling, top_logprobs_p=P)
    assert same.request_id == whole.request_id


async def test_characters_that_are_cut_in_two(client: AsyncRolloutClient) -> None:
    """Every character of this answer has several bytes. The text is the same wherever the answer is cut."""
    word = "東京"
    bias = {str(token): 1000.0 for token in await tokens_of(client, word)}
    sampling = {**GREEDY, "logit_bias": bias, "max_new_tokens": 12}
    (whole,) = await client.generate([word], sampling, top_logprobs_p=P)
    parts = await parts_of(client, [word], sampling, range(1, 12))
    for rollout in await client.resume(parts, sampling, top_logprobs_p=P):
        assert rollout.output_ids.tolist() == whole.output_ids.tolist()
        assert rollout.text == whole.text


async def tokens_of(client: AsyncRolloutClient, text: str) -> list[int]:
    (rollout,) = await client.generate([text], {"max_new_tokens": 1})
    return rollout.prompt_ids.tolist()


async def test_the_end_token_and_the_least_number_of_tokens(client: AsyncRolloutClient) -> None:
    (free,) = await client.generate([PROMPTS[1]], GREEDY, top_logprobs_p=P)
    ids = free.output_ids.tolist()
    stop = next(token for token in ids[6:] if token not in ids[:6])
    for least in (0, 9):
        sampling = {**GREEDY, "ignore_eos": False, "stop_token_ids": [stop], "min_new_tokens": least}
        (whole,) = await client.generate([PROMPTS[1]], sampling, top_logprobs_p=P)
        num_tokens = len(whole.output_ids)
        parts = [
            part
            for part in await parts_of(client, [PROMPTS[1]], {**GREEDY}, range(1, min(num_tokens, 7)))
            if part.output_ids.tolist() == whole.output_ids.tolist()[: len(part.output_ids)]
        ]
        assert len(parts) > 3
        for rollout in await client.resume(parts, sampling, top_logprobs_p=P):
            assert rollout.output_ids.tolist() == whole.output_ids.tolist()
            assert (rollout.text, rollout.finish_reason) == (whole.text, whole.finish_reason)


@pytest.mark.usefixtures("as_before")
async def test_interruptions_that_nobody_sees(
    engine: Engine,
    client: AsyncRolloutClient,
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
) -> None:
    """Weights are pushed in pauses that abort. Samples arrive complete, with the weights of each token."""
    length = 1000  # in each round, all are in flight before one of them has ended
    sampling = {**LONG, "max_new_tokens": length, "n": 2}
    async with InFlight.at(engine.url) as requests:
        await client.generate([PROMPTS[0]], {"max_new_tokens": 1})
        asked = asyncio.create_task(
            client.generate(PROMPTS[:2], sampling, top_logprobs_p=P, on_abort="resume", request_id="whole")
        )
        for number, version in enumerate(("other-1", "head-1")):
            requests.send(f"clock-{number}", **clock())
            await requests.arrive(others=4)
            await requests.move(f"clock-{number}", 6)
            await requests.pause("abort")
            await requests.push(weight_folders[version], version)
            assert not asked.done()
            await requests.go_on()
        rollouts = await asked
    assert [(one.prompt_index, one.sample_index) for one in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rollout in rollouts:
        assert rollout.finish_reason == "length"
        assert len(rollout.output_ids) == length
        check(rollout, reference_models)
    versions = {version for rollout in rollouts for version, _ in rollout.weight_spans or ()}
    assert versions == {"default", "other-1", "head-1"}
    assert max(len(rollout.weight_spans or ()) for rollout in rollouts) == 3


def clock() -> dict[str, Any]:
    return {
        "text": "clock",
        "stream": True,
        "sampling_params": LONG,
        "return_logprob": True,
        "top_logprobs_p": P,
        "return_logprobs_in_base64": True,
    }


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("mode", [None, "retract", "in_place"])
async def test_an_abort_returns_what_was_generated(
    engine: Engine, client: AsyncRolloutClient, reference_models: dict[str, Any], mode: str | None
) -> None:
    sampling = {**LONG, "n": 2}
    async with InFlight.at(engine.url) as requests:
        await client.generate([PROMPTS[0]], {"max_new_tokens": 1})
        asked = asyncio.create_task(
            client.generate(PROMPTS[:2], sampling, top_logprobs_p=P, on_abort="return", request_id="part")
        )
        requests.send("clock", **clock())
        await requests.arrive(others=4)
        await requests.move("clock", 8)
        if mode is not None:
            await requests.pause(mode)
        await client.abort("part")
        assert asked.done()
        parts = await asked
        if mode is not None:
            await requests.go_on()
            await requests.abort("clock")
            await requests.until_idle()
    assert len(parts) == 4
    for part in parts:
        assert part.finish_reason == "abort"
        # With only the first token, the streamed samples would have been lost.
        assert 1 < len(part.output_ids) < 3000
        check(part, reference_models)
    longest = max(len(part.output_ids) for part in parts)
    longer = {**sampling, "max_new_tokens": longest + 5}
    for part, whole in zip(parts, await client.resume(parts, longer, top_logprobs_p=P), strict=True):
        assert (whole.finish_reason, len(whole.output_ids)) == ("length", longest + 5)
        check_begins(whole, part)
        check(whole, reference_models)


async def test_an_abort_while_they_wait(engine: Engine, client: AsyncRolloutClient) -> None:
    """Prompts are prefilled one after the other, in chunks. Some samples have begun, others have no token."""
    prompts = [[number + 200] * 2500 for number in range(6)]
    sampling = {**LONG, "max_new_tokens": 4}
    async with InFlight.at(engine.url) as requests:
        await client.generate([PROMPTS[0]], {"max_new_tokens": 1})
        asked = asyncio.create_task(
            client.generate(prompts, sampling, top_logprobs_p=P, on_abort="return", request_id="queue")
        )
        while not asked.done():
            load = (await requests.http.get("/v1/loads")).json()["loads"][0]
            if load["num_waiting_reqs"] >= 2:
                break
            await asyncio.sleep(0.01)
        await client.abort("queue")
        parts = await asked
    assert [part.prompt_ids.tolist() for part in parts] == prompts
    assert "abort" in {part.finish_reason for part in parts}
    waited = [part for part in parts if not len(part.output_ids)]
    assert waited
    for part in waited:
        assert (part.finish_reason, part.text, part.weight_spans) == ("abort", "", ())
        assert part.candidates is not None
        assert len(part.candidates) == len(part.logprobs) == 0
    for part, whole in zip(parts, await client.resume(parts, sampling, top_logprobs_p=P), strict=True):
        assert len(whole.output_ids) == 4
        check_begins(whole, part)


async def test_turns_with_a_tools_tokens_between(
    client: AsyncRolloutClient, reference_models: dict[str, Any]
) -> None:
    tool = [40, 41, 42, 300]
    (first,) = await client.generate([PROMPTS[0]], {**GREEDY, "max_new_tokens": 6}, top_logprobs_p=P)
    extended = first.extend(tool)
    (second,) = await client.resume(extended, {**GREEDY, "max_new_tokens": 9}, top_logprobs_p=P)
    history = [*first.prompt_ids.tolist(), *first.output_ids.tolist(), *tool]
    (alone,) = await client.generate([history], {**GREEDY, "max_new_tokens": 9}, top_logprobs_p=P)
    assert second.output_ids.tolist() == [*first.output_ids.tolist(), *tool, *alone.output_ids.tolist()]
    assert second.text == alone.text
    assert second.loss_mask.tolist() == [1] * 6 + [0] * 4 + [1] * 9
    assert second.weight_spans == (("default", 6), ("", 4), ("default", 9))
    # The cut is within the second turn.
    (part,) = await client.resume(extended, {**GREEDY, "max_new_tokens": 4}, top_logprobs_p=P)
    (whole,) = await client.resume(part, {**GREEDY, "max_new_tokens": 9}, top_logprobs_p=P)
    assert whole.output_ids.tolist() == second.output_ids.tolist()
    assert whole.text == second.text
    check_begins(whole, part)
    assert whole.candidates is not None
    turn = replace(
        whole,
        prompt_ids=np.array(history, np.int32),
        output_ids=whole.output_ids[10:],
        logprobs=whole.logprobs[10:],
        candidates=whole.candidates[10:],
        weight_spans=(("default", 9),),
    )
    check(turn, reference_models)


async def test_through_the_sidecar(engine: Engine, reference_models: dict[str, Any]) -> None:
    with run_sidecar(engine.url) as url:
        async with (
            AsyncRolloutClient(url) as client,
            AsyncRolloutClient(engine.url) as direct,
            httpx.AsyncClient(base_url=url, timeout=120) as http,
        ):
            (whole,) = await direct.generate([PROMPTS[0]], GREEDY, top_logprobs_p=P)
            # Its retries wait until the sidecar is ready.
            parts = await parts_of(client, [PROMPTS[0]], GREEDY, range(2, LENGTH, 4))
            for part, rollout in zip(
                parts, await client.resume(parts, GREEDY, top_logprobs_p=P), strict=True
            ):
                assert rollout.output_ids.tolist() == whole.output_ids.tolist()
                assert rollout.text == whole.text
                check_begins(rollout, part)

            records = [
                to_record(parts[0]),
                to_record(parts[1].extend([7, 8])),
                to_record(whole),
            ]
            body = {"rollouts": records, "sampling_params": GREEDY, "top_logprobs_p": P}
            answer = await http.post("/rollouts", json=body)
            assert answer.status_code == 200, answer.text
            longer = [from_record(Rollout, one, may_be_extended=True) for one in answer.json()["rollouts"]]
            assert longer[0].output_ids.tolist() == longer[2].output_ids.tolist() == whole.output_ids.tolist()
            assert longer[1].loss_mask.tolist() == [1] * len(parts[1].output_ids) + [0, 0] + [1] * LENGTH
            check(longer[0], reference_models)

            for order in ({"request_id": "fleet"}, {"all": True}):
                asked = asyncio.create_task(
                    client.generate(
                        PROMPTS[:2],
                        {**LONG, "n": 2},
                        top_logprobs_p=P,
                        on_abort="return",
                        request_id="fleet",
                    )
                )
                async with InFlight.at(engine.url) as requests:
                    requests.send("clock", **clock())
                    await requests.arrive(others=4)
                    await requests.move("clock", 6)
                    if "all" in order:
                        answer = await http.post("/abort", json=order)
                        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "aborted": None})
                    else:
                        await client.abort("fleet")
                    made = await asked
                assert [one.finish_reason for one in made] == ["abort"] * 4
                for part in made:
                    check(part, reference_models)


async def test_what_cannot_be_exact_is_refused_by_the_engine_too(engine: Engine) -> None:
    body = {"input_ids": [1, 2, 3], "resumed_tokens": 2, "sampling_params": {"max_new_tokens": 1}}
    for params, words in (
        ({"frequency_penalty": 0.5}, "frequency_penalty: got 0.5"),
        ({"regex": "a"}, "regex: got 'a'"),
    ):
        answer = engine.post(**{**body, "sampling_params": {"max_new_tokens": 1, **params}})
        assert answer.status_code == 400
        assert words in answer.text
    for changed, words in (
        ({"resumed_tokens": 4}, "resumed_tokens: got 4 with a prompt of 3 token ids"),
        ({"resumed_tokens": -1}, "resumed_tokens: got -1"),
        ({"resumed_tokens": True}, "resumed_tokens: got True"),
        ({"resumed_tokens": [0, 1]}, "resumed_tokens: got 2 values for 1 prompts"),
    ):
        answer = engine.post(**{**body, **changed})
        assert answer.status_code == 400
        assert words in answer.text
    async with AsyncRolloutClient(engine.url) as client:
        (part,) = await client.generate([[1, 2, 3]], {"max_new_tokens": 3, "temperature": 0.0})
        ids, logprobs = np.full(5000, 5, np.int32), np.zeros(5000, np.float32)
        longer = {"max_new_tokens": 6000, "temperature": 0.0}
        with pytest.raises(BadRequestError, match=r"resumed_tokens: got 5000 with a prompt of 5003 tok"):
            await client.resume(replace(part, output_ids=ids, logprobs=logprobs), longer)
