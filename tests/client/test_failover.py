"""One client with several servers: the choice of the server, and samples whose server fails."""

import asyncio
import re
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, retry_policy
from sglang_topp_client.value_checks import fresh_id
from tests.client import conftest as fakes
from tests.client.conftest import by_request, chunk, held_until, no_server, sample, silent, status, until

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def engines(start_servers):
    """Three servers with SGLang's routes."""
    return start_servers(3)


@pytest.fixture
def nobody():
    with no_server() as url:
        yield url


def client_of(engines, **options):
    return AsyncRolloutClient([engine.url for engine in engines], kind="sglang", **options)


def places(n, num_prompts=30):
    return [(i, k) for i in range(num_prompts) for k in range(n)]


def assert_whole(rollouts, prompts, n=1):
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == places(n, len(prompts))
    for rollout in rollouts:
        expected = fakes.sample(prompts[rollout.prompt_index], rollout.sample_index)
        assert rollout.output_ids.tolist() == expected.output_ids.tolist()
        assert rollout.candidates == expected.candidates


PROMPTS = [[i + 1, 7] for i in range(30)]


def num_calls(engines):
    return sum(len(engine.calls) for engine in engines)


async def test_calls_are_spread_evenly_and_a_prompts_samples_stay_together(engines):
    for engine in engines:  # a server that answers at once would be the least busy one again
        engine.paths["/generate"] = held_until(lambda: num_calls(engines) == len(PROMPTS))
    async with client_of(engines) as client:
        rollouts = await client.generate(PROMPTS, {"n": 4}, top_logprobs_p=0.9)
    assert_whole(rollouts, PROMPTS, n=4)
    assert [len(engine.calls) for engine in engines] == [10, 10, 10]
    assert {call["sampling_params"]["n"] for engine in engines for call in engine.calls} == {4}


async def test_a_busy_server_gets_no_more(engines):
    released = asyncio.Event()
    engines[0].paths["/generate"] = held_until(released.is_set)
    async with client_of(engines, max_connections=6) as client:
        work = asyncio.create_task(client.generate(PROMPTS, top_logprobs_p=0.9))
        await until(lambda: num_calls(engines) == len(PROMPTS))
        assert len(engines[0].calls) <= 6
        released.set()
        assert_whole(await work, PROMPTS)


async def test_samples_that_a_dead_server_finished_are_not_requested_again(engines):
    asked_of_the_dying = []

    def one_of_many(body):
        asked_of_the_dying.append(body["sampling_params"]["n"])
        return fakes.events_of(chunk(sample(body["input_ids"], 2)))

    engines[1].script += [fakes.sends_bytes(one_of_many, ends=False)] * 8
    async with client_of(engines) as client:
        rollouts = await client.generate(PROMPTS, {"n": 4}, top_logprobs_p=0.9)
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == places(4)
    assert asked_of_the_dying
    asked = sum(call["sampling_params"]["n"] for engine in engines for call in engine.calls)
    assert asked - sum(asked_of_the_dying) == 4 * len(PROMPTS) - len(asked_of_the_dying)


async def test_a_call_moves_to_another_server_without_delay(engines, nobody, monkeypatch):
    monkeypatch.setattr(retry_policy, "_FIRST_DELAY_S", 3600.0)
    monkeypatch.setattr(retry_policy, "_MAX_DELAY_S", 3600.0)
    async with AsyncRolloutClient([nobody, engines[0].url], kind="sglang") as client:
        assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9, timeout_s=60), PROMPTS)


async def test_a_server_that_comes_back_is_asked_again(engines):
    engines[2].paths["/generate"] = status(503)
    async with client_of(engines) as client:
        await client.generate(PROMPTS, top_logprobs_p=0.9)
        engines[2].paths["/generate"] = fakes.answer_generate
        before = len(engines[2].calls)
        async with asyncio.timeout(30):
            while len(engines[2].calls) < before + 5:
                await client.generate(PROMPTS, top_logprobs_p=0.9)
                await asyncio.sleep(0.01)


async def test_the_error_names_all_servers_if_all_are_dead(nobody):
    with no_server() as other:
        async with AsyncRolloutClient([nobody, other], kind="sglang", max_retries=3) as client:
            with pytest.raises(errors.TransportError, match="none of the 2 servers answers") as caught:
                await client.generate([5], top_logprobs_p=0.9)
    assert nobody in str(caught.value)
    assert other in str(caught.value)


@pytest.mark.parametrize("max_retries", [0, 4])
async def test_servers_that_are_full_cost_no_retry_while_another_one_is_not(start_servers, max_retries):
    """Six of eight servers fail, more than the number of retries."""
    engines = start_servers(8)
    for engine in engines[:6]:
        engine.paths["/generate"] = status(429, retry_after="3000")
    async with client_of(engines, max_retries=max_retries) as client:
        for _ in range(3):
            assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9, timeout_s=60), PROMPTS)


async def test_a_call_that_fails_everywhere_backs_off(start_servers, monkeypatch):
    """A retry begins only once every server has failed the call. No server gets it twice in a row."""
    monkeypatch.setattr(retry_policy, "_FIRST_DELAY_S", 0.2)
    poison, engines = PROMPTS[0], start_servers(8)
    for engine in engines:
        engine.paths["/generate"] = by_request(
            lambda asked: status(500) if asked.body["input_ids"] == poison else fakes.answer_generate
        )
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


async def test_a_refused_request_is_not_retried_on_another_server(engines):
    for engine in engines:
        engine.paths["/generate"] = status(400)
    async with client_of(engines) as client:
        with pytest.raises(errors.BadRequestError, match="scripted"):
            await client.generate([5], {"top_k": -7}, top_logprobs_p=0.9)
    assert num_calls(engines) == 1


async def test_an_error_names_its_server(engines):
    engines[1].paths["/generate"] = fakes.altered(fakes.answer_generate, fakes.without_sets)
    async with client_of(engines) as client:
        with pytest.raises(errors.MissingCandidateSetsError) as caught:
            await client.generate(PROMPTS, top_logprobs_p=0.9)
    assert caught.value.__notes__ == [f"the server is {engines[1].url}"]


async def test_an_abort_goes_to_the_server_that_runs_it(engines):
    for engine in engines:
        engine.paths["/generate"] = silent
    async with client_of(engines) as client:
        work = asyncio.create_task(client.generate(PROMPTS[:6], top_logprobs_p=0.9, request_id="mine"))
        await until(lambda: sum(engine.in_flight for engine in engines) == 6)
        await client.abort("mine")
        with pytest.raises(errors.RolloutError):
            await work
    for engine in engines:
        assert sorted(engine.aborted) == sorted(call["rid"] for call in engine.calls)
        assert len(engine.aborted) == 2


async def test_an_unknown_id_is_aborted_everywhere(engines, nobody):
    theirs = fresh_id("step-7")
    urls = [nobody, *(engine.url for engine in engines)]
    async with AsyncRolloutClient(urls, kind="sglang") as client:
        assert await client.abort(theirs) == 0
        assert await client.abort("step-7") == 0  # an engine would abort step-70, too
    assert [engine.aborted for engine in engines] == [[theirs]] * 3
    async with AsyncRolloutClient([nobody], kind="sglang") as client:
        with pytest.raises(errors.TransportError):
            await client.abort(theirs)
    engines[1].paths["/abort_request"] = status(403)
    async with client_of(engines) as client:
        with pytest.raises(errors.AuthenticationError):
            await client.abort(theirs)


async def test_server_info_returns_the_answer_of_each_server(engines, nobody):
    async with client_of(engines) as client:
        assert await client.server_infos() == {engine.url: {"version": "0.5.23"} for engine in engines}
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


async def test_the_kind_is_taken_from_the_first_server_that_answers(engines, nobody):
    async with AsyncRolloutClient([nobody, *(engine.url for engine in engines)]) as client:
        assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9), PROMPTS)


async def test_engines_and_sidecars_share_a_batch(engines, sidecar):
    async with AsyncRolloutClient([engines[0].url, sidecar.url]) as client:
        assert_whole(await client.generate(PROMPTS, top_logprobs_p=0.9), PROMPTS)
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


def served_by(engines, num_ids):
    """Return which server each prompt went to, by the first ids of the prompt."""
    return {tuple(call["input_ids"][:num_ids]): i for i, e in enumerate(engines) for call in e.calls}


@pytest.mark.parametrize("call", ["resume", "score"])
async def test_a_rollout_is_continued_and_scored_where_it_was_made(engines, call):
    async with client_of(engines) as client:
        made = await client.generate(PROMPTS[:12], top_logprobs_p=0.9)
        before = served_by(engines, 2)
        for engine in engines:
            engine.asked.clear()
        if call == "score":
            again = await client.score(made, top_logprobs_p=0.5)
            assert [one.token_ids[one.start :].tolist() for one in again] == [
                one.output_ids.tolist() for one in made
            ]
        else:
            parts = [replace(one, finish_reason="abort") for one in made]
            again = await client.resume(parts, {"max_new_tokens": 6}, top_logprobs_p=0.9)
            assert [one.routing_key for one in again] == [one.routing_key for one in made]
    assert served_by(engines, 2) == before


async def test_every_retry_and_move_is_a_line_of_the_log(engines, caplog):
    caplog.set_level("INFO", "sglang_topp_client")
    for engine in engines:
        engine.script += [status(500)] * 2
    async with client_of(engines) as client:
        assert len(await client.generate([5], request_id="mine")) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    urls = "|".join(engine.url for engine in engines)
    move = rf"request mine moves from ({urls}): .*scripted"
    retry = rf"request mine is retried in [\d.]+ s after ({urls}): .*scripted"
    counts = [sum(re.match(form, line) is not None for line in lines) for form in (move, retry, "")]
    assert counts == [4, 2, 6]
