"""Fake servers for the client's tests: a real uvicorn on loopback whose answers a test scripts."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import uvicorn

from sglang_topp import CandidateSets, formats
from sglang_topp_client import AsyncRolloutClient, Rollout, Score, load_rollouts, retry_policy, save_rollouts
from sglang_topp_client.rollout import write_spans
from sglang_topp_client.transport.http import frame_head
from sglang_topp_client.wire.records import from_frame, from_record, to_frame, to_record

NUM_TOKENS = 3
NDJSON = "application/x-ndjson"


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Reply:
    """What a handler answers."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        self._receive, self._send = receive, send

    async def start(
        self, status: int = 200, *, content_type: str = "text/event-stream", **headers: str
    ) -> None:
        pairs = [(b"content-type", content_type.encode())]
        pairs += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def json(self, body: Any, status: int = 200, **headers: str) -> None:
        await self.start(status, content_type="application/json", **headers)
        await self.write(b"" if status == 204 else json.dumps(body).encode())  # a 204 has no body
        await self.end()

    async def event(self, chunk: Any) -> None:
        await self.write(events_of(chunk))

    async def done(self) -> None:
        """End a stream of events."""
        await self.write(DONE)
        await self.end()

    async def events(self, *chunks: Any) -> None:
        """Answer with these events."""
        await self.start()
        for chunk in chunks:
            await self.event(chunk)
        await self.done()

    async def hung_up(self) -> None:
        """Wait until the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


DONE = b"data: [DONE]\n\n"


def events_of(*chunks: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in chunks)


Handler = Callable[[Asked, Reply], Awaitable[None]]


class Cut(Exception):
    """A handler raises this in the middle of an answer, and uvicorn drops the connection."""


@dataclass
class FakeServer:
    """Serves `paths`; the handlers in `script` answer its main path first, one request each."""

    main_path: str
    paths: dict[str, Handler]
    script: list[Handler] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    hang_ups: int = 0
    in_flight: int = 0
    peak: int = 0
    url: str = ""

    def of(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.path == path]

    @property
    def calls(self) -> list[Any]:
        """Return the bodies that clients posted to the main path."""
        return [asked.body for asked in self.of(self.main_path)]

    @property
    def aborted(self) -> list[str]:
        return [asked.body["rid"] for asked in self.of("/abort_request")]

    @contextmanager
    def serve(self, **options: Any) -> Iterator[str]:
        """Run a uvicorn in a thread, and yield its address."""
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, timeout_graceful_shutdown=1, **(UVICORN | options)
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "uvicorn did not start"
            time.sleep(0.01)
        try:
            yield f"http{'s' * config.is_ssl}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Asked(scope["method"], scope["path"], headers, json.loads(raw) if raw else None)
        self.asked.append(asked)
        reply = Reply(receive, send)
        handler = self.paths.get(asked.path)
        if handler is None:
            return await reply.json({"detail": "Not Found"}, 404)
        if asked.path != self.main_path:
            return await handler(asked, reply)
        if self.script:
            handler = self.script.pop(0)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await handler(asked, reply)
        finally:
            self.in_flight -= 1


UVICORN = {"log_level": "critical", "lifespan": "off", "interface": "asgi3", "ws": "none", "backlog": 2048}


# -- what an engine answers ------------------------------------------------------------------------


def sample(prompt: Any, index: int, num_tokens: int = NUM_TOKENS) -> Rollout:
    """Return the rollout that the fake servers "generate". It differs for each prompt and sample."""
    prompt_ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    rng = np.random.default_rng([*prompt_ids, index])
    sizes = rng.integers(1, 5, num_tokens)
    kept = [0.95 * rng.dirichlet(np.ones(size)) for size in sizes]
    logprobs = np.log(np.concatenate([np.sort(part)[::-1] for part in kept])).astype(np.float32)
    token_ids = np.concatenate([rng.permutation(100)[:size] for size in sizes]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    output_ids = token_ids[offsets[:-1] + rng.integers(0, sizes)]
    sets = CandidateSets(token_ids, logprobs, offsets, output_ids)
    return Rollout(
        prompt_index=0,
        sample_index=index,
        request_id=f"engine-{prompt_ids}-{index}",
        prompt_ids=np.array(prompt_ids, np.int32),
        output_ids=output_ids,
        text=f"<{index}>",
        logprobs=sets.sampled_logprobs,
        candidates=sets,
        finish_reason="stop",
        weight_version="step-7",
        cached_tokens=1,
        latency_s=0.25,
        top_logprobs_source="distribution",
        weight_spans=(("step-6", 1), ("step-7", num_tokens - 1)) if num_tokens > 1 else (("step-7", 1),),
    )


def chunk(
    made: Rollout, *, start: int = 0, stop: int | None = None, first_token_only: bool = False, **meta: Any
) -> dict[str, Any]:
    """Return SGLang's chunk of positions `start:stop` of `made`. With `first_token_only` it is unfinished.

    `meta` changes fields of its `meta_info`.
    """
    assert made.candidates is not None
    stop = 1 if first_token_only else stop
    part = made.candidates[start : len(made.output_ids) if stop is None else stop]
    ids = made.output_ids[start:stop].tolist()
    return {
        "text": made.text if not first_token_only else "",
        "output_ids": ids,
        "prompt_token_ids": made.prompt_ids.tolist(),
        "index": made.sample_index,
        "meta_info": {
            "id": made.request_id,
            "finish_reason": None if first_token_only else {"type": made.finish_reason, "matched": 9},
            "prompt_tokens": len(made.prompt_ids),
            "completion_tokens": 1 if first_token_only else len(made.output_ids),
            "cached_tokens": made.cached_tokens,
            "weight_version": made.weight_version,
            "weight_versions": write_spans(made.weight_spans or ()),
            "e2e_latency": made.latency_s,
            "output_token_logprobs": [
                [float(logprob), token, None]
                for logprob, token in zip(made.logprobs[start:stop], ids, strict=True)
            ],
            **formats.encode_top_p("output", part.token_ids, part.logprobs, part.sizes.tolist()),
            **meta,
        },
    }


def score(sequence: Any, start: int = 1) -> Score:
    """Return the fake servers' score of a sequence. The set of every position holds its token."""
    token_ids = np.array(list(sequence.encode()) if isinstance(sequence, str) else sequence, np.int32)
    made = sample(token_ids.tolist(), 0, len(token_ids))
    # The set of each position holds the sequence's token instead of the drawn token.
    sets = made.candidates[start:]
    at = np.repeat(np.arange(len(sets)), sets.sizes)
    is_drawn = sets.token_ids == sets.sampled_ids[at]
    ids = np.where(is_drawn, token_ids[start:][at], sets.token_ids + 1000)
    return Score(
        sequence_index=0,
        request_id=f"engine-{token_ids.tolist()}",
        token_ids=token_ids,
        start=start,
        logprobs=made.logprobs[start:],
        candidates=CandidateSets(ids, sets.logprobs, sets.offsets, token_ids[start:]),
        weight_version="step-7",
        cached_tokens=1,
    )


def score_chunk(made: Score) -> dict[str, Any]:
    """Return SGLang's chunk of a score. The position before the first one has no distribution."""
    assert made.candidates is not None
    lengths = [formats.NO_DISTRIBUTION, *made.candidates.sizes.tolist()]
    scored = zip(made.logprobs.tolist(), made.token_ids[made.start :].tolist(), strict=True)
    return {
        "text": "",
        "output_ids": [],
        "prompt_token_ids": made.token_ids.tolist(),
        "meta_info": {
            "id": made.request_id,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(made.token_ids),
            "completion_tokens": 0,
            "cached_tokens": made.cached_tokens,
            "weight_version": made.weight_version,
            "e2e_latency": 0.5,
            "input_token_logprobs": [
                [None, int(made.token_ids[made.start - 1]), None],
                *([logprob, token, None] for logprob, token in scored),
            ],
            "output_token_logprobs": [],
            **formats.encode_top_p("input", made.candidates.token_ids, made.candidates.logprobs, lengths),
        },
    }


def prompt_of(body: Any) -> Any:
    return body.get("text") or body["input_ids"]


async def answer_generate(asked: Asked, reply: Reply) -> None:
    """Answer like a patched engine: first tokens, then complete samples in reverse order; or a score."""
    body = asked.body
    if "logprob_start_len" in body:
        assert body["sampling_params"]["max_new_tokens"] == 0
        return await reply.events(score_chunk(score(prompt_of(body), body["logprob_start_len"] + 1)))
    made = [sample(prompt_of(body), index) for index in range(body["sampling_params"]["n"])]
    meta = {"resumed_tokens": body["resumed_tokens"]} if "resumed_tokens" in body else {}
    first = [chunk(one, first_token_only=True, **meta) for one in made]
    await reply.events(*first, *(chunk(one, **meta) for one in reversed(made)))


def results_of(body: Any) -> list[Any]:
    """Return the rollouts or scores that a sidecar answers this body with."""
    if "sequences" in body:
        pairs = enumerate(zip(body["sequences"], body["start"], strict=True))
        return [replace(score(sequence, start), sequence_index=i) for i, (sequence, start) in pairs]
    return [
        replace(sample(prompt, index), prompt_index=i)
        for i, prompt in enumerate(body["prompts"])
        for index in range(body["sampling_params"]["n"])
    ]


def framed(raw: bytes) -> bytes:
    return frame_head(len(raw)) + raw


def encoded(results: list[Any], *, in_frames: bool = False, is_whole: bool = True) -> bytes:
    """Return a sidecar's messages for these results, with the final one if `is_whole`."""
    messages = [to_frame(one) if in_frames else json.dumps(to_record(one)).encode() for one in results]
    if is_whole:
        noun = "scores" if isinstance(results[0], Score) else "rollouts"
        messages.append(json.dumps({"done": True, noun: len(results)}).encode())
    return b"".join(framed(message) if in_frames else message + b"\n" for message in messages)


async def answer_lines(asked: Asked, reply: Reply) -> None:
    """Answer like an old sidecar, in JSON lines."""
    await sends_bytes(encoded(results_of(asked.body)), NDJSON)(asked, reply)


async def answer_frames(asked: Asked, reply: Reply) -> None:
    """Answer like a current sidecar: in frames, the first media type that the client accepts."""
    media_type = asked.headers["accept"].partition(",")[0]
    await sends_bytes(encoded(results_of(asked.body), in_frames=True), media_type)(asked, reply)


def answers(body: Any, code: int = 200, **headers: str) -> Handler:
    """Make a handler that answers with JSON."""

    async def handler(asked: Asked, reply: Reply) -> None:
        await reply.json(body, code, **headers)

    return handler


def status(code: int, message: str = "scripted", **headers: str) -> Handler:
    """Make a handler that answers with an HTTP status."""
    return answers({"error": {"message": message}}, code, **headers)


def sends_bytes(
    content: bytes | Callable[[Any], bytes],
    content_type: str = "text/event-stream",
    *,
    code: int = 200,
    ends: bool = True,
) -> Handler:
    """Make a handler that sends bytes, or what a function makes of the body, and then ends or is cut off."""

    async def handler(asked: Asked, reply: Reply) -> None:
        await reply.start(code, content_type=content_type)
        await reply.write(content if isinstance(content, bytes) else content(asked.body))
        if not ends:
            raise Cut
        await reply.end()

    return handler


def by_request(choose: Callable[[Asked], Handler]) -> Handler:
    """Make a handler that answers as the handler that `choose` returns for the request."""

    async def handler(asked: Asked, reply: Reply) -> None:
        await choose(asked)(asked, reply)

    return handler


def held_until(condition: Callable[[], Any], handler: Handler = answer_generate) -> Handler:
    """Make a handler that answers as another one does, once the condition is true."""

    async def wait(asked: Asked, reply: Reply) -> None:
        await until(condition)
        await handler(asked, reply)

    return wait


def sends(*chunks: Any) -> Handler:
    """Make a handler that answers with these events."""
    return sends_bytes(events_of(*chunks) + DONE)


def altered(handler: Handler, change: Callable[[Any], None]) -> Handler:
    """Make a handler that answers as another one does, after `change` was called with each event."""

    async def handle(asked: Asked, reply: Reply) -> None:
        event = reply.event

        async def send(chunk: Any) -> None:
            change(chunk)
            await event(chunk)

        reply.event = send  # type: ignore[method-assign]  # this reply alone gets it
        await handler(asked, reply)

    return handle


async def silent(asked: Asked, reply: Reply) -> None:
    """Answer nothing until the client disconnects."""
    await reply.hung_up()


accept = sends_bytes(b"")


def bits(result: Rollout | Score) -> dict[str, Any]:
    """Return every field in a form that is equal only if all bits are."""
    values = {each.name: getattr(result, each.name) for each in fields(result)}
    if (sets := values.pop("candidates")) is not None:
        values |= {"ids": sets.token_ids, "offsets": sets.offsets, "sampled_ids": sets.sampled_ids}
        values |= {"set_logprobs": sets.logprobs} if sets.has_logprobs else {}
    for name, one in values.pop("token_fields", {}).items():
        values |= {f"{name} from": one.start, name: one.values}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            values[name] = (value.dtype, value.shape, value.tobytes())
        elif isinstance(value, float):
            values[name] = value.hex()
    return values


def through_json(result: Any, **options: Any) -> Any:
    return from_record(type(result), json.loads(json.dumps(to_record(result))), **options)


def through_a_frame(result: Any) -> Any:
    return from_frame(type(result), to_frame(result), max_bytes=1 << 20)


def through_a_file(*results: Rollout) -> list[Rollout]:
    with tempfile.TemporaryDirectory() as folder:
        save_rollouts(f"{folder}/rollouts.parquet", results)
        return list(load_rollouts(f"{folder}/rollouts.parquet"))


def without_tokens(made: Rollout) -> Rollout:
    empty = {name: getattr(made, name)[:0] for name in ("output_ids", "logprobs", "candidates")}
    return replace(made, weight_spans=(), **empty)


def changed(value: Any, path: Sequence[Any], new: Any) -> Any:
    """Return a copy of a JSON value with `new` at a place, or what the function `new` makes of it there.

    `...` removes what is there.
    """
    value = holder = copy.deepcopy(value)
    *way, last = path
    for key in way:
        holder = holder[key]
    if new is ...:
        del holder[last]
    else:
        holder[last] = new(holder[last]) if callable(new) else new
    return value


def without_sets(answer: Any) -> Any:
    """Take the sets out of an engine's answer, and return it."""
    meta = answer["meta_info"]
    answer["meta_info"] = {name: value for name, value in meta.items() if "_top_p_" not in name}
    return answer


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def ids_known(client: AsyncRolloutClient, num_samples: int) -> None:
    """Wait until the client has the engine's ids of so many samples; with `n`, the tokens bring them."""

    def exchanges() -> list[Any]:
        return [job.exchange for run in client._runs.servers.runs for job in run._jobs if job.exchange]

    await until(lambda: sum(len(one.open_ids) for one in exchanges()) == num_samples)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which must succeed, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done


# -- fixtures --------------------------------------------------------------------------------------


ENGINE = {
    "/generate": answer_generate,
    "/abort_request": accept,
    "/server_info": answers({"version": "0.5.23"}),
}
SIDECAR = {
    "/rollouts": answer_lines,
    "/scores": answer_frames,
    "/info": answers({"service": "sglang-topp", "ready": True}),
    "/abort": answers({"status": "ok", "aborted": 0}),
}


@contextmanager
def serving(paths: dict[str, Handler]) -> Iterator[FakeServer]:
    """A server with these routes, of which the first is the main one."""
    server = FakeServer(next(iter(paths)), dict(paths))
    with server.serve() as server.url:
        yield server


@pytest.fixture
def engine() -> Iterator[FakeServer]:
    """A server with SGLang's routes."""
    with serving(ENGINE) as server:
        yield server


@pytest.fixture
def sidecar() -> Iterator[FakeServer]:
    """A server with the sidecar's routes."""
    with serving(SIDECAR) as server:
        yield server


@pytest.fixture(params=["engine", "sidecar"])
def served(request: pytest.FixtureRequest) -> FakeServer:
    """A server of each kind."""
    server: FakeServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def start_servers() -> Iterator[Callable[..., list[FakeServer]]]:
    """`start_servers(count, paths)`: several servers with the same routes."""
    with ExitStack() as stack:
        yield lambda count, paths=ENGINE: [stack.enter_context(serving(paths)) for _ in range(count)]


@contextmanager
def no_server() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def hang(engine: FakeServer) -> Handler:
    """Send the first tokens, and then nothing until the client disconnects. Count the disconnects."""

    async def handler(asked: Asked, reply: Reply) -> None:
        n = asked.body["sampling_params"]["n"]
        # SGLang keeps the caller's id for a single sample only.
        meta = {"id": asked.body["rid"]} if n == 1 else {}
        await reply.start()
        for index in range(n):
            await reply.event(chunk(sample(prompt_of(asked.body), index), first_token_only=True, **meta))
        await reply.hung_up()
        engine.hang_ups += 1

    return handler


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_policy, "_FIRST_DELAY_S", 0.001)


@pytest.fixture
async def no_leftovers() -> AsyncIterator[None]:
    """Check that no task outlives the test."""
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@asynccontextmanager
async def raw_server(handle: Callable[..., Awaitable[None]], **options: Any) -> AsyncIterator[str]:
    """Run a socket server. `handle(number, reader, writer)` gets every connection and its number."""
    connections: list[Any] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        try:
            await handle(len(connections), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except RuntimeError:  # uvloop raises it for a connection that the client has closed
            if not writer.is_closing():
                raise
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, **options)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await asyncio.gather(*connections)


@asynccontextmanager
async def hung_server() -> AsyncIterator[str]:
    """A server that accepts connections and never answers anything."""

    async def read(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass

    async with raw_server(read, backlog=1024) as url:
        yield url
