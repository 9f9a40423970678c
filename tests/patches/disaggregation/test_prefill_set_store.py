"""Sets that wait for a decode server: complete, delivered once, and dropped after a time limit."""

from __future__ import annotations

import asyncio
import gc
import json

import numpy as np
import pytest

from sglang_topp.errors import WireError
from sglang_topp_patches.disaggregation.prefill_set_store import FirstToken, PrefillSets
from sglang_topp_patches.memory.budget import InFlight
from sglang_topp_patches.scheduler_messages import Entry, PackedSet, pack_set

ASKED = {"top_logprobs_p": "0.9", "prompt": "abc"}


@pytest.fixture(autouse=True)
def flight() -> InFlight:
    return InFlight(100)


def of_size(size: int) -> PackedSet:
    return pack_set(np.arange(size, dtype=np.int32), np.linspace(-1, -9, size, dtype=np.float32))


def first(token_id: int = 1, size: int = 10) -> FirstToken:
    return FirstToken(token_id, ASKED, Entry(of_size(size), weight_version="7"))


@pytest.mark.parametrize(
    "value",
    [
        FirstToken(
            5, ASKED, Entry(of_size(3), weight_version="7"), (None, of_size(2), of_size(0), of_size(4))
        ),
        FirstToken(5, ASKED, Entry(of_size(151_936))),
        FirstToken(5, ASKED, Entry(None, "it broke")),
        FirstToken(5, ASKED, Entry(None, "too much", 413)),
    ],
    ids=["prompt", "vocabulary", "problem", "refusal"],
)
def test_what_is_read_is_what_was_written(value: FirstToken) -> None:
    assert FirstToken.from_bytes(value.to_bytes()) == value


def test_what_is_not_whole_is_an_error() -> None:
    body = first().to_bytes()
    line, _, arrays = body.partition(b"\n")
    other = json.dumps({**json.loads(line), "version": "0.0.1"}).encode()
    for broken, words in [
        (body[:-1], "79 bytes of arrays, expected 80"),
        (body + b"x", "81 bytes"),
        (b"<html>", "expected a line of JSON"),
        (b"{}\n", "expected a line of JSON"),
        (b"[1]\n", "expected a line of JSON"),
        (other + b"\n" + arrays, "has sglang-topp 0.0.1"),
    ]:
        with pytest.raises(WireError, match=words):
            FirstToken.from_bytes(broken)


async def test_it_is_handed_out_once_whoever_comes_first(flight: InFlight) -> None:
    kept = PrefillSets(flight)
    kept.put(7, first())
    assert flight.total == 10
    assert await kept.take(7, ASKED, 1) == first()
    assert await kept.take(7, ASKED, 0.01) is None
    asking = asyncio.create_task(kept.take(8, ASKED, 10))
    await asyncio.sleep(0)
    kept.put(7, first())
    kept.put(8, first(2))
    assert await asking == first(2)
    assert len(kept) == 1
    assert flight.total == 10


async def test_a_question_that_is_put_again_gets_the_answer() -> None:
    """The connection of the previous question may be cut."""
    kept = PrefillSets(flight)
    cut = asyncio.create_task(kept.take(7, ASKED, 0.05))
    await asyncio.sleep(0)
    again = asyncio.create_task(kept.take(7, ASKED, 10))
    await asyncio.sleep(0)
    assert await cut is None
    kept.put(7, first())
    assert await again == first()


async def test_who_asks_for_something_else_takes_nothing(flight: InFlight) -> None:
    """A mismatch is reported before the set arrives, while another question waits, and afterwards."""
    kept = PrefillSets(flight)
    stranger = {"top_logprobs_p": "0.5"}
    before, real, after = (
        asyncio.create_task(kept.take(7, asked, 10)) for asked in (stranger, ASKED, stranger)
    )
    await asyncio.sleep(0)
    kept.put(7, first())
    assert await real == first()
    assert await before == await after == ("prompt", "top_logprobs_p")
    kept.put(7, first(2))
    assert await kept.take(7, {**ASKED, "more": ""}, 1) == ("more",)
    assert await kept.take(7, ASKED, 1) == first(2)
    assert flight.total == 0


async def test_what_nobody_asks_for_goes(flight: InFlight) -> None:
    kept = PrefillSets(flight, kept_s=0.05)
    loop = asyncio.get_running_loop()
    now, has_passed = loop.time(), loop.create_future()
    # Timers run in the order of their times, even if all of them run late.
    loop.call_at(now + 0.03, kept.put, 7, first(2))
    loop.call_at(now + 0.06, has_passed.set_result, None)
    kept.put(7, first(1))
    await has_passed
    assert await kept.take(7, ASKED, 0.01) == first(2)  # its own time limit has not passed
    kept.put(7, first(3))
    await asyncio.sleep(0.08)
    assert len(kept) == 0
    assert flight.total == 0


async def test_a_room_whose_request_asks_for_no_sets(flight: InFlight) -> None:
    """Open questions, and those after the request has ended, are answered at once.

    A later request for sets in the same room has its own set.
    """
    kept = PrefillSets(flight, kept_s=0.05)
    before = asyncio.create_task(kept.take(7, ASKED, 10))
    await asyncio.sleep(0)
    kept.note_request_without_sets(7)
    assert await before == await kept.take(7, ASKED, 10) == ("top_logprobs_p",)
    asking = asyncio.create_task(kept.wait_for_question(7, 10))
    await asyncio.sleep(0)
    later = asyncio.create_task(kept.take(7, ASKED, 10))
    assert await asking
    kept.put(7, first())
    assert await later == first()
    kept.note_request_without_sets(8)
    await asyncio.sleep(0.08)
    assert await kept.take(8, ASKED, 0.01) is None


async def test_what_does_not_fit_says_so(flight: InFlight) -> None:
    kept = PrefillSets(flight)
    kept.put(7, FirstToken(1, ASKED, Entry(of_size(10)), (None, of_size(50))))
    kept.put(8, first(2, 45))
    refused = await kept.take(7, ASKED, 1)
    assert refused is not None
    assert refused.entry.status == 429
    assert "105 candidates" in refused.entry.problem
    assert refused.prompt == ()
    gc.collect()
    assert flight.total == 45
