"""Messages: an answer, cut into what is of use once it is whole.

Lines end with a line feed (NDJSON, server-sent events). Frames may hold any bytes: each begins with its
length, a little-endian uint64.

Nothing is decompressed, nothing is allocated because a length was named, and what is longer than the limit is
an error before it has come.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from sglang_topp.errors import TransportError, WireError
from sglang_topp_client.turns import LONG_BYTES, Turns

__all__ = ["frame_head", "frames", "lines", "whole"]

_HEAD_BYTES = 8


def frame_head(num_bytes: int) -> bytes:
    """What stands before a frame of so many bytes."""
    return num_bytes.to_bytes(_HEAD_BYTES, "little")


async def lines(response: httpx.Response, turns: Turns, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The lines of an answer as they come, without their line ends.

    Raises:
        WireError: a line is longer than `max_bytes`; it is not kept until it ends.
        TransportError: the answer ends within a line.
    """
    # One buffer, not a list of what came: large ones go back to the system at once, small ones stay.
    pending = bytearray()
    is_long = has_turn = False
    try:
        async for data in _raw(response):
            if is_long:
                turns.step()
            *ends, rest = data.split(b"\n")
            for end in ends:
                _check_length(len(pending) + len(end), max_bytes)
                pending += end
                line = bytes(pending).rstrip(b"\r")
                # Not held twice while the caller reads it, nor once it has.
                pending = bytearray()
                yield line
                del line
                if has_turn:
                    turns.give_back()
                is_long = has_turn = False
            _check_length(len(pending) + len(rest), max_bytes)
            pending += rest
            if len(pending) > LONG_BYTES and not is_long:
                is_long, has_turn = True, await turns.take()
    finally:
        if has_turn:
            turns.give_back()
    if pending:
        raise TransportError(f"the answer was cut off in the middle of a line: {bytes(pending[:200])!r}")


async def frames(response: httpx.Response, turns: Turns, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The frames of an answer as they come, without their lengths.

    Raises:
        WireError: a frame's length is more than `max_bytes`; none of it is read.
        TransportError: the answer ends within a frame.
    """
    pending, wanted = bytearray(), None
    is_long = has_turn = False
    try:
        async for data in _raw(response):
            if is_long:
                turns.step()
            rest = memoryview(data)
            while rest or wanted == 0:
                missing = (_HEAD_BYTES if wanted is None else wanted) - len(pending)
                pending += rest[:missing]
                rest = rest[missing:]
                if len(pending) < (_HEAD_BYTES if wanted is None else wanted):
                    break
                if wanted is None:
                    wanted = int.from_bytes(pending, "little")
                    _check_length(wanted, max_bytes)
                    pending = bytearray()
                    continue
                frame = bytes(pending)
                pending, wanted = bytearray(), None
                yield frame
                del frame
                if has_turn:
                    turns.give_back()
                is_long = has_turn = False
            if len(pending) > LONG_BYTES and not is_long:
                is_long, has_turn = True, await turns.take()
    finally:
        if has_turn:
            turns.give_back()
    if pending or wanted is not None:
        of = "its length" if wanted is None else f"{wanted} bytes"
        raise TransportError(f"the answer was cut off in the middle of a frame: {len(pending)} bytes of {of}")


async def whole(response: httpx.Response, max_bytes: int) -> bytes:
    """The whole answer.

    Raises:
        WireError: it is longer than `max_bytes`.
    """
    parts: list[bytes] = []
    size = 0
    async for data in _raw(response):
        size += len(data)
        _check_length(size, max_bytes)
        parts.append(data)
    return b"".join(parts)


def _raw(response: httpx.Response) -> AsyncIterator[bytes]:
    """The answer as it comes. Never decompressed: none was asked for, and a few bytes may become any
    number."""
    if (coding := response.headers.get("Content-Encoding", "identity")).lower() != "identity":
        raise WireError("Content-Encoding", f"got {coding!r}, though the request forbids any")
    return response.aiter_raw()


def _check_length(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise WireError(
            "max_line_bytes",
            f"got {size} bytes of one message of the answer (one sample) so far, expected at most"
            f" {max_bytes}; where samples are that long, give the client a higher max_line_bytes",
        )
