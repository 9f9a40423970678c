"""Hostile callers, one function each: it sends its requests once, and counts wrong answers.

A right answer is a correct result, an error that names the field, or a closed connection. `hostile_load`
measures the effect on other callers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

from tests.soak.report import Report
from tests.soak.serve_process import Server

__all__ = ["ALL"]

_LIMIT_S = 120.0
_MILLION = 1_000_000


async def ids_outside_the_vocabulary(server: Server, report: Report) -> None:
    """Each of these requests once ended the scheduler, or would end it."""
    sets = {"return_logprob": True, "top_logprobs_p": 0.9}
    for route, body in (
        ("/rollouts", {"prompts": [_MILLION]}),
        ("/rollouts", {"prompts": [[3, 151_936]]}),
        ("/rollouts", {"prompts": "a", "sampling_params": {"stop_token_ids": [_MILLION, -5]}}),
        (
            "/rollouts",
            {"prompts": "a", "sampling_params": {"stop_token_ids": [_MILLION], "min_new_tokens": 2}},
        ),
        ("/generate", {"input_ids": [_MILLION], **sets}),
        ("/generate", {"text": "a", "token_ids_logprob": [_MILLION], **sets}),
        (
            "/generate",
            {"text": "a", "sampling_params": {"stop_token_ids": [_MILLION], "min_new_tokens": 2}, **sets},
        ),
    ):
        status, text = await _post(server, route, body, report)
        if status != 400:
            report.fault(f"{route} {body}: got {status} {text[:200]}, expected 400")
        elif str(_MILLION) not in text and "151936" not in text and "-5" not in text:
            report.fault(f"{route} {body}: the 400 names no id: {text[:200]}")


async def whole_vocabularies(server: Server, report: Report) -> None:
    """Send 64 requests at p = 1, with 1.2 MB per token."""
    sampling = {"max_new_tokens": 24, "ignore_eos": True}
    body = {"prompts": "a", "sampling_params": sampling, "top_logprobs_p": 1.0}
    straight = {
        "text": "a",
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_p": 1.0,
        "return_logprobs_in_base64": True,
    }
    answers = await asyncio.gather(
        *(_post(server, "/rollouts", body, report) for _ in range(32)),
        *(_post(server, "/generate", straight, report) for _ in range(32)),
    )
    for status, text in answers:
        _require_named(report, "p = 1", status, text)


async def streams_that_nobody_reads(server: Server, report: Report) -> None:
    """Request megabytes, and read no byte."""
    sampling = {"max_new_tokens": 48, "ignore_eos": True}
    body = {"prompts": "a", "sampling_params": sampling, "top_logprobs_p": 1.0, "stream": True}
    straight = {"text": "a", "sampling_params": sampling, "return_logprob": True, "top_logprobs_p": 1.0}
    await asyncio.gather(
        *(_send_and_sit(server.sidecar, "/rollouts", _json(body), 15) for _ in range(8)),
        _send_and_sit(server.engine, "/generate", _json({**straight, "stream": True}), 15),
    )


async def bodies_of_one_byte(server: Server, report: Report) -> None:
    """Send more requests than there are places."""
    await asyncio.gather(
        *(_send_and_sit(server.sidecar, "/rollouts", b"{", 10, claimed=1000) for _ in range(1030))
    )


async def large_bodies_that_stop_short(server: Server, report: Report) -> None:
    """Send 12 bodies of 63 MB without their last byte."""
    body = b" " * (63 * _MILLION)
    await asyncio.gather(
        *(_send_and_sit(server.sidecar, "/rollouts", body, 10, claimed=len(body) + 1) for _ in range(12))
    )


async def headers_without_an_end(server: Server, report: Report) -> None:
    """Open 300 connections that stop in the middle of a header."""

    async def one() -> None:
        with suppress(OSError):
            _, writer = await _connect(server.sidecar)
            writer.write(b"POST /rollouts HTTP/1.1\r\nHost: soak\r\nX-Unfinished: ")
            await asyncio.sleep(10)
            writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(300)))


async def long_texts(server: Server, report: Report) -> None:
    """Send long texts, which SGLang would tokenize on its event loop while all callers wait."""
    for body in (
        {"prompts": "x" * (8 * _MILLION)},
        {"prompts": "x", "sampling_params": {"stop": "y" * (60 * _MILLION)}},
        {"prompts": "x", "sampling_params": {"stop": ["y" * _MILLION] * 8}},
    ):
        status, text = await _post(server, "/rollouts", body, report)
        if status != 413:
            report.fault(f"a text of megabytes: got {status} {text[:200]}, expected 413")
        _require_named(report, "a text of megabytes", status, text)


ALL: tuple[Callable[[Server, Report], Awaitable[None]], ...] = (
    ids_outside_the_vocabulary,
    bodies_of_one_byte,
    large_bodies_that_stop_short,
    headers_without_an_end,
    streams_that_nobody_reads,
    long_texts,
    whole_vocabularies,
)
"""The mildest first: what ends the server ends the part."""


async def _post(server: Server, route: str, body: dict[str, Any], report: Report) -> tuple[int, str]:
    """Return the status and the beginning of the answer, or 0 and the reason without an answer."""
    report.requests += 1
    base_url = server.sidecar if route == "/rollouts" else server.engine
    try:
        async with httpx.AsyncClient(timeout=_LIMIT_S) as http:
            answer = await http.post(base_url + route, json=body)
    except httpx.HTTPError as error:
        return 0, f"{type(error).__name__}: {error}"
    return answer.status_code, answer.text[:2000]


def _require_named(report: Report, what: str, status: int, text: str) -> None:
    """Check that the request is answered, or ends with an error that names its reason."""
    if status != 200 and not (400 <= status < 600 and '"message"' in text):
        report.fault(f"{what}: got {status} {text[:200]}, expected an answer or an error with its reason")
    report.outcomes[f"{what}: {status or 'no answer'}"] += 1


async def _send_and_sit(
    url: str, route: str, body: bytes, seconds: float, *, claimed: int | None = None
) -> None:
    """Send a request, and neither read nor close for some time. The server may disconnect sooner."""
    with suppress(OSError, TimeoutError):
        _, writer = await _connect(url)
        head = f"POST {route} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {claimed or len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(seconds):
            await writer.drain()
        await asyncio.sleep(seconds)
        writer.transport.abort()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    # The reader's buffer is small, so that unread bytes stay at the server.
    return await asyncio.open_connection(host, int(port), limit=1 << 10)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
