"""Record exact rollouts of unmodified agents: serve them `/v1/chat/completions`, in front of the client.

An agent needs two settings: its OpenAI base URL is this server, and its API key is the name of its episode.
Each call becomes a turn of a rollout, with the token ids that the engine sampled, never tokenized again. A
call continues a rollout if the messages do, and if the chat template shows what the model wrote. Any other
call begins a rollout, so no token is trained twice, and none in a context that the model did not see.

    sglang-topp serve --model-path MODEL -- --tool-call-parser qwen --reasoning-parser qwen3
    python examples/agent_capture.py --url http://127.0.0.1:30000    # an agent of three calls
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sglang_topp.batch import collate_rollouts
from sglang_topp.errors import BadRequestError, InvalidInputError, SglangToppError
from sglang_topp_client import AsyncRolloutClient, Rollout

# A request's fields: the chat template reads some, the sampler others, under SGLang's names.
TEMPLATE_FIELDS = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
SAMPLING_FIELDS = {"temperature": "temperature", "top_p": "top_p", "stop": "stop"} | dict.fromkeys(
    ("max_tokens", "max_completion_tokens"), "max_new_tokens"
)
IGNORED_FIELDS = ("model", "stream", "stream_options", "user", "metadata", "store")
# These may have one value. Penalties and grammars look at the whole answer, so no later turn could have them.
FIXED_FIELDS: dict[str, Any] = {"n": 1, "logprobs": False, "parallel_tool_calls": True}
FIXED_FIELDS |= {"presence_penalty": 0, "frequency_penalty": 0, "response_format": {"type": "text"}}


class Turn(NamedTuple):
    """The last turn of a rollout: the conversation's messages up to the model's answer, and the rollout."""

    messages: list[dict[str, Any]]
    rollout: Rollout


class AgentCapture:
    """Serves agents, and keeps the rollouts of each episode until `finish` takes them.

    Args:
        engine_url: the address of a patched SGLang, whose chat template and parsers are used.
        sampling: SGLang's sampling parameters, where a request has none.

    Attributes:
        app: the FastAPI application.
    """

    def __init__(self, engine_url: str, sampling: Mapping[str, Any]) -> None:
        self._client = AsyncRolloutClient(engine_url, kind="sglang")
        self._engine = httpx.AsyncClient(base_url=engine_url, timeout=60)
        # As many tokens as fit; and no stop strings: `resume` would use those of the turn before.
        self._sampling = {"max_new_tokens": None, "stop": None, **sampling}
        self._turns: dict[str, list[Turn]] = defaultdict(list)
        self._info = httpx.get(f"{engine_url}/server_info", timeout=60).raise_for_status().json()
        self.app = FastAPI(lifespan=self._open)
        self.app.add_api_route("/v1/chat/completions", self._serve, methods=["POST"])
        self.app.add_exception_handler(SglangToppError, _as_response)

    def finish(self, episode: str) -> list[Rollout]:
        """Return the episode's rollouts, and forget them. Each answered call's tokens are in one rollout."""
        return [turn.rollout for turn in self._turns.pop(episode, [])]

    @asynccontextmanager
    async def _open(self, _: FastAPI) -> AsyncIterator[None]:
        async with self._client, self._engine:
            yield

    async def _serve(self, request: Request) -> Response:
        body = {name: value for name, value in (await request.json()).items() if value is not None}
        for name, value in body.items():
            if name not in (*TEMPLATE_FIELDS, *SAMPLING_FIELDS, *IGNORED_FIELDS, *FIXED_FIELDS):
                raise HTTPException(400, f"{name}: not supported")
            if name in FIXED_FIELDS and value != FIXED_FIELDS[name]:
                raise HTTPException(400, f"{name}: got {value!r}, expected {FIXED_FIELDS[name]!r}")
        if body.get("tool_choice", "auto") not in ("auto", "none"):
            raise HTTPException(400, f"tool_choice: got {body['tool_choice']!r}, expected 'auto' or 'none'")
        episode = request.headers.get("Authorization", "").removeprefix("Bearer ")
        answer = asyncio.create_task(self._answer(self._turns[episode], body))
        disconnect = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait([answer, disconnect], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():  # the agent left, so the engine aborts, and no rollout holds it
                return Response(status_code=499)
            completion = answer.result()
        finally:
            answer.cancel()
            disconnect.cancel()
        if body.get("stream"):
            return StreamingResponse(_as_chunks(completion, body), media_type="text/event-stream")
        return JSONResponse(completion)

    async def _answer(self, turns: list[Turn], body: dict[str, Any]) -> dict[str, Any]:
        """Generate a turn, record it in `turns`, and return it as a chat completion."""
        template = {name: body[name] for name in TEMPLATE_FIELDS if name in body}
        rendered = (await self._ask("/tokenize", **template))["tokens"]
        given = {known: body[name] for name, known in SAMPLING_FIELDS.items() if name in body}
        sampling = {**self._sampling, **given}
        tools = body.get("tools", []) if body.get("tool_choice") != "none" else []
        sampling["skip_special_tokens"] = not tools  # as in SGLang's route: the parser reads them
        messages = [_comparable(message) for message in body["messages"]]

        turn, extended = await self._take(turns, messages, rendered, sampling)
        try:
            if extended is None:
                (rollout,) = await self._client.generate(
                    [rendered], sampling, top_logprobs_source="sampler", on_abort="resume"
                )
            else:
                (rollout,) = await self._client.resume([extended], sampling, on_abort="resume")
            message = await self._parse(rollout.text, tools)
        except BaseException:
            if turn is not None:
                turns.append(turn)  # another call may continue it
            raise
        turns.append(Turn([*messages, _comparable(message)], rollout))
        called = "tool_calls" in message and rollout.finish_reason == "stop"
        reason = "tool_calls" if called else rollout.finish_reason
        num_before = len(rollout.prompt_ids) + rollout.turn_start
        total = len(rollout.prompt_ids) + len(rollout.output_ids)
        usage = {"prompt_tokens": num_before, "completion_tokens": total - num_before, "total_tokens": total}
        return {
            "id": f"chatcmpl-{rollout.request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", ""),
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": usage,
        }

    async def _take(
        self, turns: list[Turn], messages: list[Any], rendered: list[int], sampling: Mapping[str, Any]
    ) -> tuple[Turn, Rollout] | tuple[None, None]:
        """Remove the turn that the messages continue from `turns`, and return it and its extended rollout.

        Without it, the second of two calls that continue a turn begins a rollout.
        """
        for turn in sorted(turns, key=lambda turn: -len(turn.messages)):
            count, before = len(turn.messages), turn.rollout.sampling_params or {}
            if messages[:count] == turn.messages and all(
                before.get(name) == sampling.get(name) for name in ("temperature", "top_p")
            ):
                extended = await self._continue(turn.rollout, rendered)
                if extended is not None and turn in turns:  # no other call took it meanwhile
                    turns.remove(turn)
                    return turn, extended
        return None, None

    async def _continue(self, rollout: Rollout, rendered: list[int]) -> Rollout | None:
        """Extend the rollout by what the chat template has after it, or return None.

        The template's ids for the model's own words may differ from those that were sampled, but its text may
        differ in white space alone: a parser may strip that. Anything else, such as reasoning that the
        template drops, makes a context in which the rollout's next tokens were not drawn.
        """
        if (extended := rollout.continue_with(rendered)) is not None:
            return extended
        known = [*rollout.prompt_ids.tolist(), *rollout.output_ids.tolist()]
        # The last token ended the turn. The template has it as often: what comes after it is new.
        ends = [i for i, token in enumerate(rendered, 1) if token == known[-1]]
        if len(ends) < (count := known.count(known[-1])):
            return None
        old, new = known, rendered[: ends[count - 1]]
        texts = (await self._ask("/detokenize", tokens=[old, new], skip_special_tokens=False))["text"]
        if "".join(texts[0].split()) != "".join(texts[1].split()):
            return None
        return rollout.continue_with(known + rendered[len(new) :])

    async def _parse(self, text: str, tools: list[Any]) -> dict[str, Any]:
        """Return the model's answer as a message, parsed by the engine's own parsers."""
        message: dict[str, Any] = {"role": "assistant"}
        if parser := self._info.get("reasoning_parser"):
            parsed = await self._ask("/separate_reasoning", text=text, reasoning_parser=parser)
            text = parsed["text"] or ""
            if parsed["reasoning_text"]:
                message["reasoning_content"] = parsed["reasoning_text"]
        if tools and (parser := self._info.get("tool_call_parser")):
            parsed = await self._ask("/parse_function_call", text=text, tools=tools, tool_call_parser=parser)
            text = parsed["normal_text"]
            functions = [{"name": call["name"], "arguments": call["parameters"]} for call in parsed["calls"]]
            if functions:
                message["tool_calls"] = [
                    {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
                    for function in functions
                ]
        return {**message, "content": text}

    async def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self._engine.post(path, json=body)
        if answer.is_error:
            raise HTTPException(answer.status_code, answer.text)
        parsed: dict[str, Any] = answer.json()
        return parsed


def _comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what agents add or leave out when they send an answer back."""
    return {name: value for name, value in message.items() if value and name != "reasoning_content"}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _as_response(_: Request, error: Exception) -> JSONResponse:
    is_bad = isinstance(error, InvalidInputError | BadRequestError)
    return JSONResponse({"detail": str(error)}, 400 if is_bad else 503)


def _as_chunks(completion: dict[str, Any], body: Mapping[str, Any]) -> Iterator[str]:
    """Yield a completion as the events of a stream. The client returns whole turns, so each part is one."""
    (choice,) = completion["choices"]
    message = dict(choice["message"])
    calls = message.pop("tool_calls", [])
    deltas = [{"role": message.pop("role")}, *({name: text} for name, text in message.items())]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}])
    chunk = {**completion, "object": "chat.completion.chunk", "usage": None}
    events = [{**chunk, "choices": one} for one in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**chunk, "choices": [], "usage": completion["usage"]})
    for event in events:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


@contextmanager
def serve_app(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Serve `app` in a thread, and yield its address."""
    with socket.create_server(("127.0.0.1", port)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def run_agent(base_url: str, episode: str, num_turns: int) -> None:
    """Stand for any agent: it knows nothing of this project."""
    from openai import OpenAI

    messages: list[Any] = [{"role": "user", "content": "Tell me of a cat."}]
    with OpenAI(base_url=f"{base_url}/v1", api_key=episode) as client:
        for _ in range(num_turns):
            answer = client.chat.completions.create(model="default", messages=messages)
            content = answer.choices[0].message.content or ""
            print(f"user:      {messages[-1]['content']}\nassistant: {content}")
            messages.append(answer.choices[0].message)
            messages.append({"role": "user", "content": f"You wrote {len(content)} letters. Go on."})


def main() -> int:
    """Run an agent, and return exit status 0 if each of its calls is one turn of the episode's rollouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of a patched SGLang (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of the agent (%(default)s)")
    args = parser.parse_args()
    capture = AgentCapture(args.url, {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 128})
    with serve_app(capture.app) as base_url:
        run_agent(base_url, "episode-7", args.turns)
    rollouts = capture.finish("episode-7")
    batch = collate_rollouts(rollouts, rewards=[0.0] * len(rollouts), pad_token_id=0)  # put your rewards here
    num_generated, num_sets = int(batch["loss_mask"].sum()), int((batch["candidates"].sets.sizes > 0).sum())
    print(f"\n{args.turns} calls became {len(rollouts)} rollouts with {num_generated} generated tokens")
    return 0 if num_generated == num_sets > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
