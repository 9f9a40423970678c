"""Run `sglang.Engine` in this process, and request sets in every way.

    python -m tests.engine.offline_engine_script MODEL ANSWERS

The answers go into a JSON file, by name. An exception is written as its types and its message.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

SAMPLING = {"temperature": 1.0, "top_p": 0.8, "max_new_tokens": 12, "ignore_eos": True}
ASKED = {"top_logprobs_p": 0.8}
BASE64 = {"return_logprobs_in_base64": True}
PROMPT = "The quick brown fox"
TRUTH = {"return_logprob": True, "top_logprobs_num": 512}
WHOLE = {**SAMPLING, "max_new_tokens": 250}


def main(model: str, answers: Path) -> None:
    import sglang

    # Frameworks import this before they create an engine, and so before SGLang loads its plugins.
    from sglang.srt.managers.io_struct import GenerateReqInput

    engine = sglang.Engine(
        model_path=model, dtype="float32", mem_fraction_static=0.2, max_total_tokens=16384, sleep_on_idle=True
    )
    found: dict[str, Any] = {}
    for name, ask in {**blocking(engine), **by_hand(engine, GenerateReqInput), **awaited(engine)}.items():
        try:
            found[name] = ask()
        except Exception as error:
            types = [cls.__name__ for cls in type(error).__mro__]
            found[name] = {"types": types, "words": str(error)}
    answers.write_text(json.dumps(found))
    engine.shutdown()


def blocking(engine: Any) -> dict[str, Callable[[], Any]]:
    """Request sets through `Engine.generate`."""

    def generate(**request: Any) -> Any:
        return engine.generate(**{"prompt": PROMPT, "sampling_params": SAMPLING, **TRUTH, **request})

    def in_custom_params(**fields: Any) -> Any:
        return generate(sampling_params={**SAMPLING, "custom_params": fields})

    three = {"prompt": [PROMPT, "without", "0123456789"]}
    whole = {"sampling_params": WHOLE, "top_logprobs_p": 1, "top_logprobs_num": 0, **BASE64}
    return {
        "list": lambda: generate(**ASKED),
        "base64": lambda: generate(**ASKED, **BASE64),
        "custom_params list": lambda: in_custom_params(**ASKED),
        "custom_params base64": lambda: in_custom_params(**ASKED, **BASE64),
        "input_ids": lambda: generate(prompt=None, input_ids=[65, 66, 67], **ASKED),
        "positional": lambda: engine.generate(PROMPT, SAMPLING, **TRUTH, **ASKED),
        "batch": lambda: generate(**three, top_logprobs_p=[0.9, None, 0.5], **BASE64),
        "n": lambda: generate(sampling_params={**SAMPLING, "n": 3}, **ASKED),
        "batch of n": lambda: generate(
            **three, sampling_params={**SAMPLING, "n": 2}, top_logprobs_p=[0.9, None, 0.5]
        ),
        "prompt": lambda: generate(logprob_start_len=0, **ASKED, **BASE64),
        "stream": lambda: list(generate(stream=True, **ASKED, **BASE64)),
        "not asked": generate,
        "asked for nothing": lambda: generate(top_logprobs_p=None, return_logprobs_in_base64=None),
        "too large": lambda: generate(top_logprobs_p=7),
        "of another length": lambda: generate(**three, top_logprobs_p=[0.9, 0.9]),
        "without return_logprob": lambda: generate(return_logprob=False, **ASKED),
        "custom_params too large": lambda: in_custom_params(top_logprobs_p=7),
        "another keyword": lambda: generate(top_logprobs=0.9),
        "over budget": lambda: generate(**whole),
        "stream over budget": lambda: list(generate(stream=True, **whole))[-1],
        "after all that": lambda: generate(**ASKED),
    }


def by_hand(engine: Any, request_class: type[Any]) -> dict[str, Callable[[], Any]]:
    """Send requests that a framework builds itself, without `Engine.generate`."""

    def send(obj: Any) -> Any:
        return engine.loop.run_until_complete(
            engine.tokenizer_manager.generate_request(obj, None).__anext__()
        )

    def request(**fields: Any) -> Any:
        ids: dict[str, Any] = {"rid": None, "input_ids": [65, 66, 67], "image_data": None}
        return request_class(**ids, sampling_params=dict(SAMPLING), **TRUTH, **fields)

    def with_attributes() -> Any:
        obj = request()
        obj.top_logprobs_p, obj.return_logprobs_in_base64 = 0.8, True
        return send(obj)

    return {
        "attributes of the request": with_attributes,
    }


def awaited(engine: Any) -> dict[str, Callable[[], Any]]:
    """Request sets through `Engine.async_generate`."""

    async def one(**fields: Any) -> Any:
        return await engine.async_generate(PROMPT, SAMPLING, **TRUTH, **fields)

    async def stream() -> Any:
        return [chunk async for chunk in await one(stream=True, **ASKED, **BASE64)]

    async def side_by_side() -> Any:
        asked: list[Awaitable[Any]] = [one(top_logprobs_p=p) for p in (0.9, None, 0.3)]
        return await asyncio.gather(*asked, one(), one(**ASKED, **BASE64))

    def run(ask: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: engine.loop.run_until_complete(ask())

    return {
        "async": run(lambda: one(**ASKED)),
        "async stream": run(stream),
        "async side by side": run(side_by_side),
        "async too large": run(lambda: one(top_logprobs_p=7)),
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    # The answers are written. SGLang's threads may crash an interpreter that shuts down normally.
    os._exit(0)
