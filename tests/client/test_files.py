"""Processes that may have few files open: the client stays below, and names what it lacks."""

import asyncio
import errno
import os
import resource
import subprocess
import sys

import httpcore
import httpx
import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, files, lanes


@pytest.fixture(autouse=True)
def room_for_the_server():
    """The servers of these tests run in this process, and take a file for each connection too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SCRIPT = """
import asyncio, os, resource, sys, threading, time
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient

def fill():
    taken = []
    while True:
        try:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return taken
"""


def run(url, limit, code):
    """Run it in a process that may have `limit` files open; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT + code, url, str(limit)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def together(engine, fakes, width):
    """Nobody is answered before so many are there."""

    async def handler(asked, reply):
        while engine.peak < width:
            await asyncio.sleep(0.02)
        await fakes.answer_generate(asked, reply)

    return handler


@pytest.mark.parametrize(("limit", "num_prompts", "width"), [(1024, 1500, 850), (128, 400, 80), (32, 60, 8)])
def test_more_prompts_than_files(engine, fakes, limit, num_prompts, width):
    engine.paths["/generate"] = together(engine, fakes, width)
    code = f"""
with RolloutClient(sys.argv[1], kind="sglang") as client:
    prompts = [[i % 90 + 1] for i in range({num_prompts})]
    print(len(client.generate(prompts, top_logprobs_p=0.9, timeout_s=200)))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    assert run(engine.url, limit, code) == [str(num_prompts), str(limit)]
    assert width <= engine.peak < limit
    # Each prompt was sent once: nothing failed for want of a file and was tried again.
    assert len(engine.calls) == num_prompts


def test_what_else_is_open_counts(engine, fakes):
    engine.paths["/generate"] = together(engine, fakes, 20)
    code = """
others = [os.open(os.devnull, os.O_RDONLY) for _ in range(150)]
client = RolloutClient(sys.argv[1], kind="sglang")
print(len(client.generate([[1]] * 200, timeout_s=200)))
"""
    assert run(engine.url, 256, code) == ["200"]
    assert 20 <= engine.peak < 106
    assert len(engine.calls) == 200


def test_clients_and_loops_share_what_there_is(engine, fakes):
    """The first takes all there is; when others come it leaves each an even share."""
    now, peaks = {1: 0, 2: 0, 3: 0}, {1: 0, 2: 0, 3: 0}

    async def slowly(asked, reply):
        (who,) = asked.body["input_ids"]
        now[who] += 1
        peaks[who] = max(peaks[who], now[who])
        await asyncio.sleep(0.5)
        now[who] -= 1
        await fakes.answer_generate(asked, reply)

    engine.paths["/generate"] = slowly
    code = """
answered = []

def one(who, count):
    if who == 3:
        client = AsyncRolloutClient(sys.argv[1], kind="sglang")
        rollouts = asyncio.run(client.generate([[who]] * count, timeout_s=200))
    else:
        rollouts = RolloutClient(sys.argv[1], kind="sglang").generate([[who]] * count, timeout_s=200)
    answered.append(len(rollouts))

threads = [threading.Thread(target=one, args=args) for args in ((1, 600), (2, 150), (3, 150))]
for thread in threads:
    thread.start()
    time.sleep(1)
for thread in threads:
    thread.join()
print(sorted(answered))
"""
    assert run(engine.url, 256, code) == ["[150, 150, 600]"]
    # 256 less the reserve of 32 and some 20 others: 200, or 66 for each of three.
    assert 120 < peaks[1] < 256
    assert peaks[2] > 30
    assert peaks[3] > 30
    assert len(engine.calls) == 900


def test_without_any_file_the_error_says_so_at_once(engine):
    code = """
async def main():
    async with AsyncRolloutClient(sys.argv[1], kind="sglang", max_retries=0) as client:
        print(len(await client.generate([1])))
        await client.close()
        taken = fill()
        try:
            await client.generate([1])
        except errors.TransportError as error:
            for file in taken:
                os.close(file)
            print(error)
        print(len(await client.generate([1])))

asyncio.run(main())
client = RolloutClient(sys.argv[1], kind="sglang", max_retries=0)
taken = fill()
try:
    client.generate([1])
except errors.TransportError as error:
    for file in taken:
        os.close(file)
    print(error)
print(len(client.generate([1])))
"""
    first, asynchronous, second, synchronous, third = run(engine.url, 64, code)
    assert (first, second, third) == ("1", "1", "1")
    for message in (asynchronous, synchronous):
        assert "this process may have 64 open" in message
        assert "`ulimit -n 65536`" in message


def test_a_shortage_that_passes_costs_a_retry(engine):
    code = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(levelname)s")

async def main():
    async with AsyncRolloutClient(sys.argv[1], kind="sglang", max_retries=8) as client:
        taken = fill()
        task = asyncio.create_task(client.generate([1]))
        await asyncio.sleep(0.3)
        for file in taken:
            os.close(file)
        print(len(await task))

asyncio.run(main())
"""
    *words, number = run(engine.url, 64, code)
    assert number == "1"
    # Tried again, and not without a word.
    assert words
    assert set(words) == {"WARNING"}


async def test_who_meets_a_shortage_beside_others_waits_for_one_of_theirs(engine, fakes, monkeypatch):
    """Somebody else in the process took the files between the look and the connection."""
    failures = []
    real = httpcore.AsyncHTTPConnection.handle_async_request

    async def short(self, request):
        if engine.in_flight >= 3 and len(failures) < 20:
            failures.append(request)
            raise httpcore.ConnectError("all failed") from ExceptionGroup(
                "several addresses", [OSError(errno.EMFILE, "Too many open files")]
            )
        return await real(self, request)

    monkeypatch.setattr(httpcore.AsyncHTTPConnection, "handle_async_request", short)
    engine.script += [together(engine, fakes, 3)] * 20
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        first = asyncio.create_task(client.generate([[1]] * 3))
        async with asyncio.timeout(10):
            while engine.in_flight < 3 and not first.done():
                await asyncio.sleep(0)
        assert len(await client.generate([[1]] * 12, timeout_s=60)) == 12
        assert len(await first) == 3


async def test_a_machine_without_files_is_named(engine, monkeypatch):
    async def fail(self, request):
        raise httpcore.ConnectError("all failed") from OSError(errno.ENFILE, "File table overflow")

    monkeypatch.setattr(httpcore.AsyncHTTPConnection, "handle_async_request", fail)
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.TransportError, match=r"the machine has no file left.*ENFILE"):
            await client.generate([1])


def test_other_errors_are_no_shortage():
    assert files.shortage(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None
    assert files.shortage(ValueError("x")) is None


# -- the arithmetic --------------------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch):
    """A process with a limit and a number of open files that the test sets."""
    state = {"limit": 1024, "open": 24}
    monkeypatch.setattr(files, "_process", files._Process())
    monkeypatch.setattr(files, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(files, "limit", lambda: state["limit"])
    monkeypatch.setattr(files, "_num_open", lambda allowed: state["open"])
    return state


def take(share, state, most=10_000):
    """Open connections until the share says no; returns how many."""
    count = 0
    while count < most and share.may_open():
        share.begin()
        share.opened()
        state["open"] += 1
        count += 1
    return count


def test_a_reserve_is_left(process):
    assert take(files.Share(), process) == 1024 - 24 - 64
    process |= {"limit": 128, "open": 28}
    assert take(files.Share(), process) == 128 - 28 - 16


def test_a_limit_that_changes(process):
    share = files.Share()
    take(share, process)
    assert not share.may_open()
    process["limit"] += 100
    assert take(share, process) == 100
    process["limit"] = 512
    assert not share.may_open()
    process["limit"] = None
    assert take(share, process, most=5000) == 5000


def test_short_questions_may_use_half_of_the_reserve(process):
    share = files.Share()
    take(share, process)
    count = 0
    while share.may_open(is_urgent=True):
        share.begin()
        share.opened()
        process["open"] += 1
        count += 1
    assert count == 32


def test_what_is_being_opened_counts_before_it_has_a_file(process):
    share = files.Share()
    count = 0
    while share.may_open():
        share.begin()
        count += 1
    assert count == 1024 - 24 - 64


def test_a_pool_without_a_connection_may_always_try(process):
    process["open"] = 1024
    share = files.Share()
    assert share.may_open()
    share.begin()
    assert not share.may_open()


def test_who_waits_gets_an_even_share(process):
    first, second = files.Share(), files.Share()
    taken = take(first, process)
    assert not first.must_yield
    second.is_waiting = True
    assert first.must_yield
    while first.must_yield:
        first.end()
        process["open"] -= 1
        take(second, process)
    assert abs(first.held - second.held) <= 2
    assert first.held + second.held >= taken - 2
    assert not first.may_open()
    second.is_waiting = False
    second.held = 0
    process["open"] = 24 + first.held
    assert first.may_open()


def test_a_pool_that_is_gone_takes_no_share(process):
    first, second = files.Share(), files.Share()
    take(first, process)
    second.is_waiting = True
    assert first.must_yield
    del second
    assert not first.must_yield


def test_looking_is_rare_where_there_is_room(process, monkeypatch):
    looks = []
    monkeypatch.setattr(files, "_LOOK_EVERY_S", 1000.0)
    monkeypatch.setattr(files, "_num_open", lambda allowed: looks.append(allowed) or process["open"])
    process["limit"] = 100_000
    assert take(files.Share(), process, most=4096) == 4096
    assert len(looks) == 1
    process["limit"] = 4096 + 24 + 500
    monkeypatch.setattr(files, "_process", files._Process())
    take(files.Share(), process)
    assert len(looks) < 20


@pytest.mark.parametrize("folders", ["/dev/fd", None])
def test_where_open_files_cannot_be_listed(monkeypatch, folders):
    real = os.listdir

    def some(folder):
        if folder != folders:
            raise FileNotFoundError(errno.ENOENT, "none", folder)
        return real(folder)

    monkeypatch.setattr(os, "listdir", some)
    assert files._num_open(1024) == (
        256 if folders is None else pytest.approx(len(real("/proc/self/fd")), abs=3)
    )


def test_a_listing_that_finds_no_file_left(monkeypatch):
    def fail(folder):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", fail)
    assert files._num_open(1024) == 1024


async def test_who_waits_is_told_when_the_connections_close(monkeypatch):
    monkeypatch.setattr(files.Share, "may_open", lambda self, **_: False)
    pool = lanes.Lanes([])
    waiting = asyncio.create_task(pool.handle_async_request(httpx.Request("GET", "http://127.0.0.1:9")))
    await asyncio.sleep(0.01)
    await pool.aclose()
    with pytest.raises(httpx.ConnectError, match="closed"):
        await waiting


async def test_who_stops_waiting_takes_nothing(engine, fakes, monkeypatch):
    room = [2]
    monkeypatch.setattr(files.Share, "may_open", lambda self, **_: self.held < room[0])
    engine.script += [together(engine, fakes, 2)] * 2
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        doomed = asyncio.create_task(client.generate([[1]] * 30, timeout_s=60))
        spared = asyncio.create_task(client.generate([[2]] * 30, timeout_s=60))
        async with asyncio.timeout(10):
            while engine.in_flight < 1:
                await asyncio.sleep(0.001)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        engine.peak = 2
        assert len(await spared) == 30
    assert engine.peak == 2
