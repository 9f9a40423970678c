"""Faults below HTTP: connections that are reset or closed while idle, answers that are cut or too long."""

import asyncio
import gzip
import inspect
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, Rollout
from sglang_topp_client.transport import http
from sglang_topp_client.wire.records import MEDIA_TYPES
from tests.client.conftest import framed, no_server, raw_server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
    )
    return head + await reader.readexactly(int(length.split(b":")[1]))


@asynccontextmanager
async def client_of(handle, kind="sglang", **options):
    async with raw_server(handle) as url, AsyncRolloutClient(url, kind=kind, **options) as client:
        yield client


class Answers:
    """A socket server's handler: each request of a connection gets an answer, until there is none for it.

    `answers` is a function of the connection's number that returns them. A connection without one is reset.
    """

    def __init__(self, answers):
        self._answers = answers
        self.requests = []

    async def __call__(self, number, reader, writer):
        for answer in self._answers(number):
            self.requests.append(await read_request(reader))
            if answer is None:
                return writer.transport.abort()
            writer.write(answer)
            await writer.drain()
        return None


def test_idle_connections_go_before_the_server_drops_them():
    """uvicorn's default of 5 s, which is also SGLang's (SGLANG_TIMEOUT_KEEP_ALIVE)."""
    default_s = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    assert default_s > http._KEEPALIVE_S


async def test_a_reset_before_the_answer_is_retried():
    handle = Answers(lambda number: [None if number < 3 else ANSWER])
    async with client_of(handle) as client:
        assert await client.server_info() == {}


async def test_a_reset_in_the_middle_is_a_transport_error():
    requests = []

    async def handle(number, reader, writer):
        requests.append(await read_request(reader))
        writer.write(HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 999") + b"data: ")
        await writer.drain()
        writer.transport.abort()

    async with client_of(handle, max_retries=2) as client:
        with pytest.raises(errors.TransportError):
            await client.generate([1])
    assert sum(b"POST /generate" in request for request in requests) == 3


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"], ids=["broken promise", "no promise"])
async def test_a_connection_that_closed_after_its_answer_is_replaced(version):
    """The answer promises to keep the connection, or, by HTTP/1.0, says nothing about it."""
    handle = Answers(lambda _: [ANSWER.replace(b"HTTP/1.1", version)])
    async with client_of(handle, max_retries=0) as client:
        for _ in range(3):
            assert await client.server_info() == {}
            await asyncio.sleep(0.05)
    assert len(handle.requests) == 3


async def test_a_connection_that_may_not_be_used_again_is_replaced():
    """An HTTP/1.0 connection ends with its answer, though the server has not closed it yet."""
    handle = Answers(lambda _: [ANSWER.replace(b"HTTP/1.1", b"HTTP/1.0"), None])
    async with client_of(handle, max_retries=0) as client:
        for _ in range(3):
            assert await client.server_info() == {}
    assert len(handle.requests) == 3


async def test_a_connection_that_closes_under_the_next_request_is_retried():
    handle = Answers(lambda number: [ANSWER, None] if number == 1 else [ANSWER])
    async with client_of(handle, max_retries=1) as client:
        assert await client.server_info() == {}
        assert await client.server_info() == {}
    assert len(handle.requests) == 3


GZIPPED = gzip.compress(b"x" * 2**26)
GZIP_HEAD = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{", ""),
        # The client accepts no compression, because a few bytes could expand to any number.
        (GZIP_HEAD % len(GZIPPED) + GZIPPED, "Content-Encoding: got 'gzip'"),
    ],
    ids=["no HTTP", "no JSON", "compressed"],
)
async def test_an_invalid_http_answer_is_an_error(answer, words):
    handle = Answers(lambda _: [answer])
    async with client_of(handle, max_retries=0) as client:
        for ask in (client.server_info, lambda: client.generate([1])):
            with pytest.raises((errors.TransportError, errors.WireError)) as caught:
                await ask()
            assert words in str(caught.value)
    assert all(b"accept-encoding: identity" in request.lower() for request in handle.requests)


def chunk_of(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("ask", ["generate", "server_info"])
async def test_a_line_without_end_is_an_error_before_it_is_whole(ask):
    sent, wanted = 0, 600 * 2**20

    async def handle(number, reader, writer):
        nonlocal sent
        if b"/abort_request" in await read_request(reader):
            return writer.write(ANSWER)
        writer.write(HEAD)
        while sent < wanted:
            writer.write(chunk_of(b"x" * 2**16))
            await writer.drain()
            sent += 2**16

    async with client_of(handle, max_message_bytes=2**20) as client:
        with pytest.raises(errors.WireError, match=r"at most 1048576; .*the client's max_message_bytes"):
            await (client.generate([1]) if ask == "generate" else client.server_info())
    # The limit, and what the sockets hold.
    assert sent < 64 * 2**20


@pytest.mark.parametrize("size", [999, 1000, 1001])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_the_limit_applies_to_one_line(size, pieces):
    line = b": " + b"x" * (size - 2)
    answer = (line + b"\r\n") * 5 + b'data: {"error": {"message": "scripted", "code": 400}}\n\n'

    async def handle(number, reader, writer):
        if b"/abort_request" in await read_request(reader):
            return writer.write(ANSWER)
        writer.write(HEAD)
        for i in range(pieces):
            writer.write(chunk_of(answer[len(answer) * i // pieces : len(answer) * (i + 1) // pieces]))
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with client_of(handle, max_message_bytes=1001) as client:
        # The line end counts toward the length, except for the line feed.
        fits = size + 1 <= 1001
        with pytest.raises(errors.BadRequestError if fits else errors.WireError):
            await client.generate([1])


@pytest.mark.parametrize("num_bytes", [1001, 2**40, 2**64 - 1])
async def test_a_frame_that_is_too_long_is_an_error_before_it_comes(num_bytes):
    async def handle(number, reader, writer):
        await read_request(reader)
        writer.write(HEAD.replace(b"text/event-stream", MEDIA_TYPES[Rollout].encode()))
        writer.write(chunk_of(num_bytes.to_bytes(8, "little")))
        await writer.drain()
        # The server sends no byte of the frame, and the client does not wait for it.
        assert await reader.read() == b""

    async with client_of(handle, kind="sidecar", max_message_bytes=1000) as client:
        with pytest.raises(errors.WireError, match=f"got {num_bytes} bytes of one message .* most 1000;"):
            await client.generate([1])


async def test_an_error_without_end_is_cut():
    handle = Answers(lambda _: [HEAD.replace(b"200 OK", b"400 Bad") + chunk_of(b"x" * 2**16) * 1000])
    async with client_of(handle) as client:
        with pytest.raises(errors.BadRequestError) as caught:
            await client.generate([1])
        assert len(caught.value.body) == 2000


async def test_sockets_close_with_their_loop():
    """Warnings are errors, so a socket that is left open fails the test."""
    closed = asyncio.Event()

    async def handle(number, reader, writer):
        await read_request(reader)
        writer.write(ANSWER)
        await writer.drain()
        assert await reader.read() == b""
        closed.set()

    async with raw_server(handle) as url:
        client = AsyncRolloutClient(url, kind="sglang")
        assert await asyncio.to_thread(asyncio.run, client.server_info()) == {}
        async with asyncio.timeout(60):
            await closed.wait()


async def test_connections_are_used_again_and_closed_when_idle_for_long(monkeypatch):
    """A trainer that trains for minutes between two rollouts holds no open files."""
    monkeypatch.setattr(http, "_KEEPALIVE_S", 1.0)
    open_now, opened = set(), []

    async def handle(number, reader, writer):
        open_now.add(number)
        opened.append(number)
        with suppress(asyncio.IncompleteReadError):
            while await read_request(reader):
                await asyncio.sleep(0.02)
                writer.write(ANSWER)
                await writer.drain()
        open_now.discard(number)

    async with client_of(handle, max_retries=0) as client:
        for _ in range(3):
            await client.server_info()
        assert opened == [1]
        await asyncio.gather(*(client.server_info() for _ in range(4)))
        assert len(opened) == 4
        async with asyncio.timeout(60):
            while open_now:
                await asyncio.sleep(0.01)
        await client.server_info()
        assert len(opened) == 5


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_refused_connection_names_the_command_that_listens_there(host):
    with no_server() as url:
        port = url.rpartition(":")[2]
        async with AsyncRolloutClient(f"http://{host}:{port}", max_retries=0) as client:
            with pytest.raises(errors.TransportError) as caught:
                await client.generate([5])
    assert f"nothing listens at {host}:{port} (connection refused)" in str(caught.value)
    assert f"sglang-topp serve --model-path MODEL --port {port}" in str(caught.value)


# -- frames ----------------------------------------------------------------------------------------


async def arriving(chunks):
    for chunk in chunks:
        yield chunk


async def read_frames(chunks, max_bytes=1 << 30):
    return [frame async for frame in http.frames(arriving(chunks), max_bytes)]


def test_a_length_is_eight_bytes_little_endian():
    assert http.frame_head(0x0102) == bytes([2, 1, 0, 0, 0, 0, 0, 0])


@given(st.lists(st.binary(max_size=30), max_size=6), st.lists(st.integers(0, 250), max_size=8))
async def test_frames_come_as_they_were_however_they_are_cut(sent, cuts):
    raw = b"".join(map(framed, sent))
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    chunks = [raw[start:stop] for start, stop in pairwise(places)]
    assert await read_frames(chunks) == sent


async def test_every_cut_off_is_noticed():
    raw = framed(b"first") + framed(b"\n")
    for stop in range(1, len(raw)):
        if stop in (13, len(raw)):
            continue
        with pytest.raises(errors.TransportError, match="in the middle of a frame: "):
            await read_frames([raw[:stop]])
    assert await read_frames([raw[:13]]) == [b"first"]


async def test_the_limit_applies_to_one_frame():
    assert await read_frames([framed(b"x" * 10) * 3], max_bytes=10) == [b"x" * 10] * 3
    with pytest.raises(errors.WireError, match="max_message_bytes: got 11 bytes"):
        await read_frames([framed(b"x" * 11)], max_bytes=10)
