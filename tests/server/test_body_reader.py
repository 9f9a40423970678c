"""Request bodies that are long, slow, or too many at once."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from starlette.requests import ClientDisconnect, Request

from sglang_topp.errors import BadRequestError
from sglang_topp_server.limits import BodyReader
from sglang_topp_server.settings import Limits

LONG = 1 << 20


class Caller:
    """A caller that sends its body in small parts."""

    def __init__(self, bodies, declared=LONG):
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        request = Request({"type": "http", "headers": headers}, self.receive)
        self.messages = asyncio.Queue()
        self.is_read = asyncio.Event()
        self.stack = AsyncExitStack()
        self.body = asyncio.ensure_future(self.stack.enter_async_context(bodies.read(request)))

    async def receive(self):
        self.is_read.set()
        return await self.messages.get()

    def send(self, data=b"", *, is_last=False):
        self.messages.put_nowait({"type": "http.request", "body": data, "more_body": not is_last})


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("declared", [LONG, None], ids=["long", "chunked"])
async def test_four_large_bodies_are_read_at_once_and_then_the_next(declared):
    bodies = BodyReader(Limits(max_body_bytes=LONG))
    callers = [Caller(bodies, declared) for _ in range(6)]
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

    callers[5].body.cancel()  # a caller that gives up while it waits frees nothing and takes nothing
    for caller in callers[1:5]:
        caller.body.cancel()
    await settle()
    more = [Caller(bodies, declared) for _ in range(5)]
    await settle()
    assert [caller.is_read.is_set() for caller in more] == [True] * 4 + [False]
    for caller in more:
        caller.body.cancel()


@pytest.mark.parametrize("interval_s", [None, 0.01], ids=["silent", "dripping"])
async def test_slow_callers_keep_no_place(interval_s):
    """Callers that declare the longest body, send a part at once, and then go slow: each gets a 408."""
    bodies = BodyReader(Limits(max_body_bytes=LONG, io_timeout_s=0.5))
    slow = [Caller(bodies) for _ in range(8)]

    async def drip():
        for caller in slow:
            caller.send(b"x" * (LONG // 2))
        while interval_s is not None:
            for caller in slow:
                caller.send(b"x")
            await asyncio.sleep(interval_s)

    dripping = asyncio.ensure_future(drip())
    await settle()
    honest = Caller(bodies)
    honest.send(b"y" * LONG, is_last=True)
    async with asyncio.timeout(60):
        assert await honest.body == b"y" * LONG
        for caller in slow:
            with pytest.raises(BadRequestError, match=r"the body: got \d+ bytes in 0.5 s") as raised:
                await caller.body
            assert raised.value.status == 408
    dripping.cancel()


@pytest.mark.parametrize(
    ("declared", "got", "most"),
    [
        (LONG + 1, LONG + 1, LONG),
        (10**30, 10**30, LONG),
        (None, "more", LONG),
        (1000, "more", 1000),  # in chunks, which override the length
    ],
)
async def test_a_body_beyond_the_limit_is_413(declared, got, most):
    caller = Caller(BodyReader(Limits(max_body_bytes=LONG)), declared)
    for _ in range(2):
        caller.send(b"x" * LONG)
    with pytest.raises(BadRequestError, match=f"got {got} bytes, expected at most {most}") as raised:
        await caller.body
    assert raised.value.status == 413


async def test_a_caller_that_is_gone_holds_no_place():
    bodies = BodyReader(Limits())
    for _ in range(5):
        caller = Caller(bodies)
        caller.messages.put_nowait({"type": "http.disconnect"})
        with pytest.raises(ClientDisconnect):
            await caller.body
