"""Request bodies that are long, slow, or too many at once."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from starlette.datastructures import Headers

from sglang_topp.errors import BadRequestError, OverloadedError
from sglang_topp_server.limits.body_reader import BodyReader, DisconnectedError
from sglang_topp_server.limits.settings import MIN_BYTES_PER_S, Limits

LONG = 1 << 20


class Caller:
    """A caller that sends its body in small parts."""

    def __init__(self, bodies, declared=LONG):
        headers = {} if declared is None else {"content-length": str(declared)}
        self.messages = asyncio.Queue()
        self.is_read = asyncio.Event()
        self.stack = AsyncExitStack()
        self.body = asyncio.ensure_future(
            self.stack.enter_async_context(bodies.read(Headers(headers), self.receive))
        )

    async def receive(self):
        self.is_read.set()
        return await self.messages.get()

    def send(self, data=b"", *, is_last=False):
        self.messages.put_nowait({"type": "http.request", "body": data, "more_body": not is_last})


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_four_of_the_longest_are_read_at_once_and_then_the_next():
    bodies = BodyReader(Limits(max_body_bytes=LONG))
    callers = [Caller(bodies) for _ in range(6)]
    await settle()
    assert [caller.is_read.is_set() for caller in callers] == [True] * 4 + [False] * 2

    short = Caller(bodies, 1000)
    short.send(b"x" * 1000, is_last=True)
    assert await short.body == b"x" * 1000
    callers[0].send(b"y" * LONG, is_last=True)
    assert await callers[0].body == b"y" * LONG
    await settle()
    assert not callers[4].is_read.is_set()  # the body that was read is still being parsed
    await callers[0].stack.aclose()
    await settle()
    assert [caller.is_read.is_set() for caller in callers] == [True] * 5 + [False]

    for caller in callers[1:]:
        caller.body.cancel()
    await settle()
    everything = Caller(bodies, LONG)
    await settle()
    assert everything.is_read.is_set()
    assert bodies._free_bytes == 3 * LONG
    everything.body.cancel()


async def test_a_longer_body_is_not_starved():
    bodies = BodyReader(Limits(max_body_bytes=LONG))
    holding = [Caller(bodies) for _ in range(4)]
    longer, shorter = Caller(bodies), Caller(bodies, LONG // 2)
    await settle()

    holding[0].body.cancel()
    await settle()
    assert longer.is_read.is_set()
    assert not shorter.is_read.is_set()

    # A caller that gives up frees its place for the next one.
    longer.body.cancel()
    await settle()
    assert shorter.is_read.is_set()
    for caller in (*holding, shorter):
        caller.body.cancel()
    await settle()
    assert bodies._free_bytes == 4 * LONG


async def test_a_body_that_waits_too_long_is_429():
    bodies = BodyReader(Limits(max_body_bytes=LONG, max_stall_s=0.2))
    holding = [Caller(bodies) for _ in range(4)]
    await settle()
    # Arriving bytes reset their time, so they stay.
    feeding = asyncio.ensure_future(_feed(holding))
    waiting = Caller(bodies)

    with pytest.raises(OverloadedError, match=r"the body: other bodies left no memory for its 1048576 bytes"):
        await waiting.body

    feeding.cancel()
    for caller in holding:
        caller.body.cancel()
    await settle()
    assert bodies._free_bytes == 4 * LONG


async def _feed(callers):
    while True:
        for caller in callers:
            caller.send(b" " * 20_000)
        await asyncio.sleep(0.05)


async def test_a_body_of_unknown_length_counts_once_it_is_long():
    bodies = BodyReader(Limits(max_body_bytes=LONG))
    caller = Caller(bodies, None)
    caller.send(b"x" * 60_000)
    await settle()
    assert bodies._free_bytes == 4 * LONG
    caller.send(b"x" * 60_000)
    await settle()
    assert bodies._free_bytes == 3 * LONG
    caller.send(b"x" * LONG)

    with pytest.raises(BadRequestError, match="got more bytes, expected at most 1048576") as raised:
        await caller.body
    assert raised.value.status == 413
    assert bodies._free_bytes == 4 * LONG


async def test_a_caller_that_is_gone_holds_nothing():
    bodies = BodyReader(Limits(max_body_bytes=LONG))
    caller = Caller(bodies)
    caller.messages.put_nowait({"type": "http.disconnect"})

    with pytest.raises(DisconnectedError):
        await caller.body
    assert bodies._free_bytes == 4 * LONG


async def test_a_slow_body_is_408():
    bodies = BodyReader(Limits(max_stall_s=0.1))
    caller = Caller(bodies, 100)
    caller.send(b"x")

    with pytest.raises(
        BadRequestError, match=r"the body: got 1 of 100 bytes and fell 0.1 s behind"
    ) as raised:
        await caller.body
    assert raised.value.status == 408


async def test_a_body_may_pause_as_long_as_it_keeps_the_minimum_rate():
    caller = Caller(BodyReader(Limits(max_stall_s=3)), None)
    for _ in range(9):
        await asyncio.sleep(0.4)
        caller.send(b"x" * MIN_BYTES_PER_S)
    caller.send(is_last=True)

    assert len(await caller.body) == 9 * MIN_BYTES_PER_S


async def test_a_fast_start_does_not_excuse_a_stop():
    caller = Caller(BodyReader(Limits(max_stall_s=0.1)), None)
    caller.send(b"x" * 100 * MIN_BYTES_PER_S)

    async with asyncio.timeout(20):
        with pytest.raises(BadRequestError, match="expected 65536 bytes/s"):
            await caller.body


async def test_a_body_that_drips_in_is_408():
    caller = Caller(BodyReader(Limits(max_stall_s=0.2)), None)

    async def drip():
        while True:
            caller.send(b"x")
            await asyncio.sleep(0.01)

    dripping = asyncio.ensure_future(drip())
    async with asyncio.timeout(20):
        with pytest.raises(BadRequestError, match=r"fell 0\.2 s behind"):
            await caller.body
    dripping.cancel()
