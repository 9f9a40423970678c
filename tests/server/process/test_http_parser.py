"""The sidecar parses HTTP with h11, also where httptools is installed, which uvicorn would prefer."""

import asyncio
import sys
from types import ModuleType

import pytest

from sglang_topp_server.process.launch import Server, listen
from sglang_topp_server.settings import Settings

BODY = b'{"request_id": "none"}'
OFFERS_AN_UPGRADE = (
    b"POST /abort HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABk\r\nContent-Length: %d\r\n\r\n" % len(BODY)
)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (OFFERS_AN_UPGRADE + BODY, b"200"),  # as Java's client does
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (1 << 15), b"400"),
        (b"GET /" + b"x" * (1 << 15), b"400"),
    ],
    ids=["upgrade", "long header", "long path"],
)
async def test_what_httptools_would_lose_or_keep(engine, monkeypatch, sent, status):
    monkeypatch.setitem(sys.modules, "httptools", ModuleType("httptools"))
    monkeypatch.delitem(sys.modules, "uvicorn.protocols.http.auto", raising=False)
    server = Server(Settings(engine.url))
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(sent)
    assert (await reader.readline()).split()[1] == status
    writer.close()
    server.stop()
    await serving
