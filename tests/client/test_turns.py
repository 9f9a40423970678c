import asyncio

from sglang_topp_client import messages, turns
from sglang_topp_client.turns import LONG_BYTES, Turns


class Answer:
    """An answer that comes bit by bit."""

    def __init__(self):
        self.headers = {}
        self.coming = asyncio.Queue()
        self.num_taken = 0

    async def aiter_raw(self):
        while (data := await self.coming.get()) is not None:
            self.num_taken += 1
            yield data


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def start(turns):
    answer, got = Answer(), []

    async def read():
        async for line in messages.lines(answer, turns, 1 << 30):
            got.append(len(line))

    return answer, got, asyncio.create_task(read())


async def test_so_many_long_lines_are_read_at_once_and_then_the_next():
    shared = Turns(2)
    reads = [start(shared) for _ in range(4)]
    for answer, _, _ in reads:
        for data in (b"x" * (LONG_BYTES + 1), b"y", b"\n", b"short\n", None):
            answer.coming.put_nowait(data)
        await settle()

    # The first two are through, and so the others had their turn.
    assert [got for _, got, _ in reads] == [[LONG_BYTES + 2, 5]] * 4
    for _, _, task in reads:
        await task


async def test_the_next_one_waits_and_short_lines_do_not():
    shared = Turns(1)
    first, second, short = (start(shared) for _ in range(3))
    for answer, _, _ in (first, second):
        answer.coming.put_nowait(b"x" * (LONG_BYTES + 1))
        answer.coming.put_nowait(b"x")
        await settle()
    short[0].coming.put_nowait(b"abc\n")
    await settle()
    assert (first[0].num_taken, second[0].num_taken, short[1]) == (2, 1, [3])

    # One that is given up lets the next one through.
    first[2].cancel()
    await settle()
    assert second[0].num_taken == 2
    for _, _, task in (second, short):
        task.cancel()


async def test_lines_that_are_stuck_hold_nobody_up(monkeypatch):
    monkeypatch.setattr(turns, "_STUCK_S", 0.2)
    shared = Turns(1)
    stuck, next_one = start(shared), start(shared)
    stuck[0].coming.put_nowait(b"x" * (LONG_BYTES + 1))
    await settle()

    for data in (b"x" * (LONG_BYTES + 1), b"\n", None):
        next_one[0].coming.put_nowait(data)
    await asyncio.wait_for(next_one[2], 60)

    assert next_one[1] == [LONG_BYTES + 1]
    # What it had was no turn, and none was given back.
    assert shared._free.locked()
    stuck[2].cancel()


async def test_one_that_gets_on_is_waited_for(monkeypatch):
    monkeypatch.setattr(turns, "_STUCK_S", 0.5)
    shared = Turns(1)
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
