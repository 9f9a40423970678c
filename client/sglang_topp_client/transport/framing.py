"""Message framing: split the byte stream of an answer into messages, which are lines or frames.

Lines end with a line feed (NDJSON, server-sent events). Frames may hold any bytes. Each frame begins with its
length, a little-endian uint64.

The buffer for a frame grows only as the frame's bytes arrive, so a huge length prefix alone costs no memory.
If a message is longer than `max_bytes`, `lines` and `frames` raise an error before the whole message has
arrived.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from sglang_topp.errors import TransportError, WireError

__all__ = ["frame_head", "frames", "lines", "whole"]

_HEAD_BYTES = 8


def frame_head(num_bytes: int) -> bytes:
    """Return the length prefix of a frame that holds `num_bytes` bytes."""
    return num_bytes.to_bytes(_HEAD_BYTES, "little")


async def lines(body: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer as they arrive, without their line ends.

    Raises:
        WireError: a line is longer than `max_bytes`; the rest of the answer is not read.
        TransportError: the answer ends in the middle of a line.
    """
    # Collect a line in one large buffer, and not in a list of chunks. malloc returns the memory of a large
    # buffer to the OS as soon as the buffer is freed.
    pending = bytearray()
    async for data in body:
        *ends, rest = data.split(b"\n")
        for end in ends:
            _check_length(len(pending) + len(end), max_bytes)
            pending += end
            line = bytes(pending).rstrip(b"\r")
            # A line may be hundreds of MB long. To save memory, this loop frees the buffer `pending`
            # before the caller decodes the line, and frees `line` before the next line is read.
            pending = bytearray()
            yield line
            del line
        _check_length(len(pending) + len(rest), max_bytes)
        pending += rest
    if pending:
        raise TransportError(f"the answer was cut off in the middle of a line: {bytes(pending[:200])!r}")


async def frames(body: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the frames of an answer as they arrive, without their length prefixes.

    Raises:
        WireError: a frame is longer than `max_bytes`; the frame is not read.
        TransportError: the answer ends in the middle of a frame.
    """
    pending, length = bytearray(), None
    async for data in body:
        rest = memoryview(data)
        while rest or length == 0:
            num_missing = (_HEAD_BYTES if length is None else length) - len(pending)
            pending += rest[:num_missing]
            rest = rest[num_missing:]
            if len(pending) < (_HEAD_BYTES if length is None else length):
                break
            if length is None:
                length = int.from_bytes(pending, "little")
                _check_length(length, max_bytes)
                pending = bytearray()
                continue
            frame = bytes(pending)
            pending, length = bytearray(), None
            yield frame
            del frame
    if pending or length is not None:
        of = "its length" if length is None else f"{length} bytes"
        raise TransportError(f"the answer was cut off in the middle of a frame: {len(pending)} bytes of {of}")


async def whole(body: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """Return the whole answer as bytes.

    Raises:
        WireError: the answer is longer than `max_bytes`.
    """
    parts: list[bytes] = []
    size = 0
    async for data in body:
        size += len(data)
        _check_length(size, max_bytes)
        parts.append(data)
    return b"".join(parts)


def _check_length(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise WireError(
            "max_message_bytes",
            f"got {size} bytes of one message of the answer (one sample) so far, expected at most"
            f" {max_bytes}; if samples are that long, increase the client's max_message_bytes",
        )
