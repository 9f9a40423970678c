"""Processes with a low limit of open files: the client stays below it, and its error names the limit."""

import asyncio
import errno
import os
import resource

import aiohttp
import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient
from sglang_topp_client.transport import http
from tests.client import conftest as fakes


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
    """Run code in a process with a limit of `limit` open files. Return the lines of its output."""
    return fakes.run_python(SCRIPT + code, url, str(limit)).stdout.splitlines()


@pytest.mark.parametrize(
    ("limit", "num_others", "num_prompts", "width"),
    [(1024, 0, 1500, 850), (128, 0, 400, 80), (32, 0, 60, 8), (256, 150, 200, 20)],
)
def test_more_prompts_than_files(engine, limit, num_others, num_prompts, width):
    engine.paths["/generate"] = fakes.held_until(lambda: engine.peak >= width)
    code = f"""
others = [os.open(os.devnull, os.O_RDONLY) for _ in range({num_others})]
with RolloutClient(sys.argv[1], kind="sglang") as client:
    prompts = [[i % 90 + 1] for i in range({num_prompts})]
    print(len(client.generate(prompts, top_logprobs_p=0.9, timeout_s=200)))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    assert run(engine.url, limit, code) == [str(num_prompts), str(limit)]
    assert width <= engine.peak < limit - num_others
    # Each prompt was sent once, so no call failed for lack of a file.
    assert len(engine.calls) == num_prompts


def test_two_clients_that_share_too_few_files_wait_for_each_other(engine):
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


def test_where_open_files_cannot_be_listed(monkeypatch):
    def fail(folder):
        raise FileNotFoundError(errno.ENOENT, "none", folder)

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(http, "_limit", lambda: 1024)
    assert http.max_connections(4096) == 1024 - 64
    assert http.max_connections(100) == 100
    monkeypatch.setattr(http, "_limit", lambda: None)
    assert http.max_connections(5000) == 5000
