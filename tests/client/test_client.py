"""The asynchronous client against real sockets."""

import asyncio
import json
import pickle
import threading
from contextlib import aclosing, suppress

import numpy as np
import pytest
import zstandard

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, Rollout, retry_policy
from sglang_topp_client import run as run_module
from sglang_topp_client.wire.records import MEDIA_TYPES

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
async def client(engine):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        yield client


@pytest.fixture
async def sidecar_client(sidecar):
    async with AsyncRolloutClient(sidecar.url, kind="sidecar") as client:
        yield client


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def status(code, **headers):
    async def handler(asked, reply):
        await reply.json({"error": {"message": "scripted"}}, code, **headers)

    return handler


def cut_after(fakes, *indices, text=b""):
    """Send these samples completely, then `text`, and drop the connection."""

    async def handler(asked, reply):
        await reply.start()
        for index in indices:
            await reply.event(fakes.chunk(fakes.sample(asked.body["input_ids"], index)))
        await reply.write(text)
        raise fakes.Cut

    return handler


def assert_equal(rollout, expected):
    assert np.array_equal(rollout.prompt_ids, expected.prompt_ids)
    assert np.array_equal(rollout.output_ids, expected.output_ids)
    assert np.array_equal(rollout.logprobs, expected.logprobs)
    assert rollout.candidates == expected.candidates


# -- results -------------------------------------------------------------------------------


async def test_all_samples_in_the_order_of_the_prompts(engine, client, fakes):
    prompts = [[i + 1] * (i % 3 + 1) for i in range(40)]
    counts = [i % 4 + 1 for i in range(40)]

    async def in_any_order(asked, reply):
        await asyncio.sleep(0.001 * (asked.body["input_ids"][0] * 7 % 40))
        await fakes.answer_generate(asked, reply)

    engine.script += [in_any_order] * 40
    rollouts = await client.generate(prompts, [{"n": n} for n in counts], top_logprobs_p=0.9)
    places = [(i, k) for i in range(40) for k in range(counts[i])]
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == places
    for rollout, (i, k) in zip(rollouts, places, strict=True):
        assert_equal(rollout, fakes.sample(prompts[i], k))


async def test_text_prompts(client, fakes):
    (rollout,) = await client.generate("hello", top_logprobs_p=0.9)
    assert_equal(rollout, fakes.sample("hello", 0))


async def test_each_sample_as_it_finishes(engine, client, fakes):
    release = threading.Event()

    async def slow_first_sample(asked, reply):
        made = [fakes.sample(asked.body["input_ids"], index) for index in range(2)]
        await reply.start()
        await reply.event(fakes.chunk(made[1]))
        await asyncio.to_thread(release.wait, 10)
        await reply.event(fakes.chunk(made[0]))
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    engine.script.append(slow_first_sample)
    async with aclosing(client.stream([1, 2], {"n": 2}, top_logprobs_p=0.9)) as rollouts:
        assert (await anext(rollouts)).sample_index == 1
        release.set()
        assert (await anext(rollouts)).sample_index == 0
        assert await anext(rollouts, None) is None


async def test_large_answers_are_decoded_all_the_same(engine, client, fakes):
    async def large(asked, reply):
        await reply.start()
        await reply.event(fakes.chunk(fakes.sample([1], 0, 6000)))
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    engine.script.append(large)
    (rollout,) = await client.generate([1], top_logprobs_p=0.9)
    assert_equal(rollout, fakes.sample([1], 0, 6000))


async def test_wrong_arguments_send_nothing(engine, client):
    with pytest.raises(errors.InvalidInputError):
        await client.generate([1], {"n": 0})
    with pytest.raises(errors.InvalidInputError):
        client.stream([1], top_logprobs_p=1.5)
    for timeout_s in (0, -1.0, float("nan"), float("inf"), "5"):
        with pytest.raises(errors.InvalidInputError, match="timeout_s"):
            client.stream([1], timeout_s=timeout_s)
    with pytest.raises(errors.InvalidInputError, match="request_id"):
        client.stream([1], request_id="")
    with pytest.raises(errors.InvalidInputError, match="request_id"):
        await client.abort("")
    assert engine.asked == []


@pytest.mark.parametrize(
    "changes",
    [
        {"base_url": "localhost:30000"},
        {"base_url": "ftp://h"},
        {"base_url": "http://h:99999"},
        {"base_url": "http://h:abc"},
        {"base_url": "http://[::1"},
        {"base_url": "http://h:1\n"},
        {"base_url": " http://h:1"},
        {"base_url": "http://h:1?a=b"},
        {"base_url": None},
        {"api_key": "s3cret\n"},
        {"api_key": "s3crét"},
        {"api_key": ""},
        {"kind": "vllm"},
        {"max_connections": 0},
        {"max_retries": -1},
    ],
)
def test_wrong_configuration(changes):
    with pytest.raises(errors.InvalidInputError, match=next(iter(changes))) as caught:
        AsyncRolloutClient(**({"base_url": "http://127.0.0.1:1"} | changes))
    assert "s3cr" not in str(caught.value)


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [500, 502, 503, 504, 429])
@pytest.mark.parametrize("failures", [1, 4])
async def test_retries_until_it_works(engine, client, fakes, code, failures):
    engine.script += [status(code)] * failures
    (rollout,) = await client.generate([5, 6], top_logprobs_p=0.9)
    assert_equal(rollout, fakes.sample([5, 6], 0))
    assert len(engine.calls) == failures + 1
    assert len({body["rid"] for body in engine.calls}) == failures + 1


@pytest.mark.parametrize("max_retries", [0, 1, 3])
@pytest.mark.parametrize("code", [500, 502])
async def test_gives_up_after_exactly_so_many_retries(engine, max_retries, code):
    engine.script += [status(code)] * 20
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=max_retries) as client:
        with pytest.raises(errors.ServerError, match="scripted") as caught:
            await client.generate([5, 6])
    assert caught.value.status == code
    assert len(engine.calls) == max_retries + 1


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("served", ["engine", "sidecar"])
@pytest.mark.parametrize("call", ["generate", "score"])
async def test_a_refusal_is_waited_out_without_a_retry(request, served, code, call):
    """A server that is full works, so only `timeout_s` ends the wait for it."""
    server = request.getfixturevalue(served)
    paths = {"generate": "/rollouts", "score": "/scores"} if served == "sidecar" else {}
    path = paths.get(call, "/generate")
    answer, refusals = server.paths[path], iter(range(12))

    async def full(asked, reply):
        if next(refusals, None) is None:
            return await answer(asked, reply)
        await status(code, Retry_After="0")(asked, reply)

    server.paths[path] = full
    async with AsyncRolloutClient(server.url, max_retries=0) as client:
        assert len(await getattr(client, call)([[5, 6]], top_logprobs_p=0.9)) == 1
        assert next(refusals, None) is None
        server.paths[path] = status(code)
        with pytest.raises(errors.RequestTimeoutError):
            await getattr(client, call)([[5, 6]], timeout_s=0.3)


@pytest.mark.parametrize("code", [429, 503])
async def test_methods_without_a_time_limit_give_up_on_refusals(engine, code):
    engine.paths["/server_info"] = status(code)
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=2) as client:
        with pytest.raises(errors.ResponseError, match="scripted"):
            await client.server_info()
    assert len(engine.of("/server_info")) == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, errors.BadRequestError),
        (401, errors.AuthenticationError),
        (403, errors.AuthenticationError),
        (404, errors.BadRequestError),
        (409, errors.BadRequestError),
        (413, errors.BadRequestError),
        (422, errors.BadRequestError),
        (302, errors.ResponseError),
        (204, errors.ResponseError),
    ],
)
async def test_other_answers_are_never_retried(engine, client, code, kind):
    engine.script += [status(code)] * 2
    with pytest.raises(errors.ResponseError) as caught:
        await client.generate([5, 6])
    assert type(caught.value) is kind
    assert caught.value.status == code
    assert len(engine.calls) == 1


async def test_the_servers_words_are_in_the_error(engine, client):
    for body in (
        {"error": {"message": "p is odd"}},
        {"error": "p is odd"},
        {"detail": "p is odd"},
        "p is odd",
    ):

        async def refuse(asked, reply, body=body):
            await reply.json(body, 400)

        engine.script.append(refuse)
        with pytest.raises(errors.BadRequestError, match=r"/generate: HTTP 400: .*p is odd") as caught:
            await client.generate([5, 6])
        assert "p is odd" in caught.value.body


async def test_retry_after_reaches_the_delay(engine, client, monkeypatch):
    waits = []

    def spy(retry, error):
        waits.append((retry, error.retry_after_s))
        return 0.0

    monkeypatch.setattr(retry_policy, "delay_s", spy)
    engine.script += [
        status(429, Retry_After="7"),
        status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 +99999999999999999999"),
        status(429),
    ]
    await client.generate([5, 6])
    assert waits == [(1, 7.0), (2, 0.0), (3, None), (4, None)]


async def test_a_cut_answer_is_retried(engine, client, fakes):
    engine.script += [cut_after(fakes), cut_after(fakes, text=b'data: {"text": "half'), cut_after(fakes)]
    (rollout,) = await client.generate([5, 6], top_logprobs_p=0.9)
    assert_equal(rollout, fakes.sample([5, 6], 0))
    assert len(engine.calls) == 4


async def test_an_answer_without_its_end_is_retried(engine, client, fakes):
    async def no_end(asked, reply):
        await reply.start()
        await reply.event(fakes.chunk(fakes.sample([5, 6], 0), first_token_only=True))
        await reply.end()

    async def half_a_line(asked, reply):
        await reply.start()
        await reply.write(b'data: {"text": "half')
        await reply.end()

    engine.script += [no_end, half_a_line]
    await client.generate([5, 6], top_logprobs_p=0.9)
    assert len(engine.calls) == 3


async def test_only_what_is_missing_is_asked_for_again(engine, client, fakes):
    engine.script.append(cut_after(fakes, 1, 3))
    rollouts = await client.generate([5, 6], {"n": 4}, top_logprobs_p=0.9)
    assert [body["sampling_params"]["n"] for body in engine.calls] == [4, 2]
    assert [r.sample_index for r in rollouts] == [0, 1, 2, 3]
    # The retry gives samples 0 and 1 to the free places.
    for rollout, made in zip(rollouts, (0, 1, 1, 3), strict=True):
        assert_equal(rollout, fakes.sample([5, 6], made))


async def test_a_refusal_inside_the_answer(engine, client):
    def report(code):
        async def handler(asked, reply):
            await reply.start()
            await reply.event({"error": {"message": "scripted", "code": code}})
            await reply.write(b"data: [DONE]\n\n")
            await reply.end()

        return handler

    engine.script += [report(503), report(400)]
    with pytest.raises(errors.BadRequestError, match="scripted"):
        await client.generate([5, 6])
    assert len(engine.calls) == 2


@pytest.mark.parametrize("code", [429, 500])
async def test_a_failure_behind_the_last_sample_costs_nothing(engine, client, fakes, code):
    async def fail_late(asked, reply):
        await reply.start()
        for index in range(2):
            await reply.event(fakes.chunk(fakes.sample([5, 6], index)))
        await reply.event({"error": {"message": "scripted", "code": code}})
        await reply.end()

    engine.script.append(fail_late)
    assert len(await client.generate([5, 6], {"n": 2}, top_logprobs_p=0.9)) == 2
    assert len(engine.calls) == 1


async def test_nesting_without_end_is_an_error_like_any_other(engine, client):
    async def nested(asked, reply):
        await reply.start(asked.body["input_ids"][0])
        await reply.write(b"data: " + b"[" * 60_000 + b"\n\n")
        await reply.end()

    engine.script += [nested, nested]
    with pytest.raises(errors.BadRequestError):
        await client.generate([400])
    with pytest.raises(errors.WireError, match="stream"):
        await client.generate([200])


async def test_an_inexact_answer_is_not_retried(engine, client, fakes):
    async def without_sets(asked, reply):
        chunk = fakes.chunk(fakes.sample([5, 6], 0))
        del chunk["meta_info"]["output_top_p_logprobs_lengths"]
        await reply.start()
        await reply.event(chunk)
        await reply.end()

    engine.script.append(without_sets)
    with pytest.raises(errors.WireError, match="output_top_p_logprobs_lengths"):
        await client.generate([5, 6], top_logprobs_p=0.9)
    assert len(engine.calls) == 1


async def test_a_server_that_does_not_listen_is_a_transport_error():
    async with AsyncRolloutClient("http://127.0.0.1:9", kind="sglang", max_retries=1) as client:
        with pytest.raises(errors.TransportError, match=r"127\.0\.0\.1:9"):
            await client.generate([1])


# -- ending early ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_aborts_every_sample(engine, client, hang, fakes, n):
    engine.script += [hang] * 2
    task = asyncio.create_task(client.generate([[5], [6]], {"n": n}))
    await until(lambda: engine.in_flight == 2)
    # The first tokens must have arrived, because the engine's ids come with them.
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if n == 1:
        expected = [body["rid"] for body in engine.calls]
    else:
        expected = [fakes.sample(prompt, index).request_id for prompt in ([5], [6]) for index in range(n)]
    await until(lambda: sorted(engine.aborted) == sorted(expected))
    await until(lambda: engine.hang_ups == 2)


async def test_a_time_limit_aborts(engine, client, hang):
    engine.script.append(hang)
    with pytest.raises(errors.RequestTimeoutError, match=r"1\.0 s"):
        await client.generate([5], timeout_s=1.0)
    await until(lambda: engine.aborted == [engine.calls[0]["rid"]])
    await until(lambda: engine.hang_ups == 1)


async def test_a_time_limit_holds_across_retries(engine, client, monkeypatch):
    monkeypatch.setattr(retry_policy, "delay_s", lambda retry, error: 60.0)
    engine.script.append(status(503))
    with pytest.raises(errors.RequestTimeoutError):
        await client.generate([5], timeout_s=0.2)


async def test_leaving_the_stream_aborts_the_rest(engine, client, hang, fakes):
    engine.script += [fakes.answer_generate, hang]
    async with aclosing(client.stream([[5], [6]], top_logprobs_p=0.9)) as rollouts:
        await anext(rollouts)
        await until(lambda: len(engine.calls) == 2)
    await until(lambda: engine.aborted == [engine.calls[1]["rid"]])
    await until(lambda: engine.hang_ups == 1)


async def test_abort_by_name(engine, client, hang):
    engine.script += [hang] * 3
    doomed = [asyncio.create_task(client.generate([i], request_id="doomed")) for i in (5, 6)]
    spared = asyncio.create_task(client.generate([7], request_id="doomed-not"))
    await until(lambda: engine.in_flight == 3)
    assert await client.abort("doomed") == 2
    assert len(engine.aborted) == 2
    for task in doomed:
        with pytest.raises(errors.RolloutError, match="aborted by this client"):
            await task
    assert not spared.done()
    spared.cancel()
    with suppress(asyncio.CancelledError):
        await spared


async def test_abort_of_an_unknown_name_goes_to_the_engine(engine, client):
    assert await client.abort("somebody-elses") == 0
    assert engine.aborted == ["somebody-elses"]


async def test_an_abort_reaches_the_other_event_loops_of_the_client(engine, client, hang):
    engine.script += [hang] * 2
    caught = []

    def elsewhere():
        with pytest.raises(errors.AbortedError, match="aborted by this client") as error:
            asyncio.run(client.generate([5], request_id="mine"))
        caught.append(error)

    caller = threading.Thread(target=elsewhere)
    caller.start()
    here = asyncio.create_task(client.generate([6], request_id="mine"))
    await until(lambda: engine.in_flight == 2)
    assert await client.abort("mine") == 2
    with pytest.raises(errors.AbortedError):
        await here
    await asyncio.to_thread(caller.join)
    assert caught
    await until(lambda: engine.hang_ups == 2)


async def test_one_failure_ends_the_rest(engine, client, hang):
    async def wait_then_refuse(asked, reply):
        while engine.in_flight < 3:
            await asyncio.sleep(0.005)
        await reply.json({}, 400)

    engine.script[:] = [hang, wait_then_refuse, hang]
    with pytest.raises(errors.BadRequestError):
        await client.generate([[5], [6], [7]])
    left = sorted(body["rid"] for body in (engine.calls[0], engine.calls[2]))
    await until(lambda: sorted(engine.aborted) == left)


async def test_cancelling_twice_leaves_nothing_behind(engine, client, hang):
    asked_to_abort = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def slow(asked, reply):
        loop.call_soon_threadsafe(asked_to_abort.set)
        await reply.hung_up()

    engine.paths["/abort_request"] = slow
    engine.script.append(hang)
    task = asyncio.create_task(client.generate([5]))
    await until(lambda: engine.in_flight == 1)
    task.cancel()
    await asked_to_abort.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not client._runs.servers.runs)


async def test_closing_ends_what_is_in_flight_and_leaves_a_usable_client(engine, client, hang):
    engine.script.append(hang)
    task = asyncio.create_task(client.generate([5]))
    await until(lambda: engine.in_flight == 1)
    await client.close()
    with pytest.raises(errors.RolloutError):
        await task
    assert len(await client.generate([5])) == 1


# -- many at once ----------------------------------------------------------------------------------


def barrier(engine, fakes, width):
    async def handler(asked, reply):
        while engine.peak < width:
            await asyncio.sleep(0.01)
        await fakes.answer_generate(asked, reply)

    return handler


async def test_three_hundred_samples_in_flight(engine, client, fakes):
    """The server answers only once all requests are there. A pool of 100 connections would wait forever."""
    engine.script += [barrier(engine, fakes, 300)] * 300
    rollouts = await client.generate([[i % 90, i] for i in range(300)], top_logprobs_p=0.9, timeout_s=60)
    assert len(rollouts) == 300
    assert engine.peak == 300
    assert len(engine.calls) == 300


async def test_the_rest_wait_for_a_connection(engine, fakes):
    engine.script += [barrier(engine, fakes, 5)] * 200
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=5) as client:
        batches = await asyncio.gather(*(client.generate([[i]] * 50, timeout_s=60) for i in range(4)))
    assert [len(batch) for batch in batches] == [50] * 4
    assert engine.peak == 5


# -- configuration, loops, keys --------------------------------------------------------------------


async def test_pickles_as_its_configuration(engine, client, fakes):
    await client.generate([5])
    again = pickle.loads(pickle.dumps(AsyncRolloutClient(engine.url, api_key="s3cret", max_retries=2)))
    assert repr(again) == f"AsyncRolloutClient({engine.url!r}, kind='auto')"
    async with again:
        assert_equal((await again.generate([5], top_logprobs_p=0.9))[0], fakes.sample([5], 0))
    assert engine.asked[-1].headers["authorization"] == "Bearer s3cret"
    engine.script += [status(500)] * 9
    with pytest.raises(errors.ServerError):
        await again.generate([5])
    assert len(engine.calls) == 1 + 1 + 3
    engine.script.clear()
    async with pickle.loads(pickle.dumps(client)) as used:
        assert len(await used.generate([5])) == 1


def test_the_client_works_on_one_loop_after_another(engine):
    client = AsyncRolloutClient(engine.url, kind="sglang")
    for _ in range(3):
        assert len(asyncio.run(client.generate([[1], [2]]))) == 2


def test_the_client_works_on_several_loops_at_once(engine):
    client = AsyncRolloutClient(engine.url)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(asyncio.run(client.generate([[1]] * 20))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(result) for result in results] == [20] * 4


async def test_the_key_is_sent_and_never_shown(engine):
    async with AsyncRolloutClient(engine.url, kind="sglang", api_key="s3cret") as client:
        await client.generate([5])
        assert "s3cret" not in repr(client)
        assert "s3cret" not in repr(client._configs)
    assert engine.calls
    assert all(asked.headers["authorization"] == "Bearer s3cret" for asked in engine.asked)


async def test_a_redirect_is_not_followed(engine, sidecar):
    engine.script.append(status(307, Location=f"{sidecar.url}/rollouts"))
    async with AsyncRolloutClient(engine.url, kind="sglang", api_key="s3cret") as client:
        with pytest.raises(errors.ResponseError, match="not followed"):
            await client.generate([5])
    assert sidecar.asked == []


async def test_a_path_in_the_address_is_kept(engine):
    async with AsyncRolloutClient(f"{engine.url}/behind/a/gateway/", kind="sglang") as client:
        with pytest.raises(errors.BadRequestError, match="/behind/a/gateway/generate"):
            await client.generate([5])


async def test_no_progress_line_without_a_terminal(engine, client, capsys):
    await client.generate([[1], [2]], progress=True)
    assert capsys.readouterr().err == ""


# -- which server ----------------------------------------------------------------------------------


async def test_an_engine_is_recognized(engine):
    async with AsyncRolloutClient(engine.url) as client:
        await asyncio.gather(*(client.generate([5]) for _ in range(20)))
        assert (await client.server_info())["version"] == "0.5.23"
    assert len(engine.of("/info")) == 1
    assert len(engine.calls) == 20


async def test_a_sidecar_is_recognized(sidecar, fakes):
    async with AsyncRolloutClient(sidecar.url) as client:
        rollouts = await client.generate([[5], [6]], {"n": 2}, top_logprobs_p=0.9)
        assert (await client.server_info())["service"] == "sglang-topp"
    for rollout, (prompt, index) in zip(rollouts, (([5], 0), ([5], 1), ([6], 0), ([6], 1)), strict=True):
        assert_equal(rollout, fakes.sample(prompt, index))
    assert len(sidecar.of("/info")) == 2


async def test_which_server_is_not_guessed_from_an_error(engine, sidecar):
    async def refuse(asked, reply):
        await reply.json({}, 401)

    engine.paths["/info"] = refuse
    async with AsyncRolloutClient(engine.url) as client:
        with pytest.raises(errors.AuthenticationError):
            await client.generate([5])
        del engine.paths["/info"]
        assert len(await client.generate([5])) == 1


# -- the sidecar -----------------------------------------------------------------------------------


async def test_each_prompt_goes_in_a_call_of_its_own(sidecar, sidecar_client, fakes):
    prompts = [[i % 90, i] for i in range(100)]
    rollouts = await sidecar_client.generate(prompts, {"n": 4}, top_logprobs_p=0.9)
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [
        (i, k) for i in range(100) for k in range(4)
    ]
    assert all(
        np.array_equal(r.output_ids, fakes.sample(prompts[r.prompt_index], r.sample_index).output_ids)
        for r in rollouts
    )
    assert sorted(body["prompts"][0] for body in sidecar.calls) == sorted(prompts)
    assert len({body["request_id"] for body in sidecar.calls}) == 100


def cut_records(fakes, count, *, politely):
    async def handler(asked, reply):
        await reply.start(content_type="application/x-ndjson")
        for record in list(fakes.records(asked.body))[:count]:
            await reply.line(record)
        if not politely:
            raise fakes.Cut
        await reply.end()

    return handler


@pytest.mark.parametrize("politely", [True, False])
async def test_a_cut_stream_never_passes_as_complete(sidecar, sidecar_client, fakes, politely):
    sidecar.script.append(cut_records(fakes, 3, politely=politely))
    rollouts = await sidecar_client.generate([5], {"n": 6}, top_logprobs_p=0.9)
    assert [r.sample_index for r in rollouts] == [0, 1, 2, 3, 4, 5]
    first, second = sidecar.calls
    assert first["request_id"] != second["request_id"]
    assert (second["prompts"], second["sampling_params"]) == ([[5]], {"n": 3})

    sidecar.script += [cut_records(fakes, 5, politely=politely)] + [
        cut_records(fakes, 0, politely=politely)
    ] * 4
    with pytest.raises(errors.TransportError):
        await sidecar_client.generate([5], {"n": 6}, top_logprobs_p=0.9)


@pytest.mark.parametrize("politely", [True, False])
async def test_a_cut_behind_the_last_sample_costs_nothing(sidecar, sidecar_client, fakes, politely):
    sidecar.script.append(cut_records(fakes, 6, politely=politely))
    assert len(await sidecar_client.generate([5], {"n": 6}, top_logprobs_p=0.9)) == 6
    assert len(sidecar.calls) == 1


@pytest.mark.parametrize(
    ("code", "kind", "calls"),
    [
        (503, "MissingCandidateSetsError", 1),
        (502, "RolloutError", 1),
        (502, "WireError", 1),
        (503, "PatchError", 1),
        (504, "RequestTimeoutError", 1),
        (502, "TransportError", 5),
        (502, "ServerError", 5),
        (500, "SomethingElse", 5),
        (401, "AuthenticationError", 1),
        (400, "BadRequestError", 1),
    ],
)
async def test_a_sidecars_error_is_raised_as_what_it_is(sidecar, sidecar_client, code, kind, calls):
    async def refuse(asked, reply):
        await reply.json({"error": {"type": kind, "message": "scripted", "status": code}}, code)

    sidecar.script += [refuse] * 9
    with pytest.raises(getattr(errors, kind, errors.ServerError), match="scripted"):
        await sidecar_client.generate([5])
    assert len(sidecar.calls) == calls


def cut_frames(fakes, num_bytes, *, politely):
    """Return a handler that sends a part of the samples, and then drops the connection or ends."""

    async def handler(asked, reply):
        await reply.start(content_type=MEDIA_TYPES[Rollout])
        await reply.write(b"".join(fakes.framed_samples(asked.body))[:num_bytes])
        if not politely:
            raise fakes.Cut
        await reply.end()

    return handler


@pytest.mark.parametrize("politely", [False, True], ids=["reset", "ended"])
@pytest.mark.parametrize("lacking", [1, 200, -3, None], ids=["a byte", "a part", "a length", "the end"])
async def test_cut_frames_never_pass_as_complete(sidecar, sidecar_client, fakes, politely, lacking):
    body = {"prompts": [[5]], "sampling_params": {"n": 2}}
    first, second = map(len, fakes.framed_samples(body))
    num_bytes = first if lacking is None else first + 3 if lacking < 0 else first + second - lacking
    sidecar.script += [cut_frames(fakes, num_bytes, politely=politely), fakes.answer_frames]

    rollouts = await sidecar_client.generate([5], {"n": 2}, top_logprobs_p=0.9)

    # Finished samples are not requested again, and the retry gives sample 0 to the free place.
    assert [rollout.sample_index for rollout in rollouts] == [0, 1]
    assert [rollout.candidates == fakes.sample([5], 0).candidates for rollout in rollouts] == [True, True]
    assert [call["sampling_params"]["n"] for call in sidecar.calls] == [2, 1]


async def test_frames_are_requested_and_lines_are_accepted(sidecar, fakes):
    async with AsyncRolloutClient(sidecar.url, kind="sidecar") as client:
        sidecar.script.append(fakes.answer_frames)
        in_frames = await client.generate([5], {"n": 2}, top_logprobs_p=0.9)
        # An older sidecar ignores `Accept` and answers like this.
        in_lines = await client.generate([5], {"n": 2}, top_logprobs_p=0.9)

    accepts = [asked.headers["accept"] for asked in sidecar.of("/rollouts")]
    assert accepts == [f"{MEDIA_TYPES[Rollout]}, application/x-ndjson;q=0.5"] * 2
    for framed, lined in zip(in_frames, in_lines, strict=True):
        assert (framed.prompt_index, framed.sample_index) == (lined.prompt_index, lined.sample_index)
        assert framed.logprobs.tolist() == lined.logprobs.tolist()
        assert framed.candidates == lined.candidates


async def test_a_sidecars_error_within_frames(sidecar, sidecar_client, fakes):
    async def fail(asked, reply):
        await reply.start(content_type=f"{MEDIA_TYPES[Rollout].upper()} ; charset=binary")
        await reply.write(next(fakes.framed_samples(asked.body)))
        error = {"error": {"type": "RolloutError", "message": "gave up", "status": 503}}
        await reply.write(fakes.framed(json.dumps(error).encode()))
        await reply.end()

    sidecar.script.append(fail)
    with pytest.raises(errors.RolloutError, match="gave up"):
        await sidecar_client.generate([5], {"n": 2}, top_logprobs_p=0.9)
    assert len(sidecar.calls) == 1


async def test_a_frame_that_was_altered_is_no_sample(sidecar, sidecar_client, fakes):
    async def alter(asked, reply):
        raw = bytearray(next(fakes.framed_samples(asked.body)))
        raw[-20] ^= 1
        await reply.start(content_type=MEDIA_TYPES[Rollout])
        await reply.write(bytes(raw))
        await reply.end()

    sidecar.script.append(alter)
    with pytest.raises(errors.WireError, match="frame: cannot be decompressed"):
        await sidecar_client.generate([5], top_logprobs_p=0.9)


async def test_a_frame_that_would_become_too_long_is_not_decompressed(sidecar, fakes):
    async def swell(asked, reply):
        await reply.start(content_type=MEDIA_TYPES[Rollout])
        await reply.write(fakes.framed(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(10**8))))
        await reply.end()

    sidecar.script.append(swell)
    async with AsyncRolloutClient(sidecar.url, kind="sidecar", max_message_bytes=10**7) as client:
        with pytest.raises(errors.WireError, match="max_message_bytes: got 100000000 bytes"):
            await client.generate([5], top_logprobs_p=0.9)


async def test_a_disconnect_aborts_at_a_sidecar(sidecar, sidecar_client):
    gone = []

    async def wait(asked, reply):
        await reply.start(content_type="application/x-ndjson")
        await reply.hung_up()
        gone.append(asked.body["request_id"])

    sidecar.script.append(wait)
    task = asyncio.create_task(sidecar_client.generate([5], request_id="mine"))
    await until(lambda: sidecar.in_flight == 1)
    await sidecar_client.abort("mine")
    with pytest.raises(errors.RolloutError):
        await task
    await until(lambda: gone)
    assert gone[0].startswith("mine-")

    async def aborts(asked, reply):
        await reply.json({"status": "ok", "aborted": 3})

    sidecar.paths["/abort"] = aborts
    assert await sidecar_client.abort("another's") == 3
    assert [asked.body for asked in sidecar.of("/abort")] == [{"request_id": "another's"}]


async def test_the_time_limit_is_passed_on(sidecar, sidecar_client):
    await sidecar_client.generate([5], timeout_s=np.float32(30.0))
    assert 29 < sidecar.calls[0]["timeout_s"] <= 30
    await sidecar_client.generate([5], timeout_s=None)
    assert sidecar.calls[1]["timeout_s"] is None


async def test_sets_of_a_smaller_threshold_are_refused(client, sidecar_client):
    for each in (client, sidecar_client):
        (rollout,) = await each.generate([5], top_logprobs_p=0.9)
        assert rollout.candidates is not None
        with pytest.raises(errors.WireError, match=r"expected at least 0\.99, the p that was"):
            await each.generate([5], top_logprobs_p=0.99)


# -- backpressure ----------------------------------------------------------------------------------


async def settled(engine):
    """Wait until no more calls come, and return how many there were."""
    count = -1
    while count != len(engine.calls):
        count = len(engine.calls)
        await asyncio.sleep(1.0)
    return count


async def test_a_slow_caller_holds_back_what_was_not_sent(engine, monkeypatch, no_leftovers):
    monkeypatch.setattr(run_module, "_MAX_WAITING_RESULTS", 100)
    async with (
        AsyncRolloutClient(engine.url, kind="sglang", max_connections=16) as client,
        aclosing(client.stream([[i % 90 + 1] for i in range(600)])) as rollouts,
    ):
        taken = [await anext(rollouts)]
        assert await settled(engine) <= 1 + 100 + 16
        # It does not hold back another request.
        assert len(await client.generate([[1]] * 50, timeout_s=60)) == 50
        taken += [rollout async for rollout in rollouts]
    assert sorted(rollout.prompt_index for rollout in taken) == list(range(600))


async def test_an_abort_of_a_stream_that_is_not_read_returns(engine, monkeypatch, no_leftovers):
    """The caller aborts between two samples, and reads the rest afterwards."""
    monkeypatch.setattr(run_module, "_MAX_WAITING_RESULTS", 20)
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=16) as client:
        params = {"max_new_tokens": 12}
        stream = client.stream([[i + 1] for i in range(80)], params, on_abort="return", request_id="mine")
        async with aclosing(stream) as rollouts:
            engine.paths["/generate"] = with_resumed_tokens(engine.paths["/generate"])
            taken = [await anext(rollouts)]
            await settled(engine)
            async with asyncio.timeout(30):
                await client.abort("mine")
                taken += [rollout async for rollout in rollouts]
    assert sorted(rollout.prompt_index for rollout in taken) == list(range(80))
    assert {rollout.finish_reason for rollout in taken} == {"stop", "abort"}


def with_resumed_tokens(handler):
    async def handle(asked, reply):
        event = reply.event

        async def add(chunk):
            chunk["meta_info"]["resumed_tokens"] = asked.body["resumed_tokens"]
            await event(chunk)

        reply.event = add
        await handler(asked, reply)

    return handle


@pytest.mark.parametrize("name", ["generate", "score"])
async def test_only_streams_have_no_time_limit(sidecar, sidecar_client, name):
    await getattr(sidecar_client, name)([5, 6])
    stream = getattr(sidecar_client, {"generate": "stream", "score": "stream_scores"}[name])
    assert [result async for result in stream([5, 6])]
    limited, unlimited = (asked.body for asked in sidecar.asked if asked.body)
    assert limited["timeout_s"] == pytest.approx(4 * 3600, abs=60)
    assert unlimited["timeout_s"] is None


async def test_an_unknown_option_is_refused(engine, client):
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'top_logprob_p'"):
        await client.generate([5], top_logprob_p=0.9)
    with pytest.raises(TypeError, match=r"stream_scores\(\) got an unexpected keyword argument 'on_timeout'"):
        client.stream_scores([5, 6], on_timeout="return")
    assert engine.asked == []
