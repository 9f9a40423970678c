"""Faults below HTTP: connections that are reset, and connections that the server closed while idle."""

import asyncio
import gzip
import inspect
import socket
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, Rollout
from sglang_topp_client.transport import http
from sglang_topp_client.wire.records import MEDIA_TYPES

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def raw_server(handle):
    """Run a socket server. `handle(number, reader, writer)` gets every connection and its number."""
    connections = []

    async def connected(reader, writer):
        connections.append(asyncio.current_task())
        await handle(len(connections), reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await asyncio.gather(*connections)


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
    )
    return head + await reader.readexactly(int(length.split(b":")[1]))


def test_idle_connections_go_before_the_server_drops_them():
    """uvicorn's default of 5 s, which is also SGLang's (SGLANG_TIMEOUT_KEEP_ALIVE)."""
    default_s = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    assert default_s > http._KEEPALIVE_S


async def test_a_reset_before_the_answer_is_retried():
    async def handle(number, reader, writer):
        await read_request(reader)
        if number < 3:
            writer.transport.abort()
        else:
            writer.write(ANSWER)
            await writer.drain()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang") as client:
        assert await client.server_info() == {}


async def test_a_reset_in_the_middle_is_a_transport_error():
    connections = []

    async def handle(number, reader, writer):
        connections.append(await read_request(reader))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\ndata: "
        )
        await writer.drain()
        writer.transport.abort()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=2) as client:
        with pytest.raises(errors.TransportError):
            await client.generate([1])
    assert sum(b"POST /generate" in request for request in connections) == 3


async def test_a_connection_that_closed_while_idle_is_replaced():
    answered = []

    async def handle(number, reader, writer):
        """Send one answer that promises to keep the connection, and then close it."""
        answered.append(await read_request(reader))
        writer.write(ANSWER)
        await writer.drain()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=0) as client:
        for _ in range(3):
            assert await client.server_info() == {}
            await asyncio.sleep(0.05)
    assert len(answered) == 3


async def test_a_connection_that_may_not_be_used_again_is_replaced():
    """An HTTP/1.0 connection ends with its answer, and no header says so."""
    answered = []

    async def handle(number, reader, writer):
        answered.append(await read_request(reader))
        writer.write(ANSWER.replace(b"HTTP/1.1", b"HTTP/1.0"))
        await writer.drain()
        await reader.read()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=0) as client:
        for _ in range(3):
            assert await client.server_info() == {}
    assert len(answered) == 3


async def test_a_connection_that_closes_under_the_next_request_is_retried():
    requests = []

    async def handle(number, reader, writer):
        requests.append(await read_request(reader))
        writer.write(ANSWER)
        await writer.drain()
        if number == 1:
            requests.append(await read_request(reader))
            writer.transport.abort()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=1) as client:
        assert await client.server_info() == {}
        assert await client.server_info() == {}
    assert len(requests) == 3


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{"]
)
async def test_an_invalid_http_answer_is_an_error(answer):
    async def handle(number, reader, writer):
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=0) as client:
        with pytest.raises((errors.TransportError, errors.WireError)):
            await client.server_info()
        with pytest.raises((errors.TransportError, errors.WireError)):
            await client.generate([1])


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk_of(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("ask", ["generate", "server_info"])
async def test_a_line_without_end_is_an_error_before_it_is_whole(ask):
    sent, wanted = 0, 600 * 2**20

    async def handle(number, reader, writer):
        nonlocal sent
        if b"/abort_request" in await read_request(reader):
            writer.write(ANSWER)
            return
        writer.write(HEAD)
        with suppress(ConnectionError):
            while sent < wanted:
                writer.write(chunk_of(b"x" * 2**16))
                await writer.drain()
                sent += 2**16

    async with (
        raw_server(handle) as url,
        AsyncRolloutClient(url, kind="sglang", max_message_bytes=2**20) as client,
    ):
        with pytest.raises(errors.WireError, match=r"at most 1048576; .*the client's max_message_bytes"):
            await (client.generate([1]) if ask == "generate" else client.server_info())
    # The limit, and what the sockets hold.
    assert sent < 64 * 2**20


@pytest.mark.parametrize("size", [999, 1000, 1001])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_the_limit_applies_to_one_line(size, pieces):
    line = b": " + b"x" * (size - 2)

    async def handle(number, reader, writer):
        if b"/abort_request" in await read_request(reader):
            writer.write(ANSWER)
            return
        writer.write(HEAD)
        answer = (line + b"\r\n") * 5 + b'data: {"error": {"message": "scripted", "code": 400}}\n\n'
        with suppress(ConnectionError):
            for i in range(pieces):
                writer.write(chunk_of(answer[len(answer) * i // pieces : len(answer) * (i + 1) // pieces]))
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async with (
        raw_server(handle) as url,
        AsyncRolloutClient(url, kind="sglang", max_message_bytes=1001) as client,
    ):
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

    async with (
        raw_server(handle) as url,
        AsyncRolloutClient(url, kind="sidecar", max_message_bytes=1000) as client,
    ):
        with pytest.raises(errors.WireError, match=f"got {num_bytes} bytes of one message .* most 1000;"):
            await client.generate([1])


async def test_an_error_without_end_is_cut():
    async def handle(number, reader, writer):
        await read_request(reader)
        writer.write(HEAD.replace(b"200 OK", b"400 Bad"))
        with suppress(ConnectionError):
            for _ in range(1000):
                writer.write(chunk_of(b"x" * 2**16))
                await writer.drain()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang") as client:
        with pytest.raises(errors.BadRequestError) as caught:
            await client.generate([1])
        assert len(caught.value.body) == 2000


async def test_compressed_answers_are_refused():
    """The client accepts no compression, because a few bytes could expand to any number."""

    async def handle(number, reader, writer):
        assert b"accept-encoding: identity" in (await read_request(reader)).lower()
        body = gzip.compress(b"x" * 2**26)
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        with suppress(ConnectionError):
            await writer.drain()

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.WireError, match=r"Content-Encoding: got 'gzip'"):
            await client.server_info()
        with pytest.raises(errors.WireError, match=r"Content-Encoding: got 'gzip'"):
            await client.generate([1])


async def test_idle_connections_close_by_themselves(monkeypatch):
    """A trainer that trains for minutes between two rollouts holds no open files."""
    monkeypatch.setattr(http, "_KEEPALIVE_S", 0.1)
    open_now = set()

    async def handle(number, reader, writer):
        open_now.add(number)
        with suppress(asyncio.IncompleteReadError):
            while True:
                await read_request(reader)
                await asyncio.sleep(0.05)
                writer.write(ANSWER)
                await writer.drain()
        open_now.discard(number)

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=0) as client:
        await asyncio.gather(*(client.server_info() for _ in range(20)))
        async with asyncio.timeout(10):
            while open_now:
                await asyncio.sleep(0.01)


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
        async with asyncio.timeout(2):
            await closed.wait()


async def test_connections_are_used_again_and_closed_when_idle_for_long(monkeypatch):
    monkeypatch.setattr(http, "_KEEPALIVE_S", 1.0)
    open_now, opened = set(), []

    async def handle(number, reader, writer):
        open_now.add(number)
        opened.append(number)
        while not reader.at_eof():
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                break
            await asyncio.sleep(0.02)
            writer.write(ANSWER)
            await writer.drain()
        open_now.discard(number)

    async with raw_server(handle) as url, AsyncRolloutClient(url, kind="sglang", max_retries=0) as client:
        for _ in range(3):
            await client.server_info()
        assert opened == [1]
        await asyncio.gather(*(client.server_info() for _ in range(4)))
        assert len(opened) == 4
        async with asyncio.timeout(10):
            while open_now:
                await asyncio.sleep(0.01)
        await client.server_info()
        assert len(opened) == 5


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_refused_connection_names_the_command_that_listens_there(host):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        async with AsyncRolloutClient(f"http://{host}:{port}", max_retries=0) as client:
            with pytest.raises(errors.TransportError) as caught:
                await client.generate([5])
    assert f"nothing listens at {host}:{port} (connection refused)" in str(caught.value)
    assert f"sglang-topp serve --model-path MODEL --port {port}" in str(caught.value)
