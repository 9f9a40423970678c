"""`return_prompt_token_ids` on a release that lacks the field."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from sglang_topp_patches.http import prompt_token_ids_0_5_12
from sglang_topp_patches.request import SetsRequest, attach

CHUNKS = [{"text": "a"}, {"text": "ab"}]


def manager(**asks: bool | None) -> SimpleNamespace:
    """Return a manager with one request's state per name. None stands for a request without the field."""
    states = {}
    for rid, asked in asks.items():
        obj = SimpleNamespace(rid=rid)
        if asked is not None:
            attach(obj, SetsRequest(returns_prompt_ids=asked))
        states[rid] = SimpleNamespace(obj=obj)
    return SimpleNamespace(rid_to_state=states)


async def chunks_of() -> AsyncGenerator[dict[str, Any], None]:
    for chunk in CHUNKS:
        yield dict(chunk)


async def answer(self: SimpleNamespace, rid: str) -> list[dict[str, Any]]:
    obj = self.rid_to_state[rid].obj
    return [out async for out in prompt_token_ids_0_5_12.write(chunks_of(), self, obj, None)]


async def test_each_chunk_of_who_asked_has_them() -> None:
    requests = manager(one=True, other=False, embedding=None, unsent=True)
    for rid in ("one", "other", "embedding"):
        prompt_token_ids_0_5_12.note(requests, SimpleNamespace(rid=rid, input_ids=range(3)))
    assert await answer(requests, "one") == [{**chunk, "prompt_token_ids": [0, 1, 2]} for chunk in CHUNKS]
    for rid in ("other", "embedding", "unsent"):
        assert await answer(requests, rid) == CHUNKS


async def test_prompts_that_are_sent_together_have_their_own() -> None:
    requests = manager(one=True, two=True)
    together = [SimpleNamespace(rid="one", input_ids=[1]), SimpleNamespace(rid="two", input_ids=[2, 3])]
    prompt_token_ids_0_5_12.note_batch(requests, together)
    assert (await answer(requests, "one"))[-1]["prompt_token_ids"] == [1]
    assert (await answer(requests, "two"))[-1]["prompt_token_ids"] == [2, 3]


async def test_an_answer_that_nobody_reads_on_is_closed() -> None:
    closed = []

    async def watched() -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {}
            yield {}
        finally:
            closed.append(True)

    requests = manager(one=True)
    prompt_token_ids_0_5_12.note(requests, SimpleNamespace(rid="one", input_ids=[1]))
    reading = prompt_token_ids_0_5_12.write(watched(), requests, requests.rid_to_state["one"].obj, None)
    assert await anext(reading) == {"prompt_token_ids": [1]}
    await reading.aclose()
    assert closed
