"""A fake engine for benchmarks: it answers like a patched SGLang, with candidate sets, but runs no model.

The fake engine builds each answer once and sends the answer many times, so that a benchmark measures only the
client or sidecar in front of the engine.

    python -m benchmarks.harness.fake_engine [--token-s SECONDS] [--max-running N]

The command listens on a free loopback port and prints its address. `--token-s` sets the time per generated
token. `--max-running` sets how many samples run at once; the other samples wait in a queue.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sglang_topp.formats import encode_top_p

__all__ = ["MEAN_SET", "VOCAB", "run_fake_engine"]

VOCAB = 151_936
MEAN_SET = 8
_RID = re.compile(rb'"rid":"([^"]*)"')
_PROMPT = re.compile(rb'"input_ids":\[([^]]*)')
_TOKENS = re.compile(rb'"max_new_tokens":(\d+)')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ID, _NUM_PROMPT = "its-request-id", 987_654_321
_GAPS = re.compile(rf"{_ID}|{_NUM_PROMPT}".encode())
_INFO = {
    "model_path": "fake-model",
    "version": "0.5.23",
    "weight_version": "1",
    "sglang_topp": {
        "version": "0.1.0",
        "active": True,
        "seams": {},
        "model": {"vocab_size": VOCAB, "context_length": 1 << 20, "max_token_chars": 8},
        "sanitizes_logits": True,
    },
}


@contextmanager
def run_fake_engine(*, token_s: float = 0.0, max_running: int = 1 << 20) -> Iterator[str]:
    """Run a fake engine in a new process and yield its URL."""
    options = ["--token-s", str(token_s), "--max-running", str(max_running)]
    command = [sys.executable, "-m", "benchmarks.harness.fake_engine", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


@functools.cache
def _answer(tokens: int) -> tuple[list[bytes], list[bytes]]:
    """Return a sample's two server-sent events: one for the first token, and one for the finished sample.

    Each event is a list of five byte strings: the prefix `data: `, three parts of a JSON text, and the end of
    the event. To complete an event, the caller inserts the request id between the first and the second part,
    and the prompt length between the second and the third part. Then the caller joins all seven strings.
    """
    first, whole = (_GAPS.split(json.dumps(_chunk(tokens, count)).encode()) for count in (1, tokens))
    return [b"data: ", *first, b"\n\n"], [b"data: ", *whole, b"\n\ndata: [DONE]\n\n"]


def _chunk(tokens: int, count: int) -> dict[str, Any]:
    rng = np.random.default_rng(tokens)
    sizes = rng.poisson(MEAN_SET - 1, tokens) + 1
    ids = np.concatenate([rng.choice(VOCAB, size, replace=False) for size in sizes]).astype(np.int32)
    logprobs = np.concatenate([_row(rng, size) for size in sizes])
    starts = np.cumsum(sizes) - sizes
    sampled, of_sampled = ids[starts].tolist(), logprobs[starts].tolist()
    end = int(sizes[:count].sum())
    meta_info = {
        "id": _ID,
        "finish_reason": {"type": "length", "length": tokens} if count == tokens else None,
        "prompt_tokens": _NUM_PROMPT,
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": "1",
        "e2e_latency": 1.0,
        "output_token_logprobs": [
            [logprob, token, None] for logprob, token in zip(of_sampled[:count], sampled[:count], strict=True)
        ],
        **encode_top_p("output", ids[:end], logprobs[:end], sizes[:count].tolist()),
    }
    return {"text": "x" * count, "output_ids": sampled[:count], "meta_info": meta_info}


def _row(rng: np.random.Generator, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    mass = np.sort(rng.dirichlet(np.ones(size)))[::-1] * 0.96
    return np.log(np.maximum(mass, 1e-9)).astype(np.float32)


class _Pace:
    """A queue of simulated samples: at most `max_running` run at once, at `token_s` seconds per token."""

    def __init__(self, token_s: float, max_running: int) -> None:
        self._token_s = token_s
        self._free = max_running
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def run(self, tokens: int, then: Callable[[], None]) -> None:
        """Queue a sample of the length `tokens`, and call `then` when the sample is finished."""
        self._waiting.append((tokens, then))
        self._start()

    def _start(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            tokens, then = self._waiting.popleft()
            asyncio.get_running_loop().call_later(tokens * self._token_s, self._end, then)

    def _end(self, then: Callable[[], None]) -> None:
        then()
        self._free += 1
        self._start()


class _Connection(asyncio.Protocol):
    """The fake engine's side of one HTTP connection.

    The class supports only the part of HTTP that sglang-topp's client and sidecar use.
    """

    def __init__(self, pace: _Pace) -> None:
        self._pace = pace
        self._received = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end])
            length = _LENGTH.search(head)
            stop = end + 4 + (int(length[1]) if length else 0)
            if len(self._received) < stop:
                return
            body = bytes(self._received[end + 4 : stop])
            del self._received[:stop]
            self._take(head.split(b" ", 2)[1], body)

    def _take(self, path: bytes, body: bytes) -> None:
        if path != b"/generate":
            known = path in (b"/server_info", b"/health", b"/abort_request")
            answer = json.dumps(_INFO).encode() if path == b"/server_info" else b"null"
            self._start(b"200 OK" if known else b"404 Not Found", b"application/json", len(answer))
            self._transport.write(answer)
            return
        rid, asked, prompt = _RID.search(body), _TOKENS.search(body), _PROMPT.search(body)
        assert rid is not None
        assert asked is not None
        assert prompt is not None
        tokens = int(asked[1])
        num_prompt = b"%d" % (prompt[1].count(b",") + 1)
        first, whole = (
            b"".join([start, a, rid[1], b, num_prompt, c, end]) for start, a, b, c, end in _answer(tokens)
        )
        self._start(b"200 OK", b"text/event-stream", len(first) * (tokens > 1) + len(whole))
        if tokens > 1:  # a sample of one token is a single server-sent event
            self._transport.write(first)
        self._pace.run(tokens, lambda: self._transport.write(whole))

    def _start(self, status: bytes, media_type: bytes, length: int) -> None:
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, media_type, length)
        )


async def _serve(pace: _Pace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(pace), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    _parser.add_argument("--token-s", type=float, default=0.0)
    _parser.add_argument("--max-running", type=int, default=1 << 20)
    _args = _parser.parse_args()
    asyncio.run(_serve(_Pace(_args.token_s, _args.max_running)))
