"""The sidecar's uvicorn leaves signals to `process.launch`."""

import asyncio
import signal

import httpx

from sglang_topp_server.process.launch import Server, listen
from sglang_topp_server.settings import Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def test_uvicorn_handles_no_signal(engine):
    """`capture_signals` is uvicorn's own method: a release that renames it would end the sidecar without the
    engine."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    server = Server(Settings(engine.url))
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"http://127.0.0.1:{listener.getsockname()[1]}/healthz")

    assert answer.status_code == 200
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    server.stop()
    await serving
