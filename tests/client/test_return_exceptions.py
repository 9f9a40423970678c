"""`return_exceptions=True`: a failed sample leaves the others alone, and its error is in its place."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, Rollout
from tests.client import conftest as fakes
from tests.client.conftest import by_request, chunk, sample, sends, silent, status, until

PROMPTS = [[5], [6], [7]]
BAD = [6]
SAMPLING = {"max_new_tokens": 12}


def is_bad(asked):
    body = asked.body
    return BAD in body.get("prompts", body.get("sequences", [body.get("input_ids")]))


def without_bad(answer):
    return by_request(lambda asked: status(400) if is_bad(asked) else answer)


@pytest.fixture
def served(served):
    """A server of each kind, which refuses calls with the prompt `BAD`."""
    for path in {"/generate", "/rollouts", "/scores"} & served.paths.keys():
        served.paths[path] = without_bad(served.paths[path])
    return served


@pytest.fixture
async def client(served, no_leftovers):
    async with AsyncRolloutClient(served.url) as client:
        yield client


def check(outcomes, num_samples=1):
    """Check that all entries are as generated, and that those of the bad prompt are its error."""
    places = [(prompt, k) for prompt in PROMPTS for k in range(num_samples)]
    for outcome, (prompt, k) in zip(outcomes, places, strict=True):
        if prompt == BAD:
            assert type(outcome) is errors.BadRequestError
            assert "scripted" in str(outcome)
        else:
            assert outcome.candidates == fakes.sample(prompt, k).candidates


@pytest.mark.parametrize("n", [1, 3])
async def test_a_refused_prompt_has_an_error_per_sample(client, n):
    outcomes = await client.generate(PROMPTS, {"n": n}, top_logprobs_p=0.9, return_exceptions=True)
    check(outcomes, n)
    assert [(o.prompt_index, o.sample_index) for o in outcomes if isinstance(o, Rollout)] == [
        (i, k) for i in (0, 2) for k in range(n)
    ]


async def test_samples_that_arrived_before_an_inexact_one_are_kept(engine):
    inexact = fakes.chunk(fakes.sample([5], 0))
    del inexact["meta_info"]["output_top_p_logprobs_lengths"]
    engine.script.append(sends(fakes.chunk(fakes.sample([5], 1)), inexact))
    async with AsyncRolloutClient(engine.url) as client:
        outcomes = await client.generate([5], {"n": 3}, top_logprobs_p=0.9, return_exceptions=True)
    assert outcomes[1].candidates == fakes.sample([5], 1).candidates
    assert type(outcomes[0]) is errors.WireError
    assert outcomes[0] is outcomes[2]


@pytest.mark.parametrize("code", [429, 503])
async def test_a_call_is_retried_before_it_fails(served, client, code):
    served.script += [status(code)] * 4
    check(await client.generate(PROMPTS, top_logprobs_p=0.9, return_exceptions=True))


@pytest.mark.parametrize("call", ["stream", "stream_scores"])
async def test_streams_yield_errors_that_name_their_prompt(client, call):
    outcomes = [one async for one in getattr(client, call)(PROMPTS, return_exceptions=True)]
    kind = "Rollout" if call == "stream" else "Score"
    assert sorted(type(one).__name__ for one in outcomes) == ["BadRequestError", kind, kind]
    assert [one.prompt_index for one in outcomes if isinstance(one, errors.BadRequestError)] == [1]
    with pytest.raises(errors.BadRequestError, match="scripted"):
        async for _ in getattr(client, call)(PROMPTS):
            pass


async def test_a_time_limit_keeps_the_samples_that_arrived(served, client):
    served.script.append(silent)
    options = {"timeout_s": 3.0, "return_exceptions": True}
    outcomes = await client.generate([[5], [7], [8]], {"n": 2}, **options)
    kinds = sorted(type(one).__name__ for one in outcomes)
    assert kinds == ["RequestTimeoutError"] * 2 + ["Rollout"] * 4
    assert [one.prompt_index for one in outcomes] == [0, 0, 1, 1, 2, 2]


async def test_an_abort_keeps_the_samples_that_arrived(served, client):
    served.script.append(silent)
    waiting = asyncio.create_task(client.generate([[5], [7], [8]], request_id="mine", return_exceptions=True))
    await until(lambda: len(served.calls) == 3 and client._runs.servers.num_in_flight == 1)
    await client.abort("mine")
    outcomes = await waiting
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["AbortedError", "Rollout", "Rollout"]


async def test_without_a_server_every_place_has_an_error(no_leftovers):
    async with AsyncRolloutClient("http://127.0.0.1:9", max_retries=0) as client:
        outcomes = await client.generate(PROMPTS, {"n": 2}, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [errors.TransportError] * 6


async def test_wrong_arguments_are_raised(served, client):
    timeouts = [{"timeout_s": wrong} for wrong in (0, -1.0, float("nan"), float("inf"), "5")]
    for wrong in (*timeouts, {"top_logprobs_p": 2}, {"on_abort": "stop"}, {"return_exceptions": 1}):
        with pytest.raises(errors.InvalidInputError, match=next(iter(wrong))):
            await client.generate(PROMPTS, **({"return_exceptions": True} | wrong))
        if "on_abort" not in wrong:
            with pytest.raises(errors.InvalidInputError, match=next(iter(wrong))):
                await client.score(PROMPTS, **({"return_exceptions": True} | wrong))
    with pytest.raises(errors.InvalidInputError, match="prompts"):
        await client.generate([[5], []], return_exceptions=True)
    assert served.asked == []


async def test_a_rollout_that_is_not_resumed_has_an_error(engine):
    engine.paths["/generate"] = by_request(
        lambda asked: status(400) if asked.body["input_ids"][0] == BAD[0] else fakes.answer_generate
    )
    parts = [replace(sample(prompt, 0), finish_reason="abort", prompt_index=8) for prompt in PROMPTS]
    async with AsyncRolloutClient(engine.url) as client:
        outcomes = await client.resume(parts, SAMPLING, top_logprobs_p=0.9, return_exceptions=True)
    assert type(outcomes[1]) is errors.BadRequestError
    for i in (0, 2):
        assert np.array_equal(outcomes[i].output_ids[:3], parts[i].output_ids)
        assert len(outcomes[i].output_ids) == 6
        assert outcomes[i].prompt_index == 8


async def test_a_continuation_that_fails_is_an_error_of_its_sample(engine):
    """With `on_abort="resume"`, the rest of a sample is a call of its own."""
    ended = chunk(sample([5], 0), resumed_tokens=0)
    cut = chunk(sample([5], 1), resumed_tokens=0, finish_reason={"type": "abort", "message": "Aborted"})
    engine.script += [sends(ended, cut), status(400)]
    async with AsyncRolloutClient(engine.url) as client:
        outcomes = await client.generate(
            [5], {"n": 2, **SAMPLING}, top_logprobs_p=0.9, on_abort="resume", return_exceptions=True
        )
    assert engine.calls[1]["resumed_tokens"]
    assert outcomes[0].candidates == sample([5], 0).candidates
    assert type(outcomes[1]) is errors.BadRequestError
