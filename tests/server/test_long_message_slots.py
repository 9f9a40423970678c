"""The limit on long messages: how many are read at once, and which messages wait."""

import asyncio
from contextlib import aclosing

import pytest

from sglang_topp.errors import TransportError
from sglang_topp_client.transport.http import lines
from sglang_topp_server import limits
from sglang_topp_server.limits import LONG_BYTES, LongMessageSlots


class Answer:
    """An answer that arrives in small parts."""

    def __init__(self):
        self.coming = asyncio.Queue()
        self.num_taken = 0

    async def body(self):
        while (data := await self.coming.get()) is not None:
            self.num_taken += 1
            yield data


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def start(limit):
    answer, got = Answer(), []

    async def read():
        async with aclosing(limit.throttle(answer.body())) as body:
            async for line in lines(body, 1 << 30):
                got.append(len(line))

    return answer, got, asyncio.create_task(read())


async def test_the_number_of_long_lines_read_at_once_is_limited():
    shared = LongMessageSlots(2)
    reads = [start(shared) for _ in range(4)]
    for answer, _, _ in reads:
        for data in (b"x" * (LONG_BYTES + 1), b"y", b"\n", b"short\n"):
            answer.coming.put_nowait(data)
        await settle()

    # The first two have read their long lines, so the others have their places.
    assert [got for _, got, _ in reads] == [[LONG_BYTES + 2, 5]] * 4
    for answer, _, task in reads:
        answer.coming.put_nowait(None)
        await task


async def test_the_next_one_waits_and_short_lines_do_not():
    shared = LongMessageSlots(1)
    first, second, short = (start(shared) for _ in range(3))
    for answer, _, _ in (first, second):
        answer.coming.put_nowait(b"x" * (LONG_BYTES + 1))
        answer.coming.put_nowait(b"x")
        await settle()
    short[0].coming.put_nowait(b"abc\n")
    await settle()
    assert (first[0].num_taken, second[0].num_taken, short[1]) == (2, 1, [3])

    # A message that is given up frees its place for the next one.
    first[2].cancel()
    await settle()
    assert second[0].num_taken == 2
    for _, _, task in (second, short):
        task.cancel()


async def test_a_stalled_line_fails_and_frees_its_place(monkeypatch):
    monkeypatch.setattr(limits, "_STALL_S", 2.0)
    shared = LongMessageSlots(1)
    stalled, next_one = start(shared), start(shared)
    for answer, _, _ in (stalled, next_one):
        answer.coming.put_nowait(b"x" * (LONG_BYTES + 1))
        await settle()

    for _ in range(25):  # a slow line is not stalled
        stalled[0].coming.put_nowait(b"x")
        await asyncio.sleep(0.1)
    with pytest.raises(TransportError, match=r"nothing arrived for 2 s"):
        await asyncio.wait_for(stalled[2], 60)

    for data in (b"\n", b"short\n", None):
        next_one[0].coming.put_nowait(data)
    await asyncio.wait_for(next_one[2], 60)
    assert next_one[1] == [LONG_BYTES + 1, 5]


async def test_between_lines_nothing_need_arrive(monkeypatch):
    monkeypatch.setattr(limits, "_STALL_S", 0.1)
    answer, got, task = start(LongMessageSlots(1))
    answer.coming.put_nowait(b"x" * (LONG_BYTES + 1) + b"\nshort")
    await asyncio.sleep(0.5)
    for data in (b"\n", None):
        answer.coming.put_nowait(data)
    await asyncio.wait_for(task, 60)
    assert got == [LONG_BYTES + 1, 5]
