"""`return_exceptions=True`: a failed sample leaves the others alone, and its error is in its place."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient, Score

PROMPTS = [[5], [6], [7]]
BAD = [6]
SAMPLING = {"max_new_tokens": 12}


@pytest.fixture(params=["sglang", "sidecar"])
def served(request, fakes):
    """A server of each kind, which refuses calls with the prompt `BAD`."""
    server = request.getfixturevalue("engine" if request.param == "sglang" else "sidecar")
    answer = server.paths[server.main_path]

    async def refuse_bad(asked, reply):
        body = asked.body
        if BAD in body.get("prompts", body.get("sequences", [body.get("input_ids")])):
            return await reply.json({"error": {"message": "scripted"}}, 400)
        await (fakes.answer_score_frames if "sequences" in body else answer)(asked, reply)

    for path in {server.main_path, "/scores"} & set(server.paths):
        server.paths[path] = refuse_bad
    return server


@pytest.fixture
async def client(served, no_leftovers):
    async with AsyncRolloutClient(served.url) as client:
        yield client


async def hang(asked, reply):
    await reply.start()
    await reply.hung_up()


def check(outcomes, fakes, num_samples=1):
    """Check that all entries are as generated, and that those of the bad prompt are its error."""
    places = [(prompt, k) for prompt in PROMPTS for k in range(num_samples)]
    for outcome, (prompt, k) in zip(outcomes, places, strict=True):
        if prompt == BAD:
            assert type(outcome) is errors.BadRequestError
            assert "scripted" in str(outcome)
        else:
            assert outcome.candidates == fakes.sample(prompt, k).candidates


@pytest.mark.parametrize("n", [1, 3])
async def test_a_refused_prompt_has_an_error_per_sample(client, fakes, n):
    outcomes = await client.generate(PROMPTS, {"n": n}, top_logprobs_p=0.9, return_exceptions=True)
    check(outcomes, fakes, n)
    assert [(o.prompt_index, o.sample_index) for o in outcomes if isinstance(o, Rollout)] == [
        (i, k) for i in (0, 2) for k in range(n)
    ]


async def test_without_it_the_first_error_is_raised(client):
    with pytest.raises(errors.BadRequestError, match="scripted"):
        await client.generate(PROMPTS)
    with pytest.raises(errors.BadRequestError, match="scripted"):
        await client.generate(PROMPTS, return_exceptions=False)


def test_the_synchronous_client_does_the_same(served, fakes):
    with RolloutClient(served.url) as client:
        check(client.generate(PROMPTS, top_logprobs_p=0.9, return_exceptions=True), fakes)
        assert [type(outcome) for outcome in client.score([[5, 8], BAD], return_exceptions=True)] == [
            Score,
            errors.BadRequestError,
        ]


async def test_scores_and_errors_stand_in_the_order_of_the_sequences(client, fakes):
    sequences = [[5, 6], BAD, [7, 8, 9]]
    outcomes = await client.score(sequences, top_logprobs_p=0.5, return_exceptions=True)
    assert type(outcomes[1]) is errors.BadRequestError
    for i in (0, 2):
        assert outcomes[i].candidates == fakes.score(sequences[i]).candidates
        assert outcomes[i].sequence_index == i


async def test_samples_that_arrived_before_the_failure_are_kept(engine, fakes):
    async def fail_behind_the_second(asked, reply):
        await reply.start()
        await reply.event(fakes.chunk(fakes.sample(asked.body["input_ids"], 1)))
        await reply.event({"error": {"message": "scripted", "code": 400}})
        await reply.end()

    engine.script.append(fail_behind_the_second)
    async with AsyncRolloutClient(engine.url) as client:
        outcomes = await client.generate([5], {"n": 3}, top_logprobs_p=0.9, return_exceptions=True)
    assert outcomes[1].candidates == fakes.sample([5], 1).candidates
    assert type(outcomes[0]) is errors.BadRequestError
    assert outcomes[0] is outcomes[2]


async def test_an_inexact_sample_is_an_error_in_its_place(engine, fakes):
    async def without_sets(asked, reply):
        chunk = fakes.chunk(fakes.sample(asked.body["input_ids"], 0))
        del chunk["meta_info"]["output_top_p_logprobs_lengths"]
        await reply.start()
        await reply.event(chunk)
        await reply.end()

    engine.script.append(without_sets)
    async with AsyncRolloutClient(engine.url) as client:
        outcomes = await client.generate([[5], [7]], top_logprobs_p=0.9, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Rollout", "WireError"]


@pytest.mark.parametrize("code", [429, 503])
async def test_a_call_is_retried_before_it_fails(served, client, fakes, code):
    async def busy(asked, reply):
        await reply.json({"error": {"message": "later"}}, code)

    served.script += [busy] * 4
    check(await client.generate(PROMPTS, top_logprobs_p=0.9, return_exceptions=True), fakes)


@pytest.mark.parametrize("call", ["stream", "stream_scores"])
async def test_streams_yield_errors_that_name_their_prompt(client, fakes, call):
    outcomes = [one async for one in getattr(client, call)(PROMPTS, return_exceptions=True)]
    assert sorted(type(one).__name__ for one in outcomes) == sorted(
        ["BadRequestError", *["Rollout" if call == "stream" else "Score"] * 2]
    )
    assert [one.prompt_index for one in outcomes if isinstance(one, errors.BadRequestError)] == [1]
    with pytest.raises(errors.BadRequestError, match="scripted"):
        async for _ in getattr(client, call)(PROMPTS):
            pass


async def test_a_stream_yields_an_error_for_each_sample_that_a_time_limit_ends(served, client):
    served.script.append(hang)
    stream = client.stream([[5], [7], [8]], {"n": 2}, timeout_s=3.0, return_exceptions=True)
    kinds = sorted([type(one).__name__ async for one in stream])
    assert kinds == ["RequestTimeoutError"] * 2 + ["Rollout"] * 4


async def test_a_time_limit_keeps_the_samples_that_arrived(served, client):
    served.script.append(hang)
    outcomes = await client.generate([[5], [7], [8]], timeout_s=3.0, return_exceptions=True)
    kinds = [type(outcome) for outcome in outcomes]
    assert sorted(kind.__name__ for kind in kinds) == ["RequestTimeoutError", "Rollout", "Rollout"]


async def test_an_abort_keeps_the_samples_that_arrived(served, client):
    served.script.append(hang)
    waiting = asyncio.create_task(client.generate([[5], [7], [8]], request_id="mine", return_exceptions=True))
    async with asyncio.timeout(10):
        while len(served.calls) < 3 or client._runs.servers.num_in_flight > 1:
            await asyncio.sleep(0.01)
    await client.abort("mine")
    outcomes = await waiting
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["AbortedError", "Rollout", "Rollout"]


async def test_without_a_server_every_place_has_an_error(no_leftovers):
    async with AsyncRolloutClient("http://127.0.0.1:9", max_retries=0) as client:
        outcomes = await client.generate(PROMPTS, {"n": 2}, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [errors.TransportError] * 6


async def test_wrong_arguments_are_raised(served, client):
    for wrong in ({"timeout_s": 0}, {"top_logprobs_p": 2}, {"on_abort": "stop"}, {"return_exceptions": 1}):
        with pytest.raises(errors.InvalidInputError, match=next(iter(wrong))):
            await client.generate(PROMPTS, **({"return_exceptions": True} | wrong))
        if "on_abort" not in wrong:
            with pytest.raises(errors.InvalidInputError, match=next(iter(wrong))):
                await client.score(PROMPTS, **({"return_exceptions": True} | wrong))
    with pytest.raises(errors.InvalidInputError, match="prompts"):
        await client.generate([[5], []], return_exceptions=True)
    assert served.asked == []


async def test_a_rollout_that_is_not_resumed_has_an_error(engine, fakes):
    async def echo(asked, reply):
        event = reply.event

        async def add(chunk):
            chunk["meta_info"]["resumed_tokens"] = asked.body["resumed_tokens"]
            await event(chunk)

        reply.event = add
        if asked.body["input_ids"][0] == BAD[0]:
            return await reply.json({"error": {"message": "scripted"}}, 400)
        await fakes.answer_generate(asked, reply)

    engine.paths["/generate"] = echo
    parts = [replace(fakes.sample(prompt, 0), finish_reason="abort", prompt_index=8) for prompt in PROMPTS]
    async with AsyncRolloutClient(engine.url) as client:
        outcomes = await client.resume(parts, SAMPLING, top_logprobs_p=0.9, return_exceptions=True)
        assert type(outcomes[1]) is errors.BadRequestError
        for i in (0, 2):
            assert np.array_equal(outcomes[i].output_ids[:3], parts[i].output_ids)
            assert len(outcomes[i].output_ids) == 6
            assert outcomes[i].prompt_index == 8


async def test_a_continuation_that_fails_is_an_error_of_its_sample(engine, fakes):
    """With `on_abort="resume"`, the rest of a sample is a call of its own."""

    async def abort_then_refuse(asked, reply):
        if asked.body["resumed_tokens"]:
            return await reply.json({"error": {"message": "scripted"}}, 400)
        await reply.start()
        for index in range(2):
            chunk = fakes.chunk(fakes.sample(asked.body["input_ids"], index))
            chunk["meta_info"]["resumed_tokens"] = 0
            if index:
                chunk["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
            await reply.event(chunk)
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    engine.paths["/generate"] = abort_then_refuse
    async with AsyncRolloutClient(engine.url) as client:
        outcomes = await client.generate(
            [5], {"n": 2, **SAMPLING}, top_logprobs_p=0.9, on_abort="resume", return_exceptions=True
        )
    assert outcomes[0].candidates == fakes.sample([5], 0).candidates
    assert type(outcomes[1]) is errors.BadRequestError
