"""Fake servers for the client's tests: a real uvicorn on loopback whose answers a test scripts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import uvicorn

from sglang_topp import CandidateSets, formats
from sglang_topp_client import Rollout, Score, retry_policy
from sglang_topp_client.rollout import write_spans
from sglang_topp_client.transport.http import frame_head
from sglang_topp_client.wire.records import to_frame, to_record

NUM_TOKENS = 3


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
        await self.write(json.dumps(body).encode())
        await self.end()

    async def event(self, chunk: Any) -> None:
        await self.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async def line(self, record: Any) -> None:
        await self.write(json.dumps(record).encode() + b"\n")

    async def hung_up(self) -> None:
        """Wait until the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


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


class _Uvicorn:
    def __init__(self, app: Any, **options: Any) -> None:
        options = {
            "log_level": "critical",
            "lifespan": "off",
            "interface": "asgi3",
            "ws": "none",
            "backlog": 2048,
            **options,
        }
        config = uvicorn.Config(app, host="127.0.0.1", port=0, timeout_graceful_shutdown=1, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> str:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "uvicorn did not start"
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


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
    made: Rollout, *, start: int = 0, stop: int | None = None, first_token_only: bool = False
) -> dict[str, Any]:
    """Return SGLang's chunk of positions `start:stop` of `made`. With `first_token_only` it is unfinished."""
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
        },
    }


def score(sequence: Any, start: int = 1) -> Score:
    """Return the fake servers' score of a sequence. The set of every position holds its token."""
    token_ids = np.array(list(sequence.encode()) if isinstance(sequence, str) else sequence, np.int32)
    made = sample(token_ids.tolist(), 0, len(token_ids))
    # The set of each position holds the sequence's token instead of the drawn token.
    sets = made.candidates[start:]
    scored = token_ids[start:]
    ids = sets.token_ids + 1000
    at = np.repeat(np.arange(len(sets)), sets.sizes)
    is_drawn = sets.token_ids == sets.sampled_ids[at]
    ids[is_drawn] = scored
    return Score(
        sequence_index=0,
        request_id=f"engine-{token_ids.tolist()}",
        token_ids=token_ids,
        start=start,
        logprobs=made.logprobs[start:],
        candidates=_in_order(ids, sets.logprobs, sets.offsets, scored),
        weight_version="step-7",
        cached_tokens=1,
    )


def _in_order(ids: Any, logprobs: Any, offsets: Any, sampled_ids: Any) -> CandidateSets:
    order = np.lexsort((ids, -logprobs, np.repeat(np.arange(len(sampled_ids)), np.diff(offsets))))
    return CandidateSets(ids[order], logprobs[order], offsets, sampled_ids)


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


async def answer_score(asked: Asked, reply: Reply) -> None:
    """Answer like a patched engine."""
    body = asked.body
    assert body["sampling_params"]["max_new_tokens"] == 0
    made = score(body.get("text") or body["input_ids"], body["logprob_start_len"] + 1)
    await reply.start()
    await reply.event(score_chunk(made))
    await reply.write(b"data: [DONE]\n\n")
    await reply.end()


async def answer_generate(asked: Asked, reply: Reply) -> None:
    """Answer like a patched engine: first tokens, then complete samples in reverse order."""
    body = asked.body
    if "logprob_start_len" in body:
        return await answer_score(asked, reply)
    n = body["sampling_params"]["n"]
    made = [sample(body.get("text") or body["input_ids"], index) for index in range(n)]
    await reply.start()
    for one in made:
        await reply.event(chunk(one, first_token_only=True))
    for one in reversed(made):
        await reply.event(chunk(one))
    await reply.write(b"data: [DONE]\n\n")
    await reply.end()


async def answer_rollouts(asked: Asked, reply: Reply) -> None:
    """Answer like a sidecar."""
    await reply.start(content_type="application/x-ndjson")
    count = 0
    for record in records(asked.body):
        await reply.line(record)
        count += 1
    await reply.line({"done": True, "rollouts": count})
    await reply.end()


def scores(body: Any) -> Iterator[Score]:
    for index, (sequence, start) in enumerate(zip(body["sequences"], body["start"], strict=True)):
        yield replace(score(sequence, start), sequence_index=index)


async def answer_scores(asked: Asked, reply: Reply) -> None:
    """Answer like a sidecar, in JSON lines."""
    await reply.start(content_type="application/x-ndjson")
    made = list(scores(asked.body))
    for one in made:
        await reply.line(to_record(one))
    await reply.line({"done": True, "scores": len(made)})
    await reply.end()


async def answer_score_frames(asked: Asked, reply: Reply) -> None:
    """Answer like a sidecar, in frames."""
    await reply.start(content_type=asked.headers["accept"].partition(",")[0])
    made = [framed(to_frame(one)) for one in scores(asked.body)]
    for frame in [*made, framed(json.dumps({"done": True, "scores": len(made)}).encode())]:
        await reply.write(frame)
    await reply.end()


async def answer_frames(asked: Asked, reply: Reply) -> None:
    """Answer like a current sidecar: in frames, the first media type that the client accepts."""
    await reply.start(content_type=asked.headers["accept"].partition(",")[0])
    made = list(framed_samples(asked.body))
    for frame in [*made, framed(json.dumps({"done": True, "rollouts": len(made)}).encode())]:
        await reply.write(frame)
    await reply.end()


def framed_samples(body: Any) -> Iterator[bytes]:
    for prompt_index, prompt in enumerate(body["prompts"]):
        for index in range(body["sampling_params"]["n"]):
            made = replace(sample(prompt, index), prompt_index=prompt_index)
            yield framed(to_frame(made))


def framed(raw: bytes) -> bytes:
    return frame_head(len(raw)) + raw


def records(body: Any) -> Iterator[dict[str, Any]]:
    params = body["sampling_params"]
    for prompt_index, prompt in enumerate(body["prompts"]):
        one = params if isinstance(params, dict) else params[prompt_index]
        for index in range(one["n"]):
            yield to_record(sample(prompt, index)) | {"prompt_index": prompt_index}


async def _accept(asked: Asked, reply: Reply) -> None:
    await reply.start()
    await reply.end()


# -- fixtures --------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[FakeServer]:
    """A server with SGLang's routes."""

    async def info(asked: Asked, reply: Reply) -> None:
        await reply.json({"version": "0.5.23"})

    paths = {"/generate": answer_generate, "/abort_request": _accept, "/server_info": info}
    server = FakeServer("/generate", paths)
    with _Uvicorn(server.app) as server.url:
        yield server


@pytest.fixture
def sidecar() -> Iterator[FakeServer]:
    """A server with the sidecar's routes."""

    async def info(asked: Asked, reply: Reply) -> None:
        await reply.json({"service": "sglang-topp", "ready": True})

    async def abort(asked: Asked, reply: Reply) -> None:
        await reply.json({"status": "ok", "aborted": 0})

    paths = {
        "/rollouts": answer_rollouts,
        "/scores": answer_score_frames,
        "/info": info,
        "/abort": abort,
    }
    server = FakeServer("/rollouts", paths)
    with _Uvicorn(server.app) as server.url:
        yield server


@pytest.fixture
def hang(request: pytest.FixtureRequest) -> Handler:
    """Send the first tokens, and then nothing until the client disconnects. Count the disconnects."""

    async def handler(asked: Asked, reply: Reply) -> None:
        server: FakeServer = request.getfixturevalue("engine")
        await reply.start()
        for index in range(asked.body["sampling_params"]["n"]):
            made = sample(asked.body.get("text") or asked.body["input_ids"], index)
            one = chunk(made, first_token_only=True)
            if asked.body["sampling_params"]["n"] == 1:
                # SGLang keeps the caller's id for a single sample only.
                one["meta_info"]["id"] = asked.body["rid"]
            await reply.event(one)
        await reply.hung_up()
        server.hang_ups += 1

    return handler


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_policy, "_FIRST_DELAY_S", 0.001)


@pytest.fixture
async def no_leftovers() -> AsyncIterator[None]:
    """Check that no task outlives the test."""
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def fakes() -> Any:
    """Return this module, because pytest's import mode gives tests no way to import its helpers."""
    return _Fakes


@pytest.fixture(scope="session")
def fakes_once() -> Any:
    """Do the same for tests that Hypothesis calls many times with one fixture."""
    return _Fakes


class _Fakes:
    Cut = Cut
    Uvicorn = _Uvicorn
    FakeServer = FakeServer
    NUM_TOKENS = NUM_TOKENS
    sample = staticmethod(sample)
    chunk = staticmethod(chunk)
    records = staticmethod(records)
    answer_generate = staticmethod(answer_generate)
    answer_rollouts = staticmethod(answer_rollouts)
    answer_frames = staticmethod(answer_frames)
    score = staticmethod(score)
    scores = staticmethod(scores)
    score_chunk = staticmethod(score_chunk)
    score_line = staticmethod(to_record)
    answer_scores = staticmethod(answer_scores)
    answer_score_frames = staticmethod(answer_score_frames)
    framed_samples = staticmethod(framed_samples)
    framed = staticmethod(framed)


@asynccontextmanager
async def hung_server() -> AsyncIterator[str]:
    """A server that accepts connections and never answers anything."""
    connections: list[Any] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await asyncio.gather(*connections)
