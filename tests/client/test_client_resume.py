"""Aborted samples are raised, returned, or resumed, even if the engine fails meanwhile."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sglang_topp import CandidateSets, errors
from sglang_topp_client import AsyncRolloutClient, async_client
from sglang_topp_client import run as run_module
from sglang_topp_client.rollout import join_parts
from tests.client import conftest as fakes
from tests.client.conftest import altered, chunk, held_until, sample, sends_bytes, silent, status, until

ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
WAITED = {"type": "abort", "message": "Abort in waiting queue"}
REASONS = {"abort": ABORT, "waiting": WAITED}
REFUSED = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
SAMPLING = {"max_new_tokens": 12}


@pytest.fixture
async def client(engine, no_leftovers):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        yield client


def aborted(body, index=0, **meta):
    """Return the chunk of an aborted sample."""
    made = sample(fakes.prompt_of(body), index)
    return chunk(made, finish_reason=ABORT, resumed_tokens=body["resumed_tokens"], **meta)


def ending(*reasons):
    """Make a handler that answers like a patched engine, with one reason per sample.

    A reason is "stop", "length", "abort", "waiting" (aborted before its first token), or a whole object.
    """

    def answer(body, index):
        reason = reasons[index % len(reasons)]
        finish = reason if isinstance(reason, dict) else REASONS.get(reason, {"type": reason})
        meta = {"resumed_tokens": body["resumed_tokens"]} if "resumed_tokens" in body else {}
        one = chunk(sample(fakes.prompt_of(body), index), finish_reason=finish, **meta)
        if reason == "waiting":
            kept = ("id", "finish_reason", "weight_version", "e2e_latency", *meta)
            meta = {name: one["meta_info"][name] for name in kept}
            meta |= {"completion_tokens": 0, "output_token_logprobs": []}
            one |= {"text": "", "output_ids": [], "meta_info": meta}
        return one

    async def handler(asked, reply):
        n = asked.body["sampling_params"]["n"]
        await reply.events(*(answer(asked.body, index) for index in range(n)))

    return handler


@pytest.fixture
def answers(engine):
    """`ending`, with an engine that ends its samples by their length."""
    engine.paths["/generate"] = ending("length")
    return ending


async def abort_midway(client, server, prompts, sampling=SAMPLING, *, num_calls=1, **options):
    """Abort a request once the server has its calls, and return its rollouts."""
    options = {"on_abort": "return", "request_id": "mine", **options}
    asked = asyncio.create_task(client.generate(prompts, sampling, **options))
    await until(lambda: len(server.calls) == num_calls)
    await client.abort("mine")
    assert asked.done()
    return await asked


def made(prompt, num_tokens=4, **changes):
    return replace(fakes.sample(prompt, 0, num_tokens), finish_reason="abort", **changes)


# -- requests -----------------------------------------------------------------------------


async def test_by_default_an_abort_is_an_error_and_nothing_new_is_sent(engine, client, answers):
    engine.script.append(answers("abort"))
    with pytest.raises(errors.AbortedError, match=r"weight update ended a sample: .*Aborted.*; on_abort"):
        await client.generate([5], SAMPLING, top_logprobs_p=0.9)
    assert "resumed_tokens" not in engine.calls[0]


@pytest.mark.parametrize("on_abort", ["Raise", "", None, 1, b"return", ["return"]])
async def test_on_abort_is_one_of_three(engine, client, on_abort):
    with pytest.raises(errors.InvalidInputError, match="on_abort: got"):
        client.stream([5], on_abort=on_abort)
    assert engine.asked == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"frequency_penalty": 0.1}, "frequency_penalty: got 0.1"),
        ({"presence_penalty": -1}, "presence_penalty: got -1"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty: got 1\.1"),
        ({"json_schema": "{}"}, "json_schema: got"),
        ({"regex": "a"}, "its grammar would begin again"),
        ({"ebnf": "root ::= a"}, "ebnf: got"),
        ({"structural_tag": "{}"}, "structural_tag: got"),
        ({"custom_params": {"thinking_budget": 3}}, "custom_params: got"),
        ({"beam_width": 4}, "beam_width: got 4"),
        ({"watermark": {"key": 1}}, "watermark: got"),
        ({"something_new": None}, "something_new: it is not known"),
        ({"max_new_tokens": "12"}, "max_new_tokens: got '12', expected a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens: got True"),
        ({"min_new_tokens": -1}, "min_new_tokens: got -1"),
        ({}, "max_new_tokens: got none"),
    ],
)
async def test_what_cannot_be_exact_is_refused_before_anything_is_sent(engine, client, params, words):
    params = {**SAMPLING, **params} if params else {}
    with pytest.raises(errors.InvalidInputError, match=words):
        client.stream([5], params, on_abort="resume")
    with pytest.raises(errors.InvalidInputError, match=words):
        await client.resume(made([5]), params, top_logprobs_p=0.9)
    assert engine.asked == []


async def test_harmless_values_pass(client, answers):
    params = {
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "regex": None,
        "custom_params": {},
        "beam_width": 1,
        "max_new_tokens": None,
        "stop_regex": "a",
        "sampling_seed": 3,
    }
    assert len(await client.generate([5], params, on_abort="resume")) == 1


@pytest.mark.parametrize("on_abort", ["return", "resume"])
@pytest.mark.parametrize("echo", [None, 3, "0"])
async def test_an_engine_that_does_not_resume_is_found(engine, client, on_abort, echo):
    engine.paths["/generate"] = altered(
        ending("stop"), lambda chunk: chunk["meta_info"].update(resumed_tokens=echo)
    )
    with pytest.raises(errors.WireError, match=r"resumed_tokens: got .*does not resume answers"):
        await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort=on_abort)


# -- returned --------------------------------------------------------------------------------------


async def test_aborted_samples_come_whole(engine, client, answers):
    engine.script.append(answers("stop", "abort", "waiting"))
    rollouts = await client.generate([5], {**SAMPLING, "n": 3}, top_logprobs_p=0.9, on_abort="return")
    assert [one.finish_reason for one in rollouts] == ["stop", "abort", "abort"]
    truth = fakes.sample([5], 1)
    assert rollouts[1].candidates == truth.candidates
    assert rollouts[1].weight_spans == truth.weight_spans
    waited = rollouts[2]
    assert len(waited.output_ids) == len(waited.logprobs) == len(waited.candidates) == 0
    assert waited.prompt_ids.tolist() == [5]
    assert (waited.text, waited.weight_spans, waited.weight_version) == ("", (), "step-7")
    assert waited.top_logprobs_source == "distribution"


async def test_the_ids_of_a_text_whose_sample_waited(engine, client, answers):
    engine.script.append(answers("waiting"))
    (rollout,) = await client.generate("ab", SAMPLING, on_abort="return")
    assert rollout.prompt_ids.tolist() == [97, 98]
    assert rollout.candidates is None
    assert rollout.weight_spans is None


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("on_abort", ["raise", "return", "resume"])
async def test_a_refusal_inside_of_the_answer_is_waited_out(engine, answers, status, on_abort):
    engine.script += [answers(REFUSED | {"status_code": status})] * 4
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        assert len(await client.generate([5], SAMPLING, on_abort=on_abort)) == 1


async def test_an_aborted_sample_lacks_nothing_or_is_an_error(engine, client, answers):
    engine.script.append(altered(answers("abort"), fakes.without_sets))
    with pytest.raises(errors.MissingCandidateSetsError):
        await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="return")


@pytest.fixture
def stoppable(engine):
    """Samples run until the engine gets an abort with their ids. It ignores those that come before them."""

    async def handler(asked, reply):
        body = asked.body
        n = body["sampling_params"]["n"]
        ids = [body["rid"] if n == 1 else f"{body['rid']}-{index}" for index in range(n)]
        if body["sampling_params"].get("is_late"):
            await asyncio.sleep(0.6)
        ignored = len(engine.aborted)
        await reply.start()
        for index, engine_id in enumerate(ids):
            begun = sample(fakes.prompt_of(body), index)
            await reply.event(chunk(begun, first_token_only=True, id=engine_id, resumed_tokens=0))
        for index, engine_id in enumerate(ids):
            await until(lambda engine_id=engine_id: engine_id in engine.aborted[ignored:])
            await reply.event(aborted(body, index, id=engine_id))
        await reply.done()

    engine.paths["/generate"] = handler


@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize("is_late", [False, True], ids=["under way", "before it reaches the engine"])
@pytest.mark.parametrize("n", [1, 2])
async def test_abort_stops_the_engine_and_keeps_the_connections(engine, client, n, is_late):
    sampling = {**SAMPLING, "n": n, "is_late": is_late}
    rollouts = await abort_midway(client, engine, [[5], [6]], sampling, num_calls=2, top_logprobs_p=0.9)
    places = [(prompt, index) for prompt in (0, 1) for index in range(n)]
    assert [(one.prompt_index, one.sample_index) for one in rollouts] == places
    assert {one.finish_reason for one in rollouts} == {"abort"}
    assert [one.candidates for one in rollouts] == [sample([5 + p], index).candidates for p, index in places]
    assert engine.hang_ups == 0


async def test_a_cancelled_abort_leaves_the_samples_alone(engine, client):
    """A time limit or an interrupt around a graceful abort must not lose the partial samples."""
    may_answer = asyncio.Event()

    async def slow(asked, reply):
        await reply.start()
        await until(lambda: asked.body["rid"] in engine.aborted)
        await until(may_answer.is_set)
        await reply.event(aborted(asked.body))
        await reply.done()

    engine.paths["/generate"] = slow
    asked = asyncio.create_task(
        client.generate([[5], [6]], SAMPLING, top_logprobs_p=0.9, on_abort="return", request_id="mine")
    )
    await until(lambda: len(engine.calls) == 2)
    for aborting in (client.abort("mine"), client.abort_all()):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aborting, 0.2)
    may_answer.set()
    rollouts = await asked
    assert [len(one.output_ids) for one in rollouts] == [fakes.NUM_TOKENS] * 2


async def test_a_partial_sample_that_takes_long_to_arrive_is_waited_for(engine, client, monkeypatch):
    """The idle timeout counts arriving bytes, not finished samples."""
    monkeypatch.setitem(run_module._GRACE_S, "sglang", 3.0)

    async def large(asked, reply):
        await reply.start()
        await until(lambda: asked.body["rid"] in engine.aborted)
        raw = fakes.events_of(aborted(asked.body))
        for i in range(20):
            await reply.write(raw[len(raw) * i // 20 : len(raw) * (i + 1) // 20])
            await asyncio.sleep(0.2)
        await reply.done()

    engine.paths["/generate"] = large
    (rollout,) = await abort_midway(client, engine, [5], top_logprobs_p=0.9)
    assert rollout.candidates == sample([5], 0).candidates


async def test_an_engine_that_hangs_is_given_up(engine, client, answers, hang, monkeypatch):
    monkeypatch.setitem(run_module._GRACE_S, "sglang", 0.4)
    engine.script += [silent, answers("stop")]
    stream = client.stream([[5], [6]], SAMPLING, top_logprobs_p=0.9, on_abort="return", request_id="mine")
    assert (await anext(stream)).finish_reason == "stop"
    await client.abort("mine")
    (empty,) = [rollout async for rollout in stream]
    assert empty.finish_reason == "abort"
    assert len(empty.output_ids) == len(empty.candidates) == 0
    assert set(engine.aborted) == {
        body["rid"] for body in engine.calls if body["input_ids"] == empty.prompt_ids.tolist()
    }


async def test_a_sample_without_an_id_is_given_up_beside_others_that_go_on(engine, client, monkeypatch):
    """Of several samples, the engine's ids come with their tokens. One that waits can't be aborted."""
    monkeypatch.setitem(run_module._GRACE_S, "sglang", 0.4)

    async def chat(asked, reply):
        await reply.start()
        while True:
            await reply.write(b": still here\n\n")
            await asyncio.sleep(0.05)

    engine.script += [chat, silent]
    other = asyncio.create_task(client.generate([4]))
    await until(lambda: engine.in_flight)
    waiting = abort_midway(client, engine, [5], {**SAMPLING, "n": 2}, num_calls=2)
    assert [len(one.output_ids) for one in await asyncio.wait_for(waiting, 60)] == [0, 0]
    await fakes.cancel(other)


async def test_a_text_that_the_engine_never_took_in(engine, client, monkeypatch):
    monkeypatch.setitem(run_module._GRACE_S, "sglang", 0.2)
    engine.script.append(silent)
    with pytest.raises(errors.RolloutError, match="aborted before the engine had tokenized prompt 0, a text"):
        await abort_midway(client, engine, "ab")


async def test_samples_that_were_not_sent_yet_come_without_a_token(engine, stoppable, no_leftovers):
    prompts = [[i] for i in range(1, 8)]
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=2) as client:
        rollouts = await abort_midway(client, engine, prompts, num_calls=2)
    assert [one.prompt_ids.tolist() for one in rollouts] == prompts
    assert len(engine.calls) == 2
    assert sorted(len(one.output_ids) for one in rollouts) == [0] * 5 + [3] * 2


async def test_a_stopped_call_does_not_wait_for_the_slots_of_another(engine):
    engine.paths["/generate"] = silent
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=1) as client:
        other = asyncio.create_task(client.generate([4]))
        await until(lambda: engine.calls)
        stopped = client.generate([[5], [6]], SAMPLING, timeout_s=0.1, on_timeout="return")
        assert [len(one.output_ids) for one in await asyncio.wait_for(stopped, 60)] == [0, 0]
        assert len(engine.calls) == 1
        await fakes.cancel(other)


async def test_an_abort_while_a_refusal_is_waited_out(engine, client, answers):
    engine.script.append(status(429, Retry_After="60"))
    asked = asyncio.create_task(client.generate([5], SAMPLING, on_abort="return", request_id="mine"))
    await until(lambda: len(engine.calls) == 1 and engine.in_flight == 0)
    await client.abort("mine")
    (rollout,) = await asked
    assert (rollout.finish_reason, len(rollout.output_ids)) == ("abort", 0)


async def test_a_time_limit_and_a_cancellation_hold_all_the_same(engine, client, hang):
    engine.script += [hang] * 2
    with pytest.raises((errors.RequestTimeoutError, errors.WireError)):
        await client.generate([5], SAMPLING, on_abort="return", timeout_s=0.3)
    # The caller learns of the time limit before its connection is closed.
    await until(lambda: engine.in_flight == 0)
    engine.script = [silent]
    asked = asyncio.create_task(client.generate([5], SAMPLING, on_abort="return", request_id="mine"))
    await until(lambda: engine.in_flight == 1)
    stopping = asyncio.create_task(client.abort("mine"))
    await asyncio.sleep(0.05)
    await fakes.cancel(asked)
    await stopping


@pytest.mark.parametrize("on_abort", ["raise", "resume"])
async def test_with_raise_and_resume_an_abort_by_name_raises(engine, client, on_abort):
    engine.script = [silent]
    with pytest.raises(errors.RolloutError, match="aborted by this client"):
        await abort_midway(client, engine, [5], on_abort=on_abort)
    await until(lambda: engine.in_flight == 0)


async def test_abort_all_sends_one_order(engine, sidecar, client):
    engine.script += [held_until(lambda: engine.of("/abort_request"), ending("abort")), ending("stop")]
    resumed = asyncio.create_task(client.generate([5], SAMPLING, on_abort="resume"))
    await until(lambda: engine.in_flight)
    await client.abort_all()
    assert len(await resumed) == 1
    assert [asked.body for asked in engine.of("/abort_request")] == [{"abort_all": True}]
    async with AsyncRolloutClient(sidecar.url) as through:
        await through.abort_all()
    assert [asked.body for asked in sidecar.of("/abort")] == [{"all": True}]


async def test_abort_all_reaches_the_other_event_loops_of_the_client(engine, client):
    """They ask for their own samples, too, and send no further prompts."""
    engine.script.append(held_until(lambda: len(engine.of("/abort_request")) >= 2, ending("abort")))
    call = client.generate([5], SAMPLING, on_abort="return")
    there = asyncio.create_task(asyncio.to_thread(asyncio.run, call))
    await until(lambda: engine.in_flight)
    await client.abort_all()
    assert [one.finish_reason for one in await there] == ["abort"]


# -- resumed ---------------------------------------------------------------------------------------


async def test_interrupted_samples_are_resumed_until_they_are_complete(engine, client, answers):
    engine.script += [answers("abort"), answers("waiting"), answers("abort"), answers("stop")]
    sampling = {"max_new_tokens": 12, "min_new_tokens": 5, "stop": ["x"]}
    (rollout,) = await client.generate([5], sampling, top_logprobs_p=0.9, on_abort="resume")
    first = fakes.sample([5], 0)
    second = fakes.sample([5, *first.output_ids.tolist()], 0)
    third = fakes.sample([5, *first.output_ids.tolist(), *second.output_ids.tolist()], 0)
    parts = [first, second, third]
    assert rollout.output_ids.tolist() == [token for part in parts for token in part.output_ids.tolist()]
    assert rollout.candidates == CandidateSets.concat([part.candidates for part in parts])
    np.testing.assert_array_equal(rollout.logprobs, np.concatenate([part.logprobs for part in parts]))
    assert rollout.weight_spans == (("step-6", 1), ("step-7", 2)) * 3
    assert rollout.prompt_ids.tolist() == [5]
    assert (rollout.finish_reason, rollout.text) == ("stop", third.text)
    assert rollout.latency_s == pytest.approx(0.25 * 3)
    assert rollout.cached_tokens == 1
    calls = [(body["resumed_tokens"], body["sampling_params"]) for body in engine.calls]
    assert [(count, params["max_new_tokens"], params["min_new_tokens"]) for count, params in calls] == [
        (0, 12, 5),
        (3, 9, 2),
        (3, 9, 2),
        (6, 6, 0),
    ]
    assert all(params["stop"] == ["x"] for _, params in calls)


@pytest.mark.parametrize("on_abort", ["raise", "return", "resume"])
async def test_a_time_limit_can_return_what_was_generated(engine, client, answers, on_abort):
    """Sample 5 is finished, sample 6 has a token, and prompt 7 has not been sent."""
    engine.script += [answers("stop"), held_until(lambda: engine.aborted, answers("abort"))]
    options = {"timeout_s": 1.0, "on_timeout": "return", "on_abort": on_abort, "top_logprobs_p": 0.9}
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=1) as one_at_a_time:
        made = [one async for one in one_at_a_time.stream([[5], [6], [7]], SAMPLING, **options)]
    made.sort(key=lambda rollout: rollout.prompt_index)
    assert [rollout.finish_reason for rollout in made] == ["stop", "abort", "abort"]
    assert [len(rollout.output_ids) for rollout in made] == [fakes.NUM_TOKENS, fakes.NUM_TOKENS, 0]
    assert len(engine.calls) == 2
    engine.paths["/generate"] = answers("stop")
    whole = await client.resume(made, SAMPLING, top_logprobs_p=0.9)
    assert [rollout.finish_reason for rollout in whole] == ["stop"] * 3


async def test_a_time_limit_after_the_last_sample_leaves_nothing_behind(client, answers):
    """The caller still looks at its first sample when the time limit passes, and all have arrived."""
    made = []
    async for rollout in client.stream([[5], [6]], SAMPLING, timeout_s=0.5, on_timeout="return"):
        made.append(rollout)
        await asyncio.sleep(0.6)
    assert len(made) == 2


@pytest.mark.parametrize("on_timeout", ["raise", "return"])
async def test_a_time_limit_before_the_end_of_a_whole_answer_loses_nothing(engine, client, on_timeout):
    async def no_end(asked, reply):
        await reply.start()
        await reply.event(chunk(sample([5], 0), resumed_tokens=asked.body.get("resumed_tokens")))
        await reply.hung_up()

    engine.script.append(no_end)
    (rollout,) = await client.generate([5], SAMPLING, top_logprobs_p=0.9, timeout_s=1, on_timeout=on_timeout)
    assert rollout.candidates == sample([5], 0).candidates


async def test_with_on_timeout_an_abort_is_an_error_as_before(engine, client, answers):
    engine.script.append(answers("abort"))
    with pytest.raises(errors.AbortedError):
        await client.generate([5], SAMPLING, timeout_s=30, on_timeout="return")
    with pytest.raises(errors.InvalidInputError, match="on_timeout: got 'resume', expected 'raise'"):
        await client.generate([5], SAMPLING, on_timeout="resume")


async def test_aborts_without_tokens_back_off(engine, client, answers, monkeypatch):
    monkeypatch.setattr(run_module, "_FIRST_RESUME_WAIT_S", 0.001)
    monkeypatch.setattr(run_module, "_MAX_RESUME_WAIT_S", 0.02)
    waits = []
    proceed = run_module.Run._do_job

    async def noted(self, job):
        waits.append(job.wait_s)
        await proceed(self, job)

    monkeypatch.setattr(run_module.Run, "_do_job", noted)
    engine.script += [answers("waiting")] * 7 + [answers("abort"), answers("stop")]
    (rollout,) = await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="resume")
    assert len(rollout.output_ids) == 2 * fakes.NUM_TOKENS
    assert waits == [0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02, 0.0]


async def test_nothing_to_resume_is_an_empty_list(engine, client):
    assert await client.resume([]) == await client.resume((), SAMPLING, return_exceptions=True) == []
    assert engine.asked == []


CUT = sends_bytes(b"data: {", ends=False)
FULL = [status(429), status(429), ending(REFUSED), status(429), ending(REFUSED)]


@pytest.mark.parametrize(
    "faults", [[CUT], FULL, [*[status(503)] * 5, CUT, *[status(503)] * 5]], ids=["cut off", "full", "paused"]
)
async def test_a_partial_sample_survives(engine, answers, no_leftovers, faults, monkeypatch):
    options = partial(run_module.RunOptions, waits_out_refusals=False)  # as a sidecar's
    monkeypatch.setattr(async_client, "RunOptions", options)
    engine.script += [answers("abort"), *faults, answers("stop")]
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=1) as client:
        (rollout,) = await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="resume")
        assert len(rollout.output_ids) == 2 * fakes.NUM_TOKENS
        assert engine.script == []

        # An engine that is gone is not waited for.
        engine.script = [answers("abort"), *[status(500)] * 3]
        with pytest.raises(errors.ServerError, match="scripted"):
            await client.generate([5], SAMPLING, on_abort="resume")


# -- rollouts from the caller --------------------------------------------------------------------------------


async def test_rollouts_are_resumed_in_their_order_with_their_indices(engine, client):
    given = [made([5], prompt_index=3, sample_index=2), made([6], prompt_index=3, sample_index=2)]
    finished = replace(given[0], finish_reason="stop")
    full = replace(made([7], 12), finish_reason="abort")
    whole = await client.resume([*given, finished, full], {**SAMPLING, "n": 8}, top_logprobs_p=0.9)
    assert [(one.prompt_index, one.sample_index) for one in whole] == [(3, 2), (3, 2), (3, 2), (0, 0)]
    assert [len(one.output_ids) for one in whole] == [7, 7, 4, 12]
    for one, before in zip(whole, [*given, finished, full], strict=True):
        count = len(before.output_ids)
        assert one.output_ids[:count].tolist() == before.output_ids.tolist()
        assert one.candidates[:count] == before.candidates
        assert one.prompt_ids.tolist() == before.prompt_ids.tolist()
    assert [one.finish_reason for one in whole] == ["stop", "stop", "stop", "length"]
    # A rollout records the whole request, not that of its last part. A finished rollout is unchanged.
    assert [one.sampling_params for one in whole] == [SAMPLING, SAMPLING, None, None]
    assert [one.top_logprobs_p for one in whole] == [0.9, 0.9, None, None]
    assert len(engine.calls) == 2
    assert sorted(body["input_ids"][0] for body in engine.calls) == [5, 6]


async def test_resuming_raises_returns_or_resumes_as_well(engine, client, answers):
    part = made([5])
    engine.script.append(answers("abort"))
    with pytest.raises(errors.RolloutError):
        await client.resume(part, SAMPLING, top_logprobs_p=0.9)
    engine.script.append(answers("abort"))
    (longer,) = await client.resume(part, SAMPLING, top_logprobs_p=0.9, on_abort="return")
    assert (longer.finish_reason, len(longer.output_ids)) == ("abort", 7)
    engine.script.append(answers("waiting"))
    (same,) = await client.resume(part, SAMPLING, top_logprobs_p=0.9, on_abort="return")
    assert (same.output_ids.tolist(), same.text) == (part.output_ids.tolist(), part.text)
    assert (same.weight_version, same.weight_spans) == (part.weight_version, part.weight_spans)
    engine.script.append(answers("abort"))
    (whole,) = await client.resume(part, SAMPLING, top_logprobs_p=0.9, on_abort="resume")
    assert (whole.finish_reason, len(whole.output_ids)) == ("length", 10)


@pytest.mark.parametrize(
    ("rollouts", "words"),
    [
        (None, "rollouts: got NoneType"),
        ("abc", "rollouts: got str"),
        ([5], r"rollouts\[0\]: got int"),
        ({"prompt_ids": [1]}, "rollouts: got dict"),
    ],
)
async def test_wrong_rollouts_are_named(client, rollouts, words):
    with pytest.raises(errors.InvalidInputError, match=words):
        await client.resume(rollouts, SAMPLING)


@pytest.mark.parametrize(
    ("changes", "fields", "words"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, {}, r"\[0\]\.logprobs: got 2 for 4 output_ids"),
        ({"candidates": CandidateSets.empty(3)}, {}, r"\[0\]\.candidates: got 3 positions for 4"),
        ({"weight_spans": (("a", 3),)}, {}, r"\[0\]\.weight_spans: got .* for 4"),
        ({"prompt_ids": np.empty(0, np.int32)}, {}, r"\[0\]\.prompt_ids: got none"),
        ({"candidates": None}, {}, "got no sets, but the request asks for sets"),
        ({}, {"top_logprobs_p": None}, "got sets, but the request asks for no sets"),
        (
            {"top_logprobs_source": "sampler"},
            {},
            r"top_logprobs_source: got 'sampler', but 'distribution' is requested",
        ),
        ({}, {"sampling_params": [SAMPLING, SAMPLING]}, "sampling_params: got 2 values for 1 rollouts"),
        (
            {"top_logprobs_p": 0.8},
            {},
            r"\[0\]\.top_logprobs_p: got 0.8, but 0.9 is requested; expected the same",
        ),
        *(
            (
                {"sampling_params": {**SAMPLING, name: 0.5}},
                {"sampling_params": {**SAMPLING, name: 0.25}},
                rf"sampling_params\.{name}: got 0.5, but .* requested",
            )
            for name in ("temperature", "top_p", "top_k", "min_p", "logit_bias")
        ),
    ],
)
async def test_rollouts_that_do_not_fit_the_request_are_named(engine, client, changes, fields, words):
    fields = {"sampling_params": SAMPLING, "top_logprobs_p": 0.9, **fields}
    with pytest.raises(errors.InvalidInputError, match=words):
        await client.resume(made([5], **changes), **fields)
    assert engine.asked == []


@pytest.mark.parametrize(
    ("recorded", "sets"),
    [
        ({"top_logprobs_p": 0.9, "top_logprobs_source": "distribution"}, {"top_logprobs_p": 0.9}),
        ({"top_logprobs_source": "sampler"}, {"top_logprobs_source": "sampler"}),
        ({"top_logprobs_source": None, "candidates": None, "weight_spans": None}, {}),
    ],
    ids=["distribution", "sampler", "none"],
)
@pytest.mark.parametrize(
    ("given", "limit"), [({}, 8), ({"sampling_params": {"max_new_tokens": 16, "n": 3}}, 12)]
)
async def test_a_rollout_is_resumed_with_its_recorded_parameters(
    engine, client, recorded, sets, given, limit
):
    """Parameters that the caller gives replace the recorded ones."""
    params = {"max_new_tokens": 12, "temperature": 0.5, "stop": ["x"], "logit_bias": {"7": 1.0}}

    engine.script.append(silent)
    part = made([5], sampling_params=params, **recorded)
    asked = asyncio.create_task(client.resume([part], **given))
    await until(lambda: engine.calls)
    asked.cancel()
    (body,) = engine.calls
    assert body["resumed_tokens"] == 4
    sent = body["sampling_params"]
    assert {name: sent[name] for name in params} == {**params, "max_new_tokens": limit}
    assert sent["n"] == 1
    assert {name: body[name] for name in ("top_logprobs_p", "top_logprobs_source") if name in body} == sets


async def test_a_new_turn_resumes_nothing(engine, client):
    """Older releases refuse `resumed_tokens`."""
    engine.script.append(silent)
    part = made([5], sampling_params=SAMPLING, top_logprobs_source="distribution", top_logprobs_p=0.9)
    asked = asyncio.create_task(client.resume(part.extend([7]), top_logprobs_source="distribution"))
    await until(lambda: engine.calls)
    asked.cancel()
    assert "resumed_tokens" not in engine.calls[0]


def test_parts_of_different_rollouts_are_an_error():
    first = made([5])
    with pytest.raises(errors.WireError, match="prompt_ids"):
        join_parts(first, made([6]))
    other = made([5, *first.output_ids.tolist()])
    with pytest.raises(errors.WireError, match="candidates"):
        join_parts(first, replace(other, candidates=None))
    assert len(join_parts(first, other).output_ids) == 8
