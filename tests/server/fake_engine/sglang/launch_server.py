"""A fake SGLang that injects faults: its HTTP routes, and a command that starts it.

Tests run it in a thread. If this folder is first on the path, `sglang-topp serve` starts it as its engine
(`python -m sglang.launch_server`). The request (`sampling_params["fault"]`) or the command line chooses the
fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import uvicorn

from sglang_topp.formats import encode_top_p

NUM_TOKENS = 3
SET_SIZE = 4
# The plugin's error for a prompt whose sets would come from two weight versions.
PUSHED = {
    "type": "abort",
    "message": "weights were pushed while the prompt was scored; send the request again",
    "status_code": 503,
    "err_type": "WeightsChanged",
}
# The faults of a score request, by the last token of its sequence.
FAULTS = {500: "hang", 501: "no-sets", 502: "wrong-sets", 503: "give-up", 504: "large", 505: "pushed"}


class FakeEngine:
    """The routes that the sidecar uses. Attributes may be changed while it serves."""

    def __init__(self) -> None:
        self.patch: dict[str, Any] | None = {
            "version": "0.1.0",
            "active": True,
            "seams": {"a": "holds"},
            "model": {"vocab_size": 512, "context_length": 4096, "max_token_chars": 8},
            "sanitizes_logits": True,
        }
        self.model_path = "fake-model"
        self.model_info_path, self.weight_version = "/model_info", "7"
        self.text: str | None = None
        self.health = 200
        self.api_key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.probes: list[dict[str, Any]] = []
        self.authorizations: set[str | None] = set()
        self.headers: dict[str, dict[str, str]] = {}
        self.aborted: list[str] = []
        self.hung_up: list[str] = []
        self.running = 0
        self.is_released = False

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve as an ASGI app."""
        if scope["type"] != "http":
            return
        authorization = dict(scope["headers"]).get(b"authorization")
        self.authorizations.add(authorization and authorization.decode())
        path = scope["path"]
        if path == "/health":
            return await _answer(send, self.health, None)
        if self.api_key is not None and authorization != b"Bearer " + self.api_key.encode():
            return await _answer(send, 401, {"error": "Unauthorized"})
        if path in ("/server_info", "/get_server_info"):
            info = {"model_path": self.model_path, "version": "0.5.23", "weight_version": "at the start"}
            return await _answer(
                send, 200, info if self.patch is None else {**info, "sglang_topp": self.patch}
            )
        if path == self.model_info_path:
            return await _answer(send, 200, {"weight_version": self.weight_version})
        if path == "/model_info":
            return await _answer(send, 404, {"detail": "Not Found"})
        if path == "/info":  # a sidecar's route: clients ask for it to tell a sidecar from an engine
            return await _answer(send, 404, {"detail": "Not Found"})
        body = await _read(receive)
        if path == "/abort_request":
            self.aborted.append("all" if body.get("abort_all") else body["rid"])
            return await _answer(send, 200, None)
        if path == "/tokenize":
            ids = list("".join(message["content"] for message in body["messages"]).encode())
            return await _answer(send, 200, {"tokens": ids, "count": len(ids), "max_model_len": 4096})
        assert path == "/generate", path
        self.headers[body["rid"]] = {name.decode(): value.decode() for name, value in scope["headers"]}
        (self.probes if body["rid"].startswith("sglang-topp-probe") else self.bodies).append(body)
        self.running += 1
        work = asyncio.ensure_future(self._generate(body, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.hung_up.append(body["rid"])
                work.cancel()
            else:
                work.result()
        finally:
            gone.cancel()
            self.running -= 1

    async def _generate(self, body: dict[str, Any], send: Any) -> None:
        params = body["sampling_params"]
        fault = params.get("fault", "")
        if fault == "refuse":
            message = "the engine's own words: top_k must be positive"
            return await _answer(send, 400, {"error": {"message": message, "code": 400}})
        if fault == "fail":
            return await _answer(send, 500, {"error": {"message": "the engine's own words: CUDA error"}})
        if fault == "late":
            error = {"type": "RequestTimeoutError", "message": "the engine's own words: too late"}
            return await _answer(send, 504, {"error": error})
        if fault == "full":
            return await _answer(send, 429, {"error": {"message": "the queue is full"}}, {"retry-after": "7"})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if "logprob_start_len" in body:
            await self._score(body, send)
            return
        if fault == "exit":
            os._exit(9)
        if fault == "cut":
            await _event(send, self._chunk(body, 0, None, 1))
            raise ConnectionAbortedError("cut off on purpose")
        for index in range(params["n"]):
            if fault == "hang" or (fault == "hang-second" and index == 1):
                await _event(send, self._chunk(body, index, None, 1))
                while not self.is_released:
                    await asyncio.sleep(0.01)
            if fault == "pushed":
                await _event(send, self._chunk(body, index, PUSHED, 0))
                continue
            if fault == "give-up":
                await _event(send, self._chunk(body, index, {"type": "abort", "message": "by hand"}, 0))
                continue
            await _event(send, self._chunk(body, index, {"type": "length"}, NUM_TOKENS))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _score(self, body: dict[str, Any], send: Any) -> None:
        """The sequence's last token chooses the fault."""
        ids = body.get("input_ids") or list(body["text"].encode())
        fault = FAULTS.get(ids[-1])
        while fault == "hang" and not self.is_released:
            await asyncio.sleep(0.01)
        size = 1 << 16 if fault == "large" else SET_SIZE
        mass = np.linspace(0.4, 0.1, size, dtype=np.float32)
        row = np.log(mass / max(mass.sum(), np.float32(1)))
        start = body["logprob_start_len"]
        finish = {"give-up": {"type": "abort", "message": "by hand"}, "pushed": PUSHED}.get(
            fault, {"type": "length"}
        )
        scored = ids[start + 1 :]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "cached_tokens": 1,
            "weight_version": "7",
            "input_token_logprobs": [
                *([None, token, None] for token in ids[start : start + 1]),
                *([float(row[0]), token, None] for token in scored),
            ],
            "output_token_logprobs": [],
        }
        if "top_logprobs_p" in body and fault != "no-sets":
            sets = [np.array([token, *range(1000, 999 + size)], np.int32) for token in scored]
            if fault == "wrong-sets":
                sets[0][0] = 99
            flat = np.concatenate(sets or [np.empty(0, np.int32)])
            meta |= encode_top_p("input", flat, np.tile(row, len(scored)), [-1] + [size] * len(scored))
        await _event(send, {"text": "", "output_ids": [], "prompt_token_ids": ids, "meta_info": meta})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _chunk(self, body: dict[str, Any], index: int, finish: Any, tokens: int) -> dict[str, Any]:
        """Return one event. The sampled token is the most likely of `SET_SIZE` candidates."""
        params = body["sampling_params"]
        size = params.get("set_size", SET_SIZE)
        tokens *= params.get("repeat", 1)
        sampled = [10 + index + t % 5 for t in range(tokens)]
        prompt = body.get("input_ids") or list(body["text"].encode())
        mass = np.linspace(0.4, 0.1, size, dtype=np.float32)
        row = np.log(mass / max(mass.sum(), np.float32(1)))
        meta: dict[str, Any] = {
            "id": f"{body['rid']}_{index}" if params["n"] > 1 else body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": tokens,
            "cached_tokens": 1,
            "weight_version": "7",
            "e2e_latency": 0.25,
            "output_token_logprobs": [[float(row[0]), token, None] for token in sampled],
        }
        if "resumed_tokens" in body:
            meta["resumed_tokens"] = body["resumed_tokens"]
        if "top_logprobs_source" in body:
            meta["top_logprobs_source"] = body["top_logprobs_source"]
        if {"top_logprobs_p", "top_logprobs_source"} & body.keys() and params.get("fault") != "no-sets":
            ids = np.concatenate([np.array([s, *range(100, 99 + size)], np.int32) for s in sampled] or [[]])
            if params.get("fault") == "wrong-sets":
                ids[0] = 99
            meta |= encode_top_p("output", ids.astype(np.int32), np.tile(row, tokens), [size] * tokens)
        chunk: dict[str, Any] = {
            "index": index,
            "text": "x" * tokens if self.text is None else self.text,
            "output_ids": sampled,
            "meta_info": meta,
        }
        if "text" in body:
            chunk["prompt_token_ids"] = prompt
        return chunk


async def _read(receive: Any) -> dict[str, Any]:
    raw, more = b"", True
    while more:
        message = await receive()
        raw += message.get("body", b"")
        more = message.get("more_body", False)
    return dict(json.loads(raw))


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Any, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": b"" if body is None else json.dumps(body).encode()})


async def _event(send: Any, chunk: Any) -> None:
    line = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": line, "more_body": True})


def main() -> None:
    """Run the fake engine like `serve` starts it, with two children for the scheduler and the detokenizer.

    One child is in its own session. All three process ids go to a file.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--api-key")
    parser.add_argument("--fake-pids")
    parser.add_argument("--fake-log-arguments", action="store_true", help="as SGLang does when it starts")
    parser.add_argument("--fake-exit", type=int, help="end at once, with this status")
    parser.add_argument("--fake-unpatched", action="store_true")
    parser.add_argument("--fake-starting", action="store_true", help="answer, and never be ready")
    parser.add_argument("--fake-silent", action="store_true", help="accept connections, and never answer")
    parser.add_argument("--fake-stubborn", action="store_true", help="pass over SIGTERM")
    args = parser.parse_args()
    print("the engine's own words", file=sys.stderr, flush=True)
    if args.fake_log_arguments:
        logging.basicConfig(force=True)
        logging.getLogger(__name__).warning("the engine's arguments: %s", sys.argv)
    if args.fake_exit is not None:
        sys.exit(args.fake_exit)
    stubborn = signal.SIG_IGN if args.fake_stubborn else signal.SIG_DFL
    signal.signal(signal.SIGTERM, stubborn)
    if args.fake_pids:
        nap = [sys.executable, "-c", "import time; time.sleep(600)"]
        children = [subprocess.Popen(nap), subprocess.Popen(nap, start_new_session=True)]
        temporary = f"{args.fake_pids}.part"
        with open(temporary, "w") as file:
            print(os.getpid(), *(child.pid for child in children), file=file)
        os.replace(temporary, args.fake_pids)

    if args.fake_silent:
        with socket.create_server((args.host, args.port)):
            time.sleep(600)
    engine = FakeEngine()
    engine.api_key = args.api_key
    if args.fake_unpatched:
        engine.patch = None
    if args.fake_starting:
        engine.health = 503
    config = uvicorn.Config(
        engine.app, host=args.host, port=args.port, log_level="error", lifespan="off", interface="asgi3"
    )
    server = uvicorn.Server(config)
    if args.fake_stubborn:
        server.capture_signals = contextlib.nullcontext
    server.run()
    if args.fake_stubborn:
        time.sleep(600)


if __name__ == "__main__":
    main()
