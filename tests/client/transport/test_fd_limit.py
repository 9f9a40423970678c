"""Processes with a low limit of open files: the client stays below it, and its error names the limit."""

import asyncio
import errno
import os
import resource
import subprocess
import sys

import aiohttp
import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient
from sglang_topp_client.transport import http


@pytest.fixture(autouse=True)
def room_for_the_server():
    """The servers of these tests run in this process and use a file per connection too."""
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
    """Run code in a process with a limit of `limit` open files. Return its output."""
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
    """Return a handler that answers no request before this many have arrived."""

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
    # Each prompt was sent once, so no call failed for lack of a file.
    assert len(engine.calls) == num_prompts


def test_other_open_files_count(engine, fakes):
    engine.paths["/generate"] = together(engine, fakes, 20)
    code = """
others = [os.open(os.devnull, os.O_RDONLY) for _ in range(150)]
client = RolloutClient(sys.argv[1], kind="sglang")
print(len(client.generate([[1]] * 200, timeout_s=200)))
"""
    assert run(engine.url, 256, code) == ["200"]
    assert 20 <= engine.peak < 106
    assert len(engine.calls) == 200


def test_two_clients_that_share_too_few_files_wait_for_each_other(engine, fakes):
    """Each client counts the files that are open at its first call, so together they may exceed the limit."""

    async def slowly(asked, reply):
        await asyncio.sleep(0.5)
        await fakes.answer_generate(asked, reply)

    engine.paths["/generate"] = slowly
    code = """
import logging
logging.disable()
answered = []
both = threading.Barrier(2)

def one():
    client = RolloutClient(sys.argv[1], kind="sglang")
    client.generate([1])  # it counts the open files at its first call
    both.wait()
    answered.append(len(client.generate([[1]] * 900, timeout_s=200)))

threads = [threading.Thread(target=one) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(answered)
"""
    assert run(engine.url, 128, code) == ["[900, 900]"]


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
    # The call is retried, and the log says why.
    assert words
    assert set(words) == {"WARNING"}


async def test_a_machine_without_files_is_named(engine, monkeypatch):
    async def fail(self, *args, **kwargs):
        raise OSError(errno.ENFILE, "File table overflow")

    monkeypatch.setattr(aiohttp.TCPConnector, "_resolve_host", fail)
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.TransportError, match=r"the machine has no file left.*ENFILE"):
            await client.generate([1])


def test_other_errors_are_not_a_shortage():
    assert http.fd_shortage(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None
    assert http.fd_shortage(ValueError("x")) is None


# -- the arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "num_open", "wanted", "expected"),
    [
        (1024, 24, 4096, 1024 - 24 - 64),
        (1024, 24, 100, 100),
        (128, 28, 4096, 128 - 28 - 16),
        (64, 64, 4096, 1),
        (None, 24, 5000, 5000),
    ],
)
def test_a_reserve_is_left(monkeypatch, limit, num_open, wanted, expected):
    monkeypatch.setattr(http, "_limit", lambda: limit)
    monkeypatch.setattr(http, "_num_open", lambda: num_open)
    assert http.max_connections(wanted) == expected


def test_where_open_files_cannot_be_listed(monkeypatch):
    def fail(folder):
        raise FileNotFoundError(errno.ENOENT, "none", folder)

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(http, "_limit", lambda: 1024)
    assert http.max_connections(4096) == 1024 - 64
