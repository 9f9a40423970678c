"""Aborted samples are raised, returned, or resumed, even if the engine fails meanwhile."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets, errors
from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient
from sglang_topp_client import run as run_module
from sglang_topp_client.rollout import join_parts
from sglang_topp_client.wire.records import to_record

ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
SAMPLING = {"max_new_tokens": 12}


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def client(engine, no_leftovers):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        yield client


@pytest.fixture
def answers(engine, fakes):
    """Make handlers that answer like a patched engine: `answers(*reasons)`, one reason per sample.

    A reason is "stop", "length", "abort", "waiting" (aborted before its first token), or a whole object.
    """

    def make(*reasons, echo=True, num_tokens=fakes.NUM_TOKENS):
        async def handler(asked, reply):
            body = asked.body
            n = body["sampling_params"]["n"]
            await reply.start()
            for index in range(n):
                reason = reasons[index % len(reasons)]
                made = fakes.sample(body.get("text") or body["input_ids"], index, num_tokens)
                chunk = fakes.chunk(made)
                chunk["index"] = index
                meta_info = chunk["meta_info"]
                meta_info["finish_reason"] = ABORT if reason == "abort" else {"type": reason}
                if isinstance(reason, dict):
                    meta_info["finish_reason"] = reason
                if reason == "waiting":
                    chunk |= {"text": "", "output_ids": []}
                    for name in [*meta_info]:
                        if name not in ("id", "weight_version", "e2e_latency"):
                            del meta_info[name]
                    meta_info |= {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
                    meta_info |= {"completion_tokens": 0, "output_token_logprobs": []}
                if echo and "resumed_tokens" in body:
                    meta_info["resumed_tokens"] = body["resumed_tokens"]
                await reply.event(chunk)
            await reply.write(b"data: [DONE]\n\n")
            await reply.end()

        return handler

    engine.paths["/generate"] = make("length")
    return make


def made(fakes, prompt, num_tokens=4, **changes):
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
    ],
)
async def test_what_cannot_be_exact_is_refused_before_anything_is_sent(engine, client, fakes, params, words):
    params = {**SAMPLING, **params}
    with pytest.raises(errors.InvalidInputError, match=words):
        client.stream([5], params, on_abort="resume")
    with pytest.raises(errors.InvalidInputError, match=words):
        await client.resume(made(fakes, [5]), params, top_logprobs_p=0.9)
    assert engine.asked == []


async def test_resuming_needs_max_new_tokens(engine, client, fakes):
    with pytest.raises(errors.InvalidInputError, match="max_new_tokens: got none"):
        client.stream([[5]], {}, on_abort="resume")
    with pytest.raises(errors.InvalidInputError, match="max_new_tokens: got none"):
        await client.resume(made(fakes, [5]), {}, top_logprobs_p=0.9)
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
async def test_an_engine_that_does_not_resume_is_found(engine, client, answers, fakes, on_abort, echo):
    plain = answers("stop", echo=False)

    async def other(asked, reply):
        event = reply.event

        async def changed(chunk):
            if echo is not None:
                chunk["meta_info"]["resumed_tokens"] = echo
            await event(chunk)

        reply.event = changed
        await plain(asked, reply)

    engine.paths["/generate"] = other
    with pytest.raises(errors.WireError, match=r"resumed_tokens: got .*does not resume answers"):
        await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort=on_abort)


# -- returned --------------------------------------------------------------------------------------


async def test_aborted_samples_come_whole(engine, client, answers, fakes):
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
    refusal = {"type": "abort", "message": "The request queue is full.", "status_code": status}
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        engine.script += [answers(refusal)] * 4
        assert len(await client.generate([5], SAMPLING, on_abort=on_abort)) == 1


async def test_an_aborted_sample_lacks_nothing_or_is_an_error(engine, client, answers, fakes):
    whole = answers("abort")

    async def without_sets(asked, reply):
        event = reply.event

        async def changed(chunk):
            for name in [*chunk["meta_info"]]:
                if name.startswith("output_top_p"):
                    del chunk["meta_info"][name]
            await event(chunk)

        reply.event = changed
        await whole(asked, reply)

    engine.script.append(without_sets)
    with pytest.raises(errors.MissingCandidateSetsError):
        await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="return")


@pytest.fixture
def stoppable(engine, fakes):
    """Samples run until the engine gets an abort with their ids."""

    async def handler(asked, reply):
        body = asked.body
        n = body["sampling_params"]["n"]
        ids = [body["rid"] if n == 1 else f"{body['rid']}-{index}" for index in range(n)]
        if body["sampling_params"].get("is_late"):
            await asyncio.sleep(0.6)
        await reply.start()
        for stage in ("first", "last"):
            for index, engine_id in enumerate(ids):
                if stage == "last":
                    await until(lambda engine_id=engine_id: engine_id in engine.aborted)
                prompt = body.get("text") or body["input_ids"]
                chunk = fakes.chunk(fakes.sample(prompt, index), first_token_only=stage == "first")
                chunk["meta_info"] |= {"id": engine_id, "resumed_tokens": body["resumed_tokens"]}
                if stage == "last":
                    chunk["meta_info"]["finish_reason"] = ABORT
                await reply.event(chunk)
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    engine.paths["/generate"] = handler


@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize("is_late", [False, True], ids=["under way", "before its ids are known"])
async def test_abort_stops_the_engine_and_keeps_the_connections(engine, client, fakes, is_late):
    sampling = {**SAMPLING, "n": 2, "is_late": is_late}
    asked = asyncio.create_task(
        client.generate([[5], [6]], sampling, top_logprobs_p=0.9, on_abort="return", request_id="mine")
    )
    await until(lambda: len(engine.calls) == 2)
    await client.abort("mine")
    assert asked.done()
    rollouts = await asked
    assert [(one.finish_reason, one.prompt_index, one.sample_index) for one in rollouts] == [
        ("abort", prompt, index) for prompt in (0, 1) for index in (0, 1)
    ]
    assert [one.candidates for one in rollouts] == [
        fakes.sample([prompt], index).candidates for prompt in (5, 6) for index in (0, 1)
    ]
    assert engine.hang_ups == 0


@pytest.mark.usefixtures("stoppable")
async def test_the_synchronous_client_aborts_gracefully(engine):
    with RolloutClient(engine.url, kind="sglang") as client:
        asked = asyncio.create_task(
            asyncio.to_thread(client.generate, [5], SAMPLING, on_abort="return", request_id="mine")
        )
        await until(lambda: len(engine.calls) == 1)
        await asyncio.to_thread(client.abort, "mine")
        (rollout,) = await asked
        assert rollout.finish_reason == "abort"


def aborted_chunk(fakes, body):
    chunk = fakes.chunk(fakes.sample(body["input_ids"], 0))
    chunk["meta_info"] |= {"resumed_tokens": body["resumed_tokens"], "finish_reason": ABORT}
    return chunk


async def test_a_cancelled_abort_leaves_the_samples_alone(engine, client, fakes):
    """A time limit or an interrupt around a graceful abort must not lose the partial samples."""

    may_answer = asyncio.Event()

    async def slow(asked, reply):
        await reply.start()
        await until(lambda: asked.body["rid"] in engine.aborted)
        await until(may_answer.is_set)
        await reply.event(aborted_chunk(fakes, asked.body))
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    engine.paths["/generate"] = slow
    asked = asyncio.create_task(
        client.generate([[5], [6]], SAMPLING, top_logprobs_p=0.9, on_abort="return", request_id="mine")
    )
    await until(lambda: len(engine.calls) == 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.abort("mine"), 0.2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.abort_all(), 0.2)
    may_answer.set()
    rollouts = await asked
    assert [len(one.output_ids) for one in rollouts] == [fakes.NUM_TOKENS] * 2


async def test_a_partial_sample_that_takes_long_to_arrive_is_waited_for(engine, client, fakes, monkeypatch):
    """The idle timeout counts arriving bytes, not finished samples."""
    monkeypatch.setitem(run_module._GRACE_S, "sglang", 3.0)

    async def large(asked, reply):
        await reply.start()
        await until(lambda: asked.body["rid"] in engine.aborted)
        raw = b"data: " + json.dumps(aborted_chunk(fakes, asked.body)).encode() + b"\n\n"
        for i in range(20):
            await reply.write(raw[len(raw) * i // 20 : len(raw) * (i + 1) // 20])
            await asyncio.sleep(0.2)
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    engine.paths["/generate"] = large
    asked = asyncio.create_task(
        client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="return", request_id="mine")
    )
    await until(lambda: len(engine.calls) == 1)
    await client.abort("mine")
    (rollout,) = await asked
    assert rollout.candidates == fakes.sample([5], 0).candidates


async def test_an_engine_that_hangs_is_given_up(engine, client, answers, hang, monkeypatch):
    monkeypatch.setitem(run_module._GRACE_S, "sglang", 0.4)

    async def silent(asked, reply):
        await reply.hung_up()

    engine.script += [silent, answers("stop")]
    asked = asyncio.create_task(
        client.generate([[5], [6]], SAMPLING, top_logprobs_p=0.9, on_abort="return", request_id="mine")
    )
    await until(lambda: len(engine.calls) == 2 and engine.in_flight == 1)
    await client.abort("mine")
    rollouts = await asked
    assert sorted(one.finish_reason for one in rollouts) == ["abort", "stop"]
    (empty,) = (one for one in rollouts if one.finish_reason == "abort")
    assert len(empty.output_ids) == len(empty.candidates) == 0
    assert set(engine.aborted) == {
        body["rid"] for body in engine.calls if body["input_ids"] == empty.prompt_ids.tolist()
    }


async def test_a_text_that_the_engine_never_took_in(engine, client, monkeypatch):
    monkeypatch.setitem(run_module._GRACE_S, "sglang", 0.2)

    async def silent(asked, reply):
        await reply.hung_up()

    engine.script.append(silent)
    asked = asyncio.create_task(client.generate("ab", SAMPLING, on_abort="return", request_id="mine"))
    await until(lambda: len(engine.calls) == 1)
    await client.abort("mine")
    with pytest.raises(errors.RolloutError, match="aborted before the engine had tokenized prompt 0, a text"):
        await asked


async def test_samples_that_were_not_sent_yet_come_without_a_token(engine, answers, stoppable, no_leftovers):
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=2) as client:
        asked = asyncio.create_task(
            client.generate([[i] for i in range(1, 8)], SAMPLING, on_abort="return", request_id="mine")
        )
        await until(lambda: len(engine.calls) == 2)
        await client.abort("mine")
        rollouts = await asked
    assert [one.prompt_ids.tolist() for one in rollouts] == [[i] for i in range(1, 8)]
    assert len(engine.calls) == 2
    assert sorted(len(one.output_ids) for one in rollouts) == [0] * 5 + [3] * 2


async def test_an_abort_while_a_refusal_is_waited_out(engine, client, answers):
    async def full(asked, reply):
        await reply.json({"error": {"message": "full"}}, 429, Retry_After="60")

    engine.script.append(full)
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

    async def silent(asked, reply):
        await reply.hung_up()

    engine.script = [silent]
    asked = asyncio.create_task(client.generate([5], SAMPLING, on_abort="return", request_id="mine"))
    await until(lambda: engine.in_flight == 1)
    stopping = asyncio.create_task(client.abort("mine"))
    await asyncio.sleep(0.05)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await stopping


async def test_with_raise_and_resume_an_abort_by_name_raises(engine, client):
    async def silent(asked, reply):
        await reply.hung_up()

    for on_abort in ("raise", "resume"):
        engine.script = [silent]
        asked = asyncio.create_task(client.generate([5], SAMPLING, on_abort=on_abort, request_id="mine"))
        await until(lambda: engine.in_flight == 1)
        await client.abort("mine")
        with pytest.raises(errors.RolloutError, match="aborted by this client"):
            await asked
        await until(lambda: engine.in_flight == 0)


async def test_abort_all_sends_one_order(engine, sidecar, client):
    sidecar.paths["/abort"] = engine.paths["/abort_request"]
    await client.abort_all()
    assert [asked.body for asked in engine.of("/abort_request")] == [{"abort_all": True}]
    async with AsyncRolloutClient(sidecar.url) as through:
        await through.abort_all()
    assert [asked.body for asked in sidecar.of("/abort")] == [{"all": True}]


# -- resumed ---------------------------------------------------------------------------------------


async def test_interrupted_samples_are_resumed_until_they_are_complete(engine, client, answers, fakes):
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
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_a_time_limit_can_return_what_was_generated(engine, client, fakes, answers, on_abort, call):
    """Sample 5 is finished, sample 6 has a token, and prompt 7 has not been sent."""
    partial = answers("abort")

    async def until_aborted(asked, reply):
        if asked.body["input_ids"] == [5]:
            return await answers("stop")(asked, reply)
        while not any(asked.body["rid"] == rid for rid in engine.aborted):
            await asyncio.sleep(0.01)
        await partial(asked, reply)

    engine.paths["/generate"] = until_aborted
    options = {"timeout_s": 1.0, "on_timeout": "return", "on_abort": on_abort, "top_logprobs_p": 0.9}
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=1) as one_at_a_time:
        prompts = [[5], [6], [7]]
        if call == "generate":
            made = await one_at_a_time.generate(prompts, SAMPLING, **options)
        else:
            made = [rollout async for rollout in one_at_a_time.stream(prompts, SAMPLING, **options)]
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


async def test_with_on_timeout_an_abort_is_an_error_as_before(engine, client, answers):
    engine.script.append(answers("abort"))
    with pytest.raises(errors.AbortedError):
        await client.generate([5], SAMPLING, timeout_s=30, on_timeout="return")
    with pytest.raises(errors.InvalidInputError, match="on_timeout: got 'resume', expected 'raise'"):
        await client.generate([5], SAMPLING, on_timeout="resume")


async def test_aborts_without_tokens_back_off(engine, client, answers, fakes, monkeypatch):
    monkeypatch.setattr(run_module, "_FIRST_RESUME_WAIT_S", 0.001)
    monkeypatch.setattr(run_module, "_MAX_RESUME_WAIT_S", 0.02)
    waits = []
    proceed = run_module.Run._resume

    async def noted(self, job):
        waits.append(job.wait_s)
        await proceed(self, job)

    monkeypatch.setattr(run_module.Run, "_resume", noted)
    engine.script += [answers("waiting")] * 7 + [answers("abort"), answers("stop")]
    (rollout,) = await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="resume")
    assert len(rollout.output_ids) == 2 * fakes.NUM_TOKENS
    assert waits == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02, 0.0]


async def test_nothing_to_resume_is_an_empty_list(engine, client):
    assert await client.resume([]) == await client.resume((), SAMPLING, return_exceptions=True) == []
    assert engine.asked == []


async def test_each_sample_of_a_prompt_is_resumed_separately(engine, client, answers):
    engine.script.append(answers("abort", "stop", "abort"))
    rollouts = await client.generate([5], {**SAMPLING, "n": 3}, top_logprobs_p=0.9, on_abort="resume")
    assert [one.sample_index for one in rollouts] == [0, 1, 2]
    assert [len(one.output_ids) for one in rollouts] == [6, 3, 6]
    assert [body["sampling_params"]["n"] for body in engine.calls] == [3, 1, 1]


async def test_a_partial_sample_survives_refusals(engine, answers, no_leftovers):
    refusal = {"type": "abort", "message": "full", "status_code": 503}

    async def full(asked, reply):
        await reply.json({"error": {"message": "full"}}, 429)

    engine.paths["/generate"] = answers("stop")
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=1) as client:
        engine.script += [
            answers("abort"),
            full,
            full,
            answers(refusal),
            full,
            answers(refusal),
            answers("stop"),
        ]
        (rollout,) = await client.generate([5], SAMPLING, on_abort="resume")
        assert len(rollout.output_ids) == 6

        # An engine that is gone is not waited for.
        async def fail(asked, reply):
            await reply.json({"error": {"message": "broken"}}, 500)

        engine.script = [answers("abort"), *[fail] * 3]
        with pytest.raises(errors.ServerError, match="broken"):
            await client.generate([5], SAMPLING, on_abort="resume")


async def test_a_connection_that_breaks_while_it_resumes(engine, client, answers, fakes):
    async def cut(asked, reply):
        await reply.start()
        await reply.write(b"data: {")
        raise fakes.Cut

    engine.script += [answers("abort"), cut, answers("stop")]
    (rollout,) = await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="resume")
    assert len(rollout.output_ids) == 6


# -- rollouts from the caller --------------------------------------------------------------------------------


async def test_rollouts_are_resumed_in_their_order_with_their_indices(engine, client, fakes):
    engine.paths["/generate"] = fakes.answer_generate

    async def echoing(asked, reply):
        event = reply.event

        async def changed(chunk):
            chunk["meta_info"]["resumed_tokens"] = asked.body["resumed_tokens"]
            await event(chunk)

        reply.event = changed
        await fakes.answer_generate(asked, reply)

    engine.paths["/generate"] = echoing
    given = [
        made(fakes, [5], prompt_index=3, sample_index=2),
        made(fakes, [6], prompt_index=3, sample_index=2),
    ]
    finished = replace(given[0], finish_reason="stop")
    full = replace(made(fakes, [7], 12), finish_reason="abort")
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


async def test_resuming_raises_returns_or_resumes_as_well(engine, client, answers, fakes):
    part = made(fakes, [5])
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
async def test_rollouts_that_do_not_fit_the_request_are_named(engine, client, fakes, changes, fields, words):
    fields = {"sampling_params": SAMPLING, "top_logprobs_p": 0.9, **fields}
    with pytest.raises(errors.InvalidInputError, match=words):
        await client.resume(made(fakes, [5], **changes), **fields)
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
    engine, client, fakes, recorded, sets, given, limit
):
    """Parameters that the caller gives replace the recorded ones."""
    params = {"max_new_tokens": 12, "temperature": 0.5, "stop": ["x"], "logit_bias": {"7": 1.0}}

    async def hang(asked, reply):
        await reply.hung_up()

    engine.script.append(hang)
    part = made(fakes, [5], sampling_params=params, **recorded)
    asked = asyncio.create_task(client.resume([part], **given))
    await until(lambda: engine.calls)
    asked.cancel()
    (body,) = engine.calls
    assert body["resumed_tokens"] == 4
    sent = body["sampling_params"]
    assert {name: sent[name] for name in params} == {**params, "max_new_tokens": limit}
    assert sent["n"] == 1
    assert {name: body[name] for name in ("top_logprobs_p", "top_logprobs_source") if name in body} == sets


def test_parts_of_different_rollouts_are_an_error(fakes):
    first = made(fakes, [5])
    with pytest.raises(errors.WireError, match="prompt_ids"):
        join_parts(first, made(fakes, [6]))
    other = made(fakes, [5, *first.output_ids.tolist()])
    with pytest.raises(errors.WireError, match="candidates"):
        join_parts(first, replace(other, candidates=None))
    assert len(join_parts(first, other).output_ids) == 8


# -- through a sidecar -----------------------------------------------------------------------------


async def test_resuming_through_a_sidecar(sidecar, fakes):
    async def aborting(asked, reply):
        await reply.start(content_type="application/x-ndjson")
        made = list(fakes.records(asked.body))
        for at, record in enumerate(made):
            await reply.line(record | {"finish_reason": "abort" if at == 0 else "stop"})
        await reply.line({"done": True, "rollouts": len(made)})
        await reply.end()

    sidecar.script.append(aborting)
    async with AsyncRolloutClient(sidecar.url) as client:
        first, second = await client.generate(
            [5], {**SAMPLING, "n": 2}, top_logprobs_p=0.9, on_abort="return"
        )
        assert (first.finish_reason, second.finish_reason) == ("abort", "stop")
        (whole,) = await client.resume([first], SAMPLING, top_logprobs_p=0.9)
        assert len(whole.output_ids) == 6
        before, after = sidecar.calls
        assert before["on_abort"] == "return"
        assert "resumed_tokens" not in before
        assert after["resumed_tokens"] == [3]
        assert "on_abort" not in after
        assert after["prompts"] == [[5, *first.output_ids.tolist()]]
        # The caller did not ask for an aborted sample.
        sidecar.script += [aborting]
        with pytest.raises(errors.RolloutError, match="finished with 'abort'"):
            await client.generate([5], SAMPLING, top_logprobs_p=0.9)


async def test_a_sidecar_stops_a_request_by_its_name(sidecar, fakes):
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def until_stopped(asked, reply):
        while not stopped.is_set():
            await asyncio.sleep(0.01)
        await reply.start(content_type="application/x-ndjson")
        for record in fakes.records(asked.body):
            await reply.line(record | {"finish_reason": "abort"})
        await reply.line({"done": True, "rollouts": 1})
        await reply.end()

    async def stop(asked, reply):
        loop.call_soon_threadsafe(stopped.set)
        await reply.json({"status": "ok"})

    sidecar.paths["/abort"] = stop
    sidecar.script.append(until_stopped)
    async with AsyncRolloutClient(sidecar.url) as client:
        asked = asyncio.create_task(client.generate([5], SAMPLING, on_abort="return", request_id="mine"))
        await until(lambda: sidecar.calls)
        await client.abort("mine")
        (rollout,) = await asked
        assert rollout.finish_reason == "abort"
    assert sidecar.of("/abort")[0].body == {"request_id": sidecar.calls[0]["request_id"]}


def test_records_say_that_they_were_aborted(fakes):
    assert to_record(made(fakes, [5]))["finish_reason"] == "abort"
    assert isinstance(made(fakes, [5]), Rollout)


async def test_waiting_for_a_paused_engine_costs_no_retry(engine, answers, fakes):
    async def paused(asked, reply):
        await reply.json({"error": {"message": "paused"}}, 503)

    async def cut(asked, reply):
        await reply.start()
        raise fakes.Cut

    engine.script += [answers("abort"), *[paused] * 5, cut, *[paused] * 5, answers("length")]
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=1) as client:
        (rollout,) = await client.generate([5], SAMPLING, top_logprobs_p=0.9, on_abort="resume")
    assert len(rollout.output_ids) == 2 * fakes.NUM_TOKENS
