"""The limit on long messages: how many are read at once, and which messages wait."""

import asyncio
from contextlib import aclosing

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
        for data in (b"x" * (LONG_BYTES + 1), b"y", b"\n", b"short\n", None):
            answer.coming.put_nowait(data)
        await settle()

    # The first two have finished, so the others have their places.
    assert [got for _, got, _ in reads] == [[LONG_BYTES + 2, 5]] * 4
    for _, _, task in reads:
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


async def test_stuck_lines_do_not_block_others(monkeypatch):
    monkeypatch.setattr(limits, "_STUCK_S", 0.2)
    shared = LongMessageSlots(1)
    stuck, next_one = start(shared), start(shared)
    stuck[0].coming.put_nowait(b"x" * (LONG_BYTES + 1))
    await settle()

    for data in (b"x" * (LONG_BYTES + 1), b"\n", None):
        next_one[0].coming.put_nowait(data)
    await asyncio.wait_for(next_one[2], 60)

    assert next_one[1] == [LONG_BYTES + 1]
    # It held no place, so it freed none.
    assert shared._free.locked()
    stuck[2].cancel()


async def test_a_line_that_makes_progress_keeps_its_place(monkeypatch):
    monkeypatch.setattr(limits, "_STUCK_S", 0.5)
    shared = LongMessageSlots(1)
    slow, next_one = start(shared), start(shared)
    slow[0].coming.put_nowait(b"x" * (LONG_BYTES + 1))
    await settle()
    for data in (b"x" * (LONG_BYTES + 1), b"\n", None):
        next_one[0].coming.put_nowait(data)

    for _ in range(12):
        slow[0].coming.put_nowait(b"x")
        await asyncio.sleep(0.1)
        assert next_one[1] == []
    slow[0].coming.put_nowait(b"\n")
    await asyncio.wait_for(next_one[2], 60)
    slow[2].cancel()
