"""The real sidecar on a real uvicorn on loopback, in front of a fake engine that injects faults."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from sglang_topp.errors import SglangToppError
from sglang_topp_server.api.app import create_app
from sglang_topp_server.engine import EngineClient
from sglang_topp_server.error_responses import http_status
from sglang_topp_server.process.launch import listen
from sglang_topp_server.settings import Limits

FAKE_ENGINE = Path(__file__).parent / "fake_engine"


def _load_fake() -> Any:
    spec = importlib.util.spec_from_file_location(
        "fake_launch_server", FAKE_ENGINE / "sglang" / "launch_server.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = _load_fake()


class Served:
    """Run an ASGI app on a real uvicorn in a thread."""

    def __init__(
        self,
        app: Any,
        *,
        port: int = 0,
        lifespan: str = "on",
        reader_timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_level="critical",
            lifespan=lifespan,
            interface="asgi3",
            timeout_graceful_shutdown=1,
            **options,
        )
        self._server = uvicorn.Server(config)
        listener = listen("127.0.0.1", port, reader_timeout_s=reader_timeout_s)
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([listener],))

    def __enter__(self) -> Served:
        self._thread.start()
        _eventually(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def _eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Return the condition's first true value. Fail if it stays false."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return value


def post(body: bytes, path: str = "/rollouts", length: int | None = None) -> bytes:
    """Return the bytes of a request that declares the body's length, or another one."""
    length = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), length) + body


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def refusal(*words: str, status: int = 400) -> Iterator[None]:
    """Check that the block raises an error with these words, which becomes this HTTP status."""
    with pytest.raises(SglangToppError) as raised:
        yield
    assert http_status(raised.value) == status
    for word in words:
        assert word in str(raised.value)


class Sidecar:
    """A running sidecar with an HTTP client for it."""

    def __init__(self, served: Served, stack: ExitStack) -> None:
        self.url, self.port, self._served, self._stack = served.url, served.port, served, stack
        self.http = stack.enter_context(httpx.Client(base_url=self.url, timeout=60, trust_env=False))

    def rollouts(self, prompts: Any = "ab", **fields: Any) -> httpx.Response:
        fault = fields.pop("fault", None)
        params = fields.pop("sampling_params", {})
        if fault is not None:
            params = {**params, "fault": fault}
        fields.setdefault("top_logprobs_p", 0.9)
        return self.http.post("/rollouts", json={"prompts": prompts, "sampling_params": params, **fields})

    def scores(self, sequences: Any, **fields: Any) -> httpx.Response:
        return self.http.post("/scores", json={"sequences": sequences, "top_logprobs_p": 0.9, **fields})

    def send(
        self, path: str = "/rollouts", *, receive_buffer: int | None = None, **fields: Any
    ) -> socket.socket:
        """Send a request on a connection of its own, and return the connection."""
        if path == "/rollouts":
            fields = {"prompts": "a", "top_logprobs_p": 0.9, **fields}
        return self.dial(post(json.dumps(fields).encode(), path), receive_buffer=receive_buffer)

    def dial(self, sent: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
        """Open a connection, with a receive buffer of this size, and send some bytes on it."""
        connection = self._stack.enter_context(socket.socket())
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one sample in /metrics, or 0 if it is missing."""
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "")
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(wanted + " "):
                return float(line.split(" ")[1])
        return 0.0

    def num_connections(self) -> int:
        """Return the number of open connections, including that of `http`."""
        return self._served.num_connections()

    def is_ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait until a condition is true. No test depends on the time that this takes."""
    return _eventually


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> Any:
    """Whether the sidecar streams its answer."""
    return request.param


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve_engine() -> Callable[..., Any]:
    """`with serve_engine(port=...) as engine`: a FakeEngine that serves, with its `.url` and `.port`."""

    @contextmanager
    def serve(port: int = 0) -> Iterator[Any]:
        engine = fake.FakeEngine()
        with Served(engine.app, port=port, lifespan="off") as served:
            engine.url, engine.port = served.url, served.port
            yield engine

    return serve


class _Stage:
    """One server for the engines of all tests, because starting a server for each test is slow."""

    engine: Any

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.engine.app(scope, receive, send)


@pytest.fixture(scope="session")
def stage() -> Iterator[Any]:
    stage = _Stage()
    with Served(stage.app, lifespan="off") as served:
        yield stage, served.url


@pytest.fixture
def engine(stage: Any) -> Any:
    """A FakeEngine that serves, with its address in `.url`."""
    stage, url = stage
    stage.engine = fake.FakeEngine()
    stage.engine.url = url
    return stage.engine


@pytest.fixture
def start(stack: ExitStack) -> Callable[..., Sidecar]:
    """Return a function that starts a sidecar: `start(engine_url, api_key=..., wait=True, **limits)`."""

    def start(
        engine_url: str,
        *,
        api_key: str | None = None,
        engine_api_key: str | None = None,
        wait: bool = True,
        view: int = 0,
        **limits: Any,
    ) -> Sidecar:
        bounds = Limits(**limits)
        client = EngineClient(engine_url, api_key=engine_api_key)
        app = create_app(client, limits=bounds, api_key=api_key, view=view)
        served = stack.enter_context(
            Served(app, reader_timeout_s=bounds.io_timeout_s, ws="none", timeout_keep_alive=75)
        )
        sidecar = Sidecar(served, stack)
        if wait:
            _eventually(sidecar.is_ready)
        return sidecar

    return start


@pytest.fixture
def sidecar(engine: Any, start: Callable[..., Sidecar]) -> Sidecar:
    """A sidecar with the default limits and no key, in front of a patched engine."""
    return start(engine.url)
