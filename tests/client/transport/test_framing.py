"""Frames arrive whole, however the network splits them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import errors
from sglang_topp_client.transport.http import frame_head, frames


async def arriving(chunks):
    for chunk in chunks:
        yield chunk


async def read(chunks, max_bytes=1 << 30):
    return [frame async for frame in frames(arriving(chunks), max_bytes)]


def framed(frame):
    return frame_head(len(frame)) + frame


def test_a_length_is_eight_bytes_little_endian():
    assert frame_head(0x0102) == bytes([2, 1, 0, 0, 0, 0, 0, 0])


@given(
    st.lists(st.binary(max_size=30), max_size=6),
    st.lists(st.integers(0, 250), max_size=8),
)
async def test_frames_come_as_they_were_however_they_are_cut(sent, cuts):
    raw = b"".join(map(framed, sent))
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    chunks = [raw[start:stop] for start, stop in pairwise(places)]
    assert await read(chunks) == sent


async def test_every_cut_off_is_noticed():
    raw = framed(b"first") + framed(b"\n")
    for stop in range(1, len(raw)):
        if stop in (13, len(raw)):
            continue
        with pytest.raises(errors.TransportError, match="in the middle of a frame: "):
            await read([raw[:stop]])
    assert await read([raw[:13]]) == [b"first"]


async def test_the_limit_applies_to_one_frame():
    assert await read([framed(b"x" * 10) * 3], max_bytes=10) == [b"x" * 10] * 3
    with pytest.raises(errors.WireError, match="max_message_bytes: got 11 bytes"):
        await read([framed(b"x" * 11)], max_bytes=10)
