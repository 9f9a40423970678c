"""The asynchronous client against real sockets."""

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import numpy as np
import pytest
import zstandard

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient, retry_policy
from sglang_topp_client import run as run_module
from sglang_topp_client.wire.records import MEDIA_TYPES
from tests.client import conftest as fakes
from tests.client.conftest import answers, chunk, encoded, held_until, sample, sends_bytes, status, until

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
async def client(engine):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        yield client


@pytest.fixture
async def sidecar_client(sidecar):
    async with AsyncRolloutClient(sidecar.url, kind="sidecar") as client:
        yield client


def cut_after(*indices, text=b""):
    """Send these samples completely, then `text`, and drop the connection."""

    def content(body):
        return fakes.events_of(*(chunk(sample(body["input_ids"], index)) for index in indices)) + text

    return sends_bytes(content, ends=False)


def assert_equal(rollout, expected):
    assert np.array_equal(rollout.prompt_ids, expected.prompt_ids)
    assert np.array_equal(rollout.output_ids, expected.output_ids)
    assert np.array_equal(rollout.logprobs, expected.logprobs)
    assert rollout.candidates == expected.candidates


# -- results -------------------------------------------------------------------------------


async def test_all_samples_in_the_order_of_the_prompts(engine, client):
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
        assert_equal(rollout, sample(prompts[i], k))


async def test_each_sample_as_it_finishes(engine, client):
    release = threading.Event()

    async def slow_first_sample(asked, reply):
        made = [sample(asked.body["input_ids"], index) for index in range(2)]
        await reply.start()
        await reply.event(chunk(made[1]))
        await asyncio.to_thread(release.wait, 10)
        await reply.event(chunk(made[0]))
        await reply.done()

    engine.script.append(slow_first_sample)
    async with aclosing(client.stream([1, 2], {"n": 2}, top_logprobs_p=0.9)) as rollouts:
        assert (await anext(rollouts)).sample_index == 1
        release.set()
        assert (await anext(rollouts)).sample_index == 0
        assert await anext(rollouts, None) is None


async def test_large_answers_are_decoded_all_the_same(engine, client):
    made = sample("hello", 0, 6000)
    engine.script.append(fakes.sends(chunk(made)))
    assert_equal(*await client.generate("hello", top_logprobs_p=0.9), made)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("base_url", "localhost:30000", "got 'localhost:30000', expected http"),
        ("base_url", "ftp://h", "got"),
        ("base_url", "http://h:99999", "got"),
        ("base_url", "http://h:abc", "got"),
        ("base_url", "http://[::1", "got"),
        ("base_url", "http://h:1\n", "got"),
        ("base_url", " http://h:1", "got"),
        ("base_url", "http://h:1?a=b", "got"),
        ("base_url", None, "got NoneType, expected text"),
        ("base_url", 7, "got int, expected text"),
        ("base_url", b"http://a:1", "got bytes, expected text"),
        ("base_url", [], "got none, expected at least one"),
        ("base_url", ["http://a:1", "http://a:1/"], "got 'http://a:1' twice"),
        ("base_url", ["http://a:1", None], "got NoneType, expected text"),
        ("base_url", ["http://a:1", "b"], "got 'b', expected http"),
        ("engine_url", "localhost:30000", "got 'localhost:30000'"),
        ("engine_url", [], "got none"),
        ("engine_url", ["http://a", "http://a/"], "got 'http://a' twice"),
        ("engine_api_key", " k", "expected"),
        ("api_key", "s3cret\n", "expected"),
        ("api_key", "s3crét", "expected"),
        ("api_key", "", "expected"),
        ("kind", "vllm", "got"),
        ("max_connections", 0, "got"),
        ("max_retries", -1, "got"),
    ],
)
def test_wrong_configuration(name, value, words):
    with pytest.raises(errors.InvalidInputError, match=f"{name}.*{words}") as caught:
        AsyncRolloutClient(**({"base_url": "http://127.0.0.1:1"} | {name: value}))
    assert "s3cr" not in str(caught.value)


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [500, 502, 503, 504, 429])
@pytest.mark.parametrize("failures", [1, 4])
async def test_retries_until_it_works(engine, client, code, failures):
    engine.script += [status(code)] * failures
    (rollout,) = await client.generate([5, 6], top_logprobs_p=0.9)
    assert_equal(rollout, sample([5, 6], 0))
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
    await client.close()
    assert len(engine.aborted) == (kind is errors.ResponseError)  # the others have not started


async def test_the_servers_words_are_in_the_error(engine, client):
    for body in (
        {"error": {"message": "p is odd"}},
        {"error": "p is odd"},
        {"detail": "p is odd"},
        "p is odd",
    ):
        engine.script.append(answers(body, 400))
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


async def test_an_answer_that_is_cut_or_lacks_its_end_is_retried(engine, client):
    half, first = b'data: {"text": "half', fakes.events_of(chunk(sample([5, 6], 0), first_token_only=True))
    engine.script += [cut_after(), cut_after(text=half), sends_bytes(first), sends_bytes(half)]
    (rollout,) = await client.generate([5, 6], top_logprobs_p=0.9)
    assert_equal(rollout, sample([5, 6], 0))
    assert len(engine.calls) == 5


async def test_only_what_is_missing_is_asked_for_again(engine, client):
    engine.script.append(cut_after(1, 3))
    rollouts = await client.generate([5, 6], {"n": 4}, top_logprobs_p=0.9)
    assert [body["sampling_params"]["n"] for body in engine.calls] == [4, 2]
    assert [r.sample_index for r in rollouts] == [0, 1, 2, 3]
    # The retry gives samples 0 and 1 to the free places.
    for rollout, made in zip(rollouts, (0, 1, 1, 3), strict=True):
        assert_equal(rollout, sample([5, 6], made))


async def test_a_refusal_inside_the_answer(engine, client):
    engine.script += [fakes.sends({"error": {"message": "scripted", "code": code}}) for code in (503, 400)]
    with pytest.raises(errors.BadRequestError, match="scripted"):
        await client.generate([5, 6])
    assert len(engine.calls) == 2
    # Once a sample has begun, a refusal is a failure.
    begun = chunk(sample([5, 6], 0), first_token_only=True)
    engine.script += [fakes.sends(begun, {"error": {"message": "scripted", "code": 503}})] * 5
    with pytest.raises(errors.ServerError, match="scripted"):
        await client.generate([5, 6])
    assert len(engine.calls) == 2 + 5


@pytest.mark.parametrize("code", [429, 500])
async def test_a_failure_behind_the_last_sample_costs_nothing(engine, client, code):
    made = [chunk(sample([5, 6], index)) for index in range(2)]
    engine.script.append(fakes.sends(*made, {"error": {"message": "scripted", "code": code}}))
    assert len(await client.generate([5, 6], {"n": 2}, top_logprobs_p=0.9)) == 2
    assert len(engine.calls) == 1
    engine.script.append(fakes.sends(*made, made[0]))
    with pytest.raises(errors.WireError, match="index: got 0, expected an unfinished one"):
        await client.generate([5, 6], {"n": 2}, top_logprobs_p=0.9)


async def test_nesting_without_end_is_an_error_like_any_other(engine, client):
    nested = b"data: " + b"[" * 60_000 + b"\n\n"
    engine.script += [sends_bytes(nested, code=code) for code in (400, 200)]
    with pytest.raises(errors.BadRequestError):
        await client.generate([1])
    with pytest.raises(errors.WireError, match="stream"):
        await client.generate([1])


async def test_an_inexact_answer_is_not_retried(engine, client):
    answer = chunk(sample([5, 6], 0))
    del answer["meta_info"]["output_top_p_logprobs_lengths"]
    engine.script.append(fakes.sends(answer))
    with pytest.raises(errors.WireError, match="output_top_p_logprobs_lengths"):
        await client.generate([5, 6], top_logprobs_p=0.9)
    assert len(engine.calls) == 1


# -- ending early ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_aborts_every_sample(engine, client, hang, n):
    engine.script += [hang] * 2
    task = asyncio.create_task(client.generate([[5], [6]], {"n": n}))
    await until(lambda: engine.in_flight == 2)
    await fakes.ids_known(client, 2 * n)
    await fakes.cancel(task)
    if n == 1:
        expected = [body["rid"] for body in engine.calls]
    else:
        expected = [sample(prompt, index).request_id for prompt in ([5], [6]) for index in range(n)]
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
    with pytest.raises(errors.RequestTimeoutError, match="scripted"):
        await client.generate([5], timeout_s=0.2)


async def test_abort_by_name(engine, client, hang):
    engine.script += [hang] * 3
    doomed = [asyncio.create_task(client.generate([i], {"n": 2}, request_id="doomed")) for i in (5, 6)]
    spared = asyncio.create_task(client.generate([7], request_id="doomed-not"))
    await fakes.ids_known(client, 5)
    assert await client.abort("doomed") == 2
    assert len(engine.aborted) == 4
    for task in doomed:
        with pytest.raises(errors.RolloutError, match="aborted by this client"):
            await task
    assert not spared.done()
    await fakes.cancel(spared)


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
    engine.script[:] = [hang, held_until(lambda: engine.in_flight == 3, status(400)), hang]
    with pytest.raises(errors.BadRequestError):
        await client.generate([[5], [6], [7]])
    left = sorted(body["rid"] for body in (engine.calls[0], engine.calls[2]))
    await until(lambda: sorted(engine.aborted) == left)


async def test_cancelling_twice_leaves_nothing_behind(engine, client, hang):
    engine.paths["/abort_request"] = fakes.silent
    engine.script.append(hang)
    task = asyncio.create_task(client.generate([5]))
    await until(lambda: engine.in_flight == 1)
    task.cancel()
    await until(lambda: engine.aborted)
    await fakes.cancel(task)
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


async def test_the_rest_wait_for_a_connection(engine):
    engine.script += [held_until(lambda: engine.peak == 5)] * 200
    async with AsyncRolloutClient(engine.url, kind="sglang", max_connections=5) as client:
        batches = await asyncio.gather(*(client.generate([[i]] * 50, timeout_s=60) for i in range(4)))
    assert [len(batch) for batch in batches] == [50] * 4
    assert engine.peak == 5


# -- configuration, loops, keys --------------------------------------------------------------------


async def test_pickles_as_its_configuration(engine, client):
    await client.generate([5])
    again = pickle.loads(pickle.dumps(AsyncRolloutClient(engine.url, api_key="s3cret", max_retries=2)))
    assert repr(again) == f"AsyncRolloutClient({engine.url!r}, kind='auto')"
    urls = [engine.url, "http://other"]
    for kind in (AsyncRolloutClient, RolloutClient):
        assert repr(kind(urls, kind="sglang")) == f"{kind.__name__}({tuple(urls)!r}, kind='sglang')"
    async with again:
        assert_equal((await again.generate([5], top_logprobs_p=0.9))[0], sample([5], 0))
    assert engine.asked[-1].headers["authorization"] == "Bearer s3cret"
    engine.script += [status(500)] * 9
    with pytest.raises(errors.ServerError):
        await again.generate([5])
    assert len(engine.calls) == 1 + 1 + 3
    engine.script.clear()
    async with pickle.loads(pickle.dumps(client)) as used:
        assert len(await used.generate([5])) == 1


@pytest.mark.parametrize("num_at_once", [1, 4])
def test_the_client_works_on_several_loops(engine, num_at_once):
    client = AsyncRolloutClient(engine.url)
    with ThreadPoolExecutor(num_at_once) as pool:
        results = list(pool.map(lambda _: asyncio.run(client.generate([[1]] * 20)), range(4)))
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


# -- which server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [404, 405])
async def test_an_engine_is_recognized(engine, code):
    engine.paths["/info"] = status(code)
    async with AsyncRolloutClient(engine.url) as client:
        await asyncio.gather(*(client.generate([5]) for _ in range(20)))
        assert (await client.server_info())["version"] == "0.5.23"
    assert len(engine.of("/info")) == 1
    assert len(engine.calls) == 20


async def test_a_sidecar_is_recognized(sidecar):
    async with AsyncRolloutClient(sidecar.url) as client:
        rollouts = await client.generate([[5], [6]], {"n": 2}, top_logprobs_p=0.9)
        assert (await client.server_info())["service"] == "sglang-topp"
    for rollout, (prompt, index) in zip(rollouts, (([5], 0), ([5], 1), ([6], 0), ([6], 1)), strict=True):
        assert_equal(rollout, sample(prompt, index))
    assert len(sidecar.of("/info")) == 2


async def test_which_server_is_not_guessed_from_an_error(engine, sidecar):
    engine.paths["/info"] = status(401)
    async with AsyncRolloutClient(engine.url) as client:
        with pytest.raises(errors.AuthenticationError):
            await client.generate([5])
        del engine.paths["/info"]
        assert len(await client.generate([5])) == 1


# -- the sidecar -----------------------------------------------------------------------------------


async def test_each_prompt_goes_in_a_call_of_its_own(sidecar, sidecar_client):
    prompts = [[i % 90, i] for i in range(100)]
    rollouts = await sidecar_client.generate(prompts, {"n": 4}, top_logprobs_p=0.9)
    places = [(i, k) for i in range(100) for k in range(4)]
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == places
    for rollout, (i, k) in zip(rollouts, places, strict=True):
        assert_equal(rollout, sample(prompts[i], k))
    assert sorted(body["prompts"][0] for body in sidecar.calls) == sorted(prompts)
    assert len({body["request_id"] for body in sidecar.calls}) == 100


def cut_records(count, *, politely):
    return sends_bytes(
        lambda body: encoded(fakes.results_of(body)[:count], is_whole=False), fakes.NDJSON, ends=politely
    )


@pytest.mark.parametrize("politely", [True, False])
async def test_a_cut_stream_never_passes_as_complete(sidecar, sidecar_client, politely):
    sidecar.script.append(cut_records(3, politely=politely))
    rollouts = await sidecar_client.generate([5], {"n": 6}, top_logprobs_p=0.9)
    assert [r.sample_index for r in rollouts] == [0, 1, 2, 3, 4, 5]
    first, second = sidecar.calls
    assert first["request_id"] != second["request_id"]
    assert (second["prompts"], second["sampling_params"]) == ([[5]], {"n": 3})

    sidecar.script += [cut_records(count, politely=politely) for count in (5, 0, 0, 0, 0)]
    with pytest.raises(errors.TransportError):
        await sidecar_client.generate([5], {"n": 6}, top_logprobs_p=0.9)
    assert len(sidecar.calls) == 2 + 5

    # After the last sample, a cut costs nothing.
    sidecar.script.append(cut_records(6, politely=politely))
    assert len(await sidecar_client.generate([5], {"n": 6}, top_logprobs_p=0.9)) == 6
    assert len(sidecar.calls) == 2 + 5 + 1


@pytest.mark.parametrize(
    ("code", "kind", "calls"),
    [
        *((503, kind, 1) for kind in ("MissingCandidateSetsError", "PatchError")),
        *(
            (502, kind, 1)
            for kind in ("SampledTokenMissingError", "RolloutError", "AbortedError", "WireError")
        ),
        (504, "RequestTimeoutError", 1),
        *((502, kind, 5) for kind in ("TransportError", "ServerError")),
        (500, "SomethingElse", 5),
        (401, "AuthenticationError", 1),
        (400, "BadRequestError", 1),
    ],
)
async def test_a_sidecars_error_is_raised_as_what_it_is(sidecar, sidecar_client, code, kind, calls):
    sidecar.script += [answers({"error": {"type": kind, "message": "scripted", "status": code}}, code)] * 9
    with pytest.raises(getattr(errors, kind, errors.ServerError), match="scripted"):
        await sidecar_client.generate([5])
    assert len(sidecar.calls) == calls


@pytest.mark.parametrize("politely", [False, True], ids=["reset", "ended"])
@pytest.mark.parametrize("lacking", [1, 200, -3, None], ids=["a byte", "a part", "a length", "the end"])
async def test_cut_frames_never_pass_as_complete(sidecar, sidecar_client, politely, lacking):
    made = [sample([5], index) for index in range(2)]
    first, both = (len(encoded(made[:count], in_frames=True, is_whole=False)) for count in (1, 2))
    num_bytes = first if lacking is None else first + 3 if lacking < 0 else both - lacking

    def part(body):
        return encoded(fakes.results_of(body), in_frames=True)[:num_bytes]

    sidecar.script += [sends_bytes(part, MEDIA_TYPES[Rollout], ends=politely), fakes.answer_frames]
    rollouts = await sidecar_client.generate([5], {"n": 2}, top_logprobs_p=0.9)

    # Finished samples are not requested again, and the retry gives sample 0 to the free place.
    assert [rollout.sample_index for rollout in rollouts] == [0, 1]
    assert [rollout.candidates == sample([5], 0).candidates for rollout in rollouts] == [True, True]
    assert [call["sampling_params"]["n"] for call in sidecar.calls] == [2, 1]


async def test_frames_are_requested_and_lines_are_accepted(sidecar):
    async with AsyncRolloutClient(sidecar.url, kind="sidecar") as client:
        sidecar.script.append(fakes.answer_frames)
        in_frames = await client.generate([5], {"n": 2}, top_logprobs_p=0.9)
        # An older sidecar ignores `Accept` and answers like this.
        in_lines = await client.generate([5], {"n": 2}, top_logprobs_p=0.9)

    accepts = [asked.headers["accept"] for asked in sidecar.of("/rollouts")]
    assert accepts == [f"{MEDIA_TYPES[Rollout]}, application/x-ndjson;q=0.5"] * 2
    for framed, lined in zip(in_frames, in_lines, strict=True):
        assert framed.sample_index == lined.sample_index
        assert_equal(framed, lined)


async def test_a_sidecars_error_within_frames(sidecar, sidecar_client):
    error = fakes.framed(b'{"error": {"type": "RolloutError", "message": "gave up", "status": 503}}')
    one = encoded([sample([5], 0)], in_frames=True, is_whole=False)
    sidecar.script.append(sends_bytes(one + error, f"{MEDIA_TYPES[Rollout].upper()} ; charset=binary"))
    with pytest.raises(errors.RolloutError, match="gave up"):
        await sidecar_client.generate([5], {"n": 2}, top_logprobs_p=0.9)
    assert len(sidecar.calls) == 1


async def test_a_frame_that_would_become_too_long_is_not_decompressed(sidecar):
    frame = fakes.framed(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(10**8)))
    sidecar.script.append(sends_bytes(frame, MEDIA_TYPES[Rollout]))
    async with AsyncRolloutClient(sidecar.url, kind="sidecar", max_message_bytes=10**7) as client:
        with pytest.raises(errors.WireError, match="max_message_bytes: got 100000000 bytes"):
            await client.generate([5], top_logprobs_p=0.9)


async def test_a_disconnect_aborts_at_a_sidecar(sidecar, sidecar_client):
    gone = []

    async def wait(asked, reply):
        await reply.start(content_type=fakes.NDJSON)
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

    sidecar.paths["/abort"] = answers({"status": "ok", "aborted": 3})
    assert await sidecar_client.abort("another's") == 3
    assert [asked.body for asked in sidecar.of("/abort")] == [{"request_id": "another's"}]


async def test_the_time_limit_is_passed_on(sidecar, sidecar_client):
    sidecar.script.append(status(500))
    await sidecar_client.generate([5], timeout_s=np.float32(30.0))
    first, second = (body["timeout_s"] for body in sidecar.calls)
    assert 20 < second < first <= 30
    for options in ({"timeout_s": None}, {"timeout_s": 30, "on_timeout": "return"}):
        await sidecar_client.generate([5], **options)
        assert sidecar.calls[-1]["timeout_s"] is None


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
            taken = [await anext(rollouts)]
            await settled(engine)
            async with asyncio.timeout(30):
                await client.abort("mine")
                taken += [rollout async for rollout in rollouts]
    assert sorted(rollout.prompt_index for rollout in taken) == list(range(80))
    assert {rollout.finish_reason for rollout in taken} == {"stop", "abort"}


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
