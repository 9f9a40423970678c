"""One client with several servers: the choice of the server, and samples whose server fails."""

import asyncio
import contextlib
import pickle
import re
import socket

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient, retry_policy
from sglang_topp_client.requests import SampleRequest
from sglang_topp_client.run import RunOptions

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def engines(fakes):
    """Three servers with SGLang's routes."""
    with several_engines(fakes, 3) as servers:
        yield servers


def eight_engines(fakes):
    return several_engines(fakes, 8)


@contextlib.contextmanager
def several_engines(fakes, count):
    async def accept(asked, reply):
        await reply.start()
        await reply.end()

    async def info(asked, reply):
        await reply.json({"version": "0.5.23", "path": asked.path})

    paths = {"/generate": fakes.answer_generate, "/abort_request": accept, "/server_info": info}
    with contextlib.ExitStack() as stack:
        servers = [fakes.FakeServer("/generate", dict(paths)) for _ in range(count)]
        for server in servers:
            server.url = stack.enter_context(fakes.Uvicorn(server.app))
        yield servers


@pytest.fixture
def nobody():
    """Return an address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def client_of(engines, **options):
    return AsyncRolloutClient([engine.url for engine in engines], kind="sglang", **options)


def places(n, num_prompts=30):
    return [(i, k) for i in range(num_prompts) for k in range(n)]


def assert_whole(rollouts, fakes, prompts, n=1):
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == places(n, len(prompts))
    for rollout in rollouts:
        expected = fakes.sample(prompts[rollout.prompt_index], rollout.sample_index)
        assert rollout.output_ids.tolist() == expected.output_ids.tolist()
        assert rollout.candidates == expected.candidates


PROMPTS = [[i + 1, 7] for i in range(30)]


async def test_calls_are_spread_evenly_and_a_prompts_samples_stay_together(engines, fakes):
    async def once_all_are_asked(asked, reply):
        while sum(len(engine.calls) for engine in engines) < len(PROMPTS):
            await asyncio.sleep(0.005)
        await fakes.answer_generate(asked, reply)

    for engine in engines:  # a server that answers at once would be the least busy one again
        engine.paths["/generate"] = once_all_are_asked
    async with client_of(engines) as client:
        rollouts = await client.generate(PROMPTS, {"n": 4}, top_logprobs_p=0.9)
    assert_whole(rollouts, fakes, PROMPTS, n=4)
    assert [len(engine.calls) for engine in engines] == [10, 10, 10]
    assert {call["sampling_params"]["n"] for engine in engines for call in engine.calls} == {4}


async def test_a_busy_server_gets_no_more(engines, fakes):
    released = asyncio.Event()

    async def slow(asked, reply):
        while not released.is_set():
            await asyncio.sleep(0.005)
        await fakes.answer_generate(asked, reply)

    engines[0].paths["/generate"] = slow
    async with client_of(engines, max_connections=6) as client:
        work = asyncio.create_task(client.generate(PROMPTS, top_logprobs_p=0.9))
        while sum(len(engine.calls) for engine in engines) < len(PROMPTS):
            await asyncio.sleep(0.005)
        assert len(engines[0].calls) <= 6
        released.set()
        assert_whole(await work, fakes, PROMPTS)


async def test_a_dead_servers_samples_go_to_the_others(engines, nobody, fakes):
    async with AsyncRolloutClient([nobody, engines[0].url, engines[1].url], kind="sglang") as client:
        rollouts = await client.generate(PROMPTS, top_logprobs_p=0.9)
    assert_whole(rollouts, fakes, PROMPTS)
    assert len(engines[0].calls) + len(engines[1].calls) == len(PROMPTS)


async def test_samples_that_a_dead_server_finished_are_not_requested_again(engines, fakes):
    asked_of_the_dying = []

    async def dies(asked, reply):
        asked_of_the_dying.append(asked.body["sampling_params"]["n"])
        await reply.start()
        await reply.event(fakes.chunk(fakes.sample(asked.body["input_ids"], 2)))
        raise fakes.Cut

    engines[1].script += [dies] * 8
    async with client_of(engines) as client:
        rollouts = await client.generate(PROMPTS, {"n": 4}, top_logprobs_p=0.9)
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == places(4)
    assert asked_of_the_dying
    asked = sum(call["sampling_params"]["n"] for engine in engines for call in engine.calls)
    assert asked - sum(asked_of_the_dying) == 4 * len(PROMPTS) - len(asked_of_the_dying)


async def test_a_call_moves_to_another_server_without_delay(engines, nobody, monkeypatch, fakes):
    monkeypatch.setattr(retry_policy, "_FIRST_DELAY_S", 3600.0)
    monkeypatch.setattr(retry_policy, "_MAX_DELAY_S", 3600.0)
    async with AsyncRolloutClient([nobody, engines[0].url], kind="sglang") as client:
        assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9, timeout_s=60), fakes, PROMPTS)


async def test_a_server_that_comes_back_is_asked_again(engines, fakes):
    async def broken(asked, reply):
        await reply.json({"error": {"message": "scripted"}}, 503)

    engines[2].paths["/generate"] = broken
    async with client_of(engines) as client:
        await client.generate(PROMPTS, top_logprobs_p=0.9)
        engines[2].paths["/generate"] = fakes.answer_generate
        before = len(engines[2].calls)
        async with asyncio.timeout(30):
            while len(engines[2].calls) < before + 5:
                await client.generate(PROMPTS, top_logprobs_p=0.9)
                await asyncio.sleep(0.01)


async def test_the_error_names_all_servers_if_all_are_dead(nobody):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        other = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with AsyncRolloutClient([nobody, other], kind="sglang", max_retries=3) as client:
            with pytest.raises(errors.TransportError, match="none of the 2 servers answers") as caught:
                await client.generate([5], top_logprobs_p=0.9)
    assert nobody in str(caught.value)
    assert other in str(caught.value)


@pytest.mark.parametrize("max_retries", [0, 4])
async def test_servers_that_are_full_cost_no_retry_while_another_one_is_not(fakes, max_retries):
    """Six of eight servers fail, more than the number of retries."""

    async def full(asked, reply):
        await reply.json({"error": {"message": "scripted"}}, 429)

    with eight_engines(fakes) as engines:
        for engine in engines[:6]:
            engine.paths["/generate"] = full
        async with client_of(engines, max_retries=max_retries) as client:
            for _ in range(3):
                assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9, timeout_s=60), fakes, PROMPTS)


async def test_a_call_that_fails_everywhere_backs_off(fakes, monkeypatch):
    """A retry begins only once every server has failed the call. No server gets it twice in a row."""
    monkeypatch.setattr(retry_policy, "_FIRST_DELAY_S", 0.2)
    poison = PROMPTS[0]

    async def fails_one(asked, reply):
        if asked.body["input_ids"] == poison:
            return await reply.json({"error": {"message": "scripted"}}, 500)
        await fakes.answer_generate(asked, reply)

    with eight_engines(fakes) as engines:
        for engine in engines:
            engine.paths["/generate"] = fails_one
        async with client_of(engines, max_retries=2) as client:
            # The other calls succeed, so their servers are always ready again.
            others = asyncio.create_task(client.generate(PROMPTS[1:] * 10, top_logprobs_p=0.9))
            start = asyncio.get_running_loop().time()
            with pytest.raises(errors.ServerError, match="scripted"):
                await client.generate([poison], top_logprobs_p=0.9)
            assert asyncio.get_running_loop().time() - start > 0.2
            await others
        num_asked = sum(call["input_ids"] == poison for engine in engines for call in engine.calls)
    assert 3 <= num_asked <= 3 * 8


async def test_a_call_does_not_wait_for_a_full_server(engines, fakes):
    async def full(asked, reply):
        await reply.json({"error": {"message": "scripted"}}, 429, retry_after="3000")

    engines[0].paths["/generate"] = full
    async with client_of(engines) as client:
        assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9, timeout_s=60), fakes, PROMPTS)


async def test_a_refused_request_is_not_retried_on_another_server(engines):
    async def refuse(asked, reply):
        await reply.json({"error": {"message": "top_k must be positive"}}, 400)

    for engine in engines:
        engine.paths["/generate"] = refuse
    async with client_of(engines) as client:
        with pytest.raises(errors.BadRequestError, match="top_k"):
            await client.generate([5], {"top_k": -7}, top_logprobs_p=0.9)
    assert sum(len(engine.calls) for engine in engines) == 1


async def test_an_error_names_its_server(engines, fakes):
    async def unpatched(asked, reply):
        made = fakes.chunk(fakes.sample(asked.body["input_ids"], 0))
        made["meta_info"] = {name: v for name, v in made["meta_info"].items() if "top_p" not in name}
        await reply.start()
        await reply.event(made)
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    engines[1].paths["/generate"] = unpatched
    async with client_of(engines) as client:
        with pytest.raises(errors.MissingCandidateSetsError) as caught:
            await client.generate(PROMPTS, top_logprobs_p=0.9)
    assert caught.value.__notes__ == [f"the server is {engines[1].url}"]


async def test_an_abort_goes_to_the_server_that_runs_it(engines, fakes):
    started = []

    async def hang(asked, reply):
        started.append(asked.body["rid"])
        await reply.start()
        await reply.hung_up()

    for engine in engines:
        engine.paths["/generate"] = hang
    async with client_of(engines) as client:
        work = asyncio.create_task(client.generate(PROMPTS[:6], top_logprobs_p=0.9, request_id="mine"))
        while len(started) < 6:
            await asyncio.sleep(0.005)
        await client.abort("mine")
        with pytest.raises(errors.RolloutError):
            await work
    for engine in engines:
        assert sorted(engine.aborted) == sorted(call["rid"] for call in engine.calls)
        assert len(engine.aborted) == 2


async def test_an_unknown_id_is_aborted_everywhere(engines, nobody):
    urls = [nobody, *(engine.url for engine in engines)]
    async with AsyncRolloutClient(urls, kind="sglang") as client:
        await client.abort("somebody-elses")
    assert [engine.aborted for engine in engines] == [["somebody-elses"]] * 3
    async with AsyncRolloutClient([nobody], kind="sglang") as client:
        with pytest.raises(errors.TransportError):
            await client.abort("somebody-elses")


async def test_server_info_returns_the_answer_of_each_server(engines, nobody):
    async with client_of(engines) as client:
        assert await client.server_infos() == {
            engine.url: {"version": "0.5.23", "path": "/server_info"} for engine in engines
        }
        for engine in engines:
            engine.asked.clear()
        assert (await client.server_info(engines[1].url))["version"] == "0.5.23"
        assert [len(engine.of("/server_info")) for engine in engines] == [0, 1, 0]
        for wrong in ("http://elsewhere:1", 7, ["x"]):
            with pytest.raises(errors.InvalidInputError, match=r"base_url: got .*, expected one of http"):
                await client.server_info(wrong)
    async with AsyncRolloutClient([engines[0].url], kind="sglang") as client:
        assert list(await client.server_infos()) == [engines[0].url]
    async with AsyncRolloutClient([engines[0].url, nobody], kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.TransportError, match=nobody):
            await client.server_infos()


async def test_the_kind_is_taken_from_the_first_server_that_answers(engines, nobody, fakes):
    async with AsyncRolloutClient([nobody, *(engine.url for engine in engines)]) as client:
        assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9), fakes, PROMPTS)


async def test_engines_and_sidecars_share_a_batch(engines, sidecar, fakes):
    async with AsyncRolloutClient([engines[0].url, sidecar.url]) as client:
        assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9), fakes, PROMPTS)
    assert len(engines[0].calls) + len(sidecar.calls) == len(PROMPTS)
    assert engines[0].calls
    assert sidecar.calls


# -- keys ------------------------------------------------------------------------------------------


async def test_a_prompts_calls_carry_its_own_routing_key(engines):
    async with client_of(engines) as client:
        rollouts = await client.generate(PROMPTS, {"n": 2}, top_logprobs_p=0.9)
    sent = [asked.headers["x-smg-routing-key"] for engine in engines for asked in engine.of("/generate")]
    assert sorted(sent) == sorted({rollout.routing_key for rollout in rollouts})
    assert len(sent) == len(PROMPTS)
    # The server chooses the end of a key.
    ends = [{a.headers["x-smg-routing-key"][-8:] for a in engine.of("/generate")} for engine in engines]
    assert [len(end) for end in ends] == [1, 1, 1]


async def test_a_resumed_rollout_goes_to_the_server_that_made_it(engines):
    async with client_of(engines) as client:
        made = await client.generate(PROMPTS[:12], top_logprobs_p=0.9)
        before = {tuple(call["input_ids"]): i for i, e in enumerate(engines) for call in e.calls}
        for engine in engines:
            engine.asked.clear()
        wanted = [
            SampleRequest(
                i, [*one.prompt_ids.tolist(), 9], {}, (0,), 0.9, "distribution", routing_key=one.routing_key
            )
            for i, one in enumerate(made)
        ]
        again = await client._runs.gather(wanted, RunOptions("again"))
    after = {tuple(call["input_ids"][:-1]): i for i, e in enumerate(engines) for call in e.calls}
    assert after == before
    first = {rollout.prompt_index: rollout.routing_key for rollout in made}
    assert {rollout.prompt_index: rollout.routing_key for rollout in again} == first


async def test_a_rollout_is_scored_where_it_was_made(engines):
    async with client_of(engines) as client:
        made = await client.generate(PROMPTS[:12], top_logprobs_p=0.9)
        before = {tuple(call["input_ids"]): i for i, e in enumerate(engines) for call in e.calls}
        for engine in engines:
            engine.asked.clear()
        scores = await client.score(made, top_logprobs_p=0.5)
    after = {tuple(call["input_ids"][:2]): i for i, e in enumerate(engines) for call in e.calls}
    assert after == before
    for score, rollout in zip(scores, made, strict=True):
        assert score.token_ids[score.start :].tolist() == rollout.output_ids.tolist()


async def test_the_sequences_of_a_dead_server_are_scored_by_the_others(engines, nobody):
    sequences = [[i + 1, 7, 8] for i in range(30)]
    async with AsyncRolloutClient([nobody, *(engine.url for engine in engines)], kind="sglang") as client:
        scores = await client.score(sequences, top_logprobs_p=0.5)
    assert [score.token_ids.tolist() for score in scores] == sequences


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "got none, expected at least one"),
        (["http://a:1", "http://a:1/"], "got 'http://a:1' twice"),
        (["http://a:1", None], "got NoneType, expected text"),
        (["http://a:1", "b"], "got 'b', expected http"),
        (7, "got int, expected text"),
        (b"http://a:1", "got bytes, expected text"),
    ],
)
def test_wrong_base_urls_are_refused(given, message):
    with pytest.raises(errors.InvalidInputError, match=f"base_url: .*{message}"):
        AsyncRolloutClient(given)


def test_it_pickles_as_its_configuration(engines):
    urls = [engine.url for engine in engines]
    with RolloutClient(urls, kind="sglang", max_retries=2) as client:
        other = pickle.loads(pickle.dumps(client))
        assert repr(other) == repr(client) == f"RolloutClient({tuple(urls)!r}, kind='sglang')"
        with other:
            assert len(other.generate(PROMPTS[:3])) == 3
        assert client.server_info(urls[2])["version"] == "0.5.23"


async def test_every_retry_and_move_is_a_line_of_the_log(engines, caplog):
    async def fail(asked, reply):
        await reply.json({"error": {"message": "scripted"}}, 500)

    caplog.set_level("INFO", "sglang_topp_client")
    for engine in engines:
        engine.script += [fail] * 2
    async with client_of(engines) as client:
        assert len(await client.generate([5], request_id="mine")) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    urls = "|".join(engine.url for engine in engines)
    move = rf"request mine moves from ({urls}): .*scripted"
    retry = rf"request mine is retried in [\d.]+ s after ({urls}): .*scripted"
    counts = [sum(re.match(form, line) is not None for line in lines) for form in (move, retry, "")]
    assert counts == [4, 2, 6]
