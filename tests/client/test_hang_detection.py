"""Servers that accept requests and never answer, and servers that are only busy."""

import asyncio
import re
import time
from contextlib import AsyncExitStack

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, servers
from tests.client import conftest as fakes
from tests.client.conftest import answers, by_request, held_until, hung_server, silent, until

pytestmark = pytest.mark.usefixtures("no_leftovers", "hasty")


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(servers, "_SILENCE_S", 0.3)
    monkeypatch.setattr(servers, "_PROBE_TIMEOUT_S", 0.3)


@pytest.mark.parametrize("kind", ["sglang", "auto"])
async def test_calls_of_a_server_that_hangs_go_to_another(engine, kind):
    async with hung_server() as url, AsyncRolloutClient([url, engine.url], kind=kind) as client:
        rollouts = await client.generate([[i + 1] for i in range(30)], timeout_s=60)
        assert len(rollouts) == 30


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_servers_that_all_hang_are_named(num_servers):
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(hung_server()) for _ in range(num_servers)]
        client = AsyncRolloutClient(urls, kind="sglang", max_retries=num_servers % 2)
        await stack.enter_async_context(client)
        words = "the server hangs" if num_servers == 1 else "none of the 2 servers answers"
        with pytest.raises(errors.TransportError, match=words) as caught:
            await client.generate([[1], [2]], timeout_s=60)
    assert not isinstance(caught.value, errors.RequestTimeoutError)
    assert all(url in str(caught.value) for url in urls)


async def test_a_server_that_hangs_in_the_middle_of_an_answer_fails_its_calls(engine):
    async def hang(asked, reply):
        await reply.start()
        await reply.event(fakes.chunk(fakes.sample(asked.body["input_ids"], 0), first_token_only=True))
        # The server answers nothing more, as if its process was stopped or its loop blocked.
        engine.paths["/ready"] = silent
        await reply.hung_up()

    engine.script.append(hang)
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        assert len(await client.generate([5], timeout_s=60)) == 1
    assert len(engine.calls) == 2


async def test_a_long_queue_is_waited_for(engine):
    """The server answers probes, so it does not hang, however long a first byte takes."""
    released = asyncio.Event()
    engine.paths["/generate"] = held_until(released.is_set)
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        work = asyncio.create_task(client.generate([[1], [2]]))
        await until(lambda: len(engine.of("/ready")) == 4)
        released.set()
        assert len(await work) == 2


async def test_a_server_that_shuts_down_finishes_what_it_has():
    """A refused connection is an answer: the server does not hang."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    answer += fakes.events_of(fakes.chunk(fakes.sample([5], 0))) + fakes.DONE
    requests = []

    async def connected(reader, writer):
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        server.close()
        await asyncio.sleep(2.0)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with AsyncRolloutClient(url, kind="sglang", max_retries=0) as client:
        assert len(await client.generate([5])) == 1
    assert len(requests) == 1


@pytest.mark.parametrize("pause_s", [0.0, 0.2])
async def test_a_callers_loop_that_was_blocked_blames_no_server(engine, pause_s):
    """A training step in the event loop's thread delays timers and reads. No server hangs."""

    async def slow(asked, reply):
        await asyncio.sleep(6)
        await fakes.answer_generate(asked, reply)

    engine.paths["/generate"] = slow
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        work = asyncio.create_task(client.generate([5]))
        while not work.done():
            await asyncio.sleep(pause_s)
            time.sleep(0.8)
        assert len(await work) == 1


async def test_only_two_failed_probes_in_a_row_count(engine, hang):
    answers = iter([False, True, False, True, False, False])

    async def probed(asked, reply):
        await (reply.json({}) if next(answers) else reply.hung_up())

    engine.paths["/ready"] = probed
    engine.script.append(hang)
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.TransportError, match="the server hangs: nothing arrived for"):
            await client.generate([5], timeout_s=60)
    assert list(answers) == []


async def test_a_byte_of_any_call_is_a_sign_of_life(engine, monkeypatch):
    monkeypatch.setattr(servers, "_SILENCE_S", 2.0)
    ends = asyncio.Event()

    async def comments(asked, reply):
        await reply.start()
        for _ in range(30):
            await reply.write(b": alive\n\n")
            await asyncio.sleep(0.1)
        ends.set()
        await reply.event(fakes.chunk(fakes.sample(asked.body["input_ids"], 0)))
        await reply.done()

    engine.script += [held_until(ends.is_set), comments]
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        assert len(await client.generate([[5], [6]], timeout_s=60)) == 2
    assert engine.of("/ready") == []


# -- paused engines --------------------------------------------------------------------------------


@pytest.fixture
def paused(engine):
    """Return an event that lets the paused engine continue."""
    continues = asyncio.Event()
    ready = by_request(lambda _: answers({}, 200 if continues.is_set() else 503))
    engine.paths |= {"/generate": held_until(continues.is_set), "/ready": ready}
    return continues


async def test_a_wait_for_a_paused_engine_says_so(engine, paused, caplog):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        work = asyncio.create_task(client.generate([[5], [6]]))
        await until(lambda: caplog.records)
        (record,) = caplog.records
        assert re.search(
            r"2 calls wait, because http://\S+ has not been ready since \d\d:\d\d:\d\d .*: it was paused by",
            record.getMessage(),
        )
        paused.set()
        assert len(await work) == 2


async def test_a_time_limit_in_a_pause_names_the_push_that_failed(engine, paused):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        with pytest.raises(errors.SglangToppError):
            await client.push_weights("/", version="B")
        with pytest.raises(
            errors.RequestTimeoutError,
            match=r"(?s)has not been ready since .*the push of version 'B'.*failed",
        ):
            await client.generate([5], timeout_s=3)
