"""A real uvicorn with the real sidecar, on a loopback port, before an engine that injects faults."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from sglang_topp_server.app import create_app
from sglang_topp_server.connection import http_protocol
from sglang_topp_server.engine import Engine
from sglang_topp_server.limits import Limits

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
    """An ASGI app on a real uvicorn in a thread."""

    def __init__(self, app: Any, *, port: int = 0, lifespan: str = "on", **options: Any) -> None:
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=port,
            log_level="critical",
            lifespan=lifespan,
            interface="asgi3",
            timeout_graceful_shutdown=1,
            **options,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Served:
        self._thread.start()
        _eventually(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def _eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The condition's first true value; a failure when it stays false."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return value


class Sidecar:
    """A running sidecar, and a plain HTTP client for it."""

    def __init__(self, url: str, port: int) -> None:
        self.url, self.port = url, port
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def rollouts(self, prompts: Any = "ab", **fields: Any) -> httpx.Response:
        fault = fields.pop("fault", None)
        params = fields.pop("sampling_params", {})
        if fault is not None:
            params = {**params, "fault": fault}
        fields.setdefault("top_logprobs_p", 0.9)
        return self.http.post("/rollouts", json={"prompts": prompts, "sampling_params": params, **fields})

    def scores(self, sequences: Any, **fields: Any) -> httpx.Response:
        return self.http.post("/scores", json={"sequences": sequences, "top_logprobs_p": 0.9, **fields})

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample in /metrics; 0 where it is not there."""
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "")
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(wanted + " "):
                return float(line.split(" ")[1])
        return 0.0

    def is_ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Waits for a condition to come true; no test depends on how long that takes."""
    return _eventually


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
    """Where one engine after the other stands, so that not every test starts a server for it."""

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
    """Starts a sidecar: `start(engine_url, api_key=..., engine_api_key=..., wait=True, **limits)`."""

    def start(
        engine_url: str,
        *,
        api_key: str | None = None,
        engine_api_key: str | None = None,
        wait: bool = True,
        **limits: Any,
    ) -> Sidecar:
        bounds = Limits(**limits)
        app = create_app(Engine(engine_url, api_key=engine_api_key), limits=bounds, api_key=api_key)
        served = stack.enter_context(
            Served(app, http=http_protocol(bounds), ws="none", timeout_keep_alive=75)
        )
        sidecar = Sidecar(served.url, served.port)
        stack.callback(sidecar.http.close)
        if wait:
            _eventually(sidecar.is_ready)
        return sidecar

    return start


@pytest.fixture
def sidecar(engine: Any, start: Callable[..., Sidecar]) -> Sidecar:
    """A sidecar with the default limits and no key, before a patched engine."""
    return start(engine.url)
