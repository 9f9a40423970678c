"""A decode server's question to a prefill server, over SGLang's own bootstrap server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from sglang_topp_patches import disaggregation
from sglang_topp_patches.budget import is_refused
from sglang_topp_patches.handover import First, Kept
from sglang_topp_patches.payload import KEY, Entry, span
from sglang_topp_patches.received import Received
from sglang_topp_patches.releases import Feature
from tests.engine.running import free_port
from tests.features import skip_without

skip_without(Feature.DISAGGREGATION)

TOKEN, LOGPROB = 3, np.float32(-0.25)
OBJ = SimpleNamespace(
    bootstrap_host="127.0.0.1",
    bootstrap_port=0,
    bootstrap_room=11,
    top_logprobs_p=0.9,
    text=None,
    input_ids=[1, 2],
    logprob_start_len=-1,
    sampling_params={"temperature": 0.7, "max_new_tokens": 8},
)
ASKED = disaggregation.asked_for(OBJ)
FIRST = First(
    TOKEN,
    ASKED,
    Entry(span(np.array([TOKEN, 9], np.int32), np.array([LOGPROB, -2], np.float32)), weight_version="7"),
    (None, span(np.array([4], np.int32), np.array([-1], np.float32))),
)


class Server(CommonKVBootstrapServer):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's, with the hook in place."""

    def _setup_routes(self) -> None:
        super()._setup_routes()
        disaggregation.add_route(None, self)


@pytest.fixture(autouse=True)
def decode_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "_role", "decode")
    monkeypatch.setattr(disaggregation, "_loop", None)
    monkeypatch.setattr(disaggregation, "_kept", Kept())
    monkeypatch.setattr(disaggregation, "_QUESTION_S", 0.5)
    monkeypatch.setattr(disaggregation, "_RETRY_S", 0.05)
    monkeypatch.setattr(disaggregation, "_LATE_S", 1.0)


def run(cls: type[Any], port: int) -> Any:
    server = cls("127.0.0.1", port)
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            return server
        except httpx.TransportError:
            continue


def stop(server: Any) -> None:
    for task in list(getattr(server, "_background_tasks", ())):  # which SGLang 0.5.19 and later leave running
        server._loop.call_soon_threadsafe(task.cancel)
    server.close()


@pytest.fixture
def port() -> Iterator[int]:
    port = free_port()
    server = run(Server, port)
    yield port
    stop(server)


def state(port: int, logprob: float = float(LOGPROB)) -> SimpleNamespace:
    obj = SimpleNamespace(**{**vars(OBJ), "bootstrap_port": port})
    return SimpleNamespace(obj=obj, output_token_logprobs_val=[logprob], input_token_logprobs_val=[])


def decoded(token_id: int) -> Received:
    """As far as a decode server has it: two tokens, of which it drew the second."""
    received = Received(1)
    received.add(
        [token_id, 5], [Entry(None, handed_over=True), Entry(FIRST.prompt[1], weight_version="7")], []
    )
    assert received.lacks_first
    return received


async def asked(of: SimpleNamespace, token_id: int = TOKEN) -> Received:
    received = decoded(token_id)
    async with disaggregation.asking(of.obj) as question:
        await disaggregation.take(question, of, received)
    assert not received.lacks_first
    return received


def keep(first: First = FIRST) -> None:
    disaggregation._loop = asyncio.get_running_loop()
    disaggregation._kept.put(11, first)


async def test_the_answer_joins_what_was_drawn_here(port: int) -> None:
    keep()
    received = await asked(state(port))
    assert received.check(None) == ""
    assert received.generated == [FIRST.entry.candidates, FIRST.prompt[1]]
    assert received.prompt == list(FIRST.prompt)
    assert received.versions.meta_info(2)["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    assert len(disaggregation._kept) == 0


async def test_a_question_may_come_first(port: int) -> None:
    """Before any request has ended there; and so early that it is put again."""
    asking = asyncio.create_task(asked(state(port)))
    await asyncio.sleep(0.2)
    disaggregation._loop = asyncio.get_running_loop()
    await asyncio.sleep(0.6)
    keep()
    assert (await asking).check(None) == ""


async def test_a_server_that_comes_late_is_asked_again() -> None:
    port = free_port()
    asking = asyncio.create_task(asked(state(port)))
    await asyncio.sleep(0.2)
    server = run(Server, port)
    keep()
    assert (await asking).check(None) == ""
    stop(server)


@pytest.mark.parametrize(
    ("first", "token_id", "logprob", "words"),
    [
        (FIRST, 4, float(LOGPROB), "that of token 3, and the answer begins with token 4"),
        (FIRST, TOKEN, -0.26, "of log-prob -0.26"),
        (First(9, ASKED, FIRST.entry), TOKEN, float(LOGPROB), "that of token 9"),
        (
            replace(FIRST, asked={**ASKED, "top_logprobs_p": "0.5", "prompt": "x"}),
            TOKEN,
            float(LOGPROB),
            "asked with other prompt, top_logprobs_p; both",
        ),
        (First(TOKEN, ASKED, Entry(None, "it broke")), TOKEN, float(LOGPROB), "it broke"),
    ],
    ids=["token", "log-prob", "another drawn", "another rule", "problem"],
)
async def test_a_set_of_another_token_is_an_error(
    port: int, first: First, token_id: int, logprob: float, words: str
) -> None:
    keep(first)
    received = await asked(state(port, logprob), token_id)
    assert words in received.check(None)
    assert received.status == 500


async def test_a_refusal_keeps_its_status(port: int) -> None:
    keep(First(TOKEN, ASKED, Entry(None, "too much", 413)))
    received = await asked(state(port))
    assert (received.check(None), received.status) == ("too much", 413)


async def test_a_server_that_has_none_is_an_error(port: int) -> None:
    received = await asked(state(port))
    assert "sent none within 1 s" in received.check(None)


async def test_a_server_without_the_patch_set_is_an_error() -> None:
    port = free_port()
    server = run(CommonKVBootstrapServer, port)
    received = await asked(state(port))
    assert "answered 404; sglang-topp has to be installed there too" in received.check(None)
    stop(server)


def test_questions_that_make_no_sense_are_refused(port: int) -> None:
    for body in (
        b"",
        b"[]",
        b"{}",
        b'{"room": "1", "asked": {}}',
        b'{"room": true, "asked": {}}',
        b"[" * 10**5,
    ):
        answer = httpx.post(f"http://127.0.0.1:{port}{disaggregation.PATH}", content=body)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"top_logprobs_p": 0.5}, "top_logprobs_p"),
        ({"top_logprobs_p": None, "top_logprobs_source": "sampler"}, "top_logprobs_source"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [2, 1]}, "prompt"),
        ({"input_ids": None, "text": "x"}, "prompt"),
        ({"sampling_params": {"temperature": 0.7, "top_p": 0.3}}, "sampling_params"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"temperature": 0.7, "custom_params": {"of": "others"}}}, "sampling_params"),
        ({"sampling_params": {"temperature": 0.7, "max_new_tokens": 1}}, None),
    ],
)
def test_what_is_asked_for_differs_where_the_sets_may(change: dict[str, Any], name: str | None) -> None:
    other = disaggregation.asked_for(SimpleNamespace(**{**vars(OBJ), **change}))
    assert (other == ASKED) is (name is None)
    assert name is None or other[name] != ASKED[name]


def test_a_field_of_ours_is_compared_once() -> None:
    """The patch set leaves a copy of it where the scheduler finds it."""
    given = [
        {**vars(OBJ), "top_logprobs_p": p, "sampling_params": {"custom_params": {"top_logprobs_p": p}}}
        for p in (0.5, 0.9)
    ]
    one, other = (disaggregation.asked_for(SimpleNamespace(**each)) for each in given)
    assert [name for name in one if one[name] != other[name]] == ["top_logprobs_p"]


async def test_only_a_decode_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("null", "prefill"):
        monkeypatch.setattr(disaggregation, "_role", role)
        async with disaggregation.asking(SimpleNamespace()) as question:
            assert question is None


async def test_only_a_prefill_server_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    received = Received(1)
    received.add([TOKEN], [FIRST.entry], [span(*(np.zeros(1, t) for t in (np.int32, np.float32)))] * 2)
    of = state(0)
    for role, problem, expected in [
        ("decode", "", None),
        ("null", "", None),
        ("prefill", "", First(TOKEN, ASKED, FIRST.entry, tuple(received.prompt))),
        ("prefill", "it broke", First(TOKEN, ASKED, Entry(None, "it broke"))),
    ]:
        monkeypatch.setattr(disaggregation, "_role", role)
        disaggregation.keep(of, received, problem)
        assert await disaggregation._kept.take(11, ASKED, 0) == expected
    of.obj.bootstrap_room = None
    disaggregation.keep(of, received, "")
    disaggregation.keep(state(0), Received(1), "")
    assert len(disaggregation._kept) == 0


def test_the_scheduler_says_where_the_first_set_is() -> None:
    def request(**changes: Any) -> SimpleNamespace:
        custom = SimpleNamespace(custom_params={"top_logprobs_p": 0.9})
        given = {"return_logprob": True, "sampling_params": custom, "customized_info": None}
        return SimpleNamespace(**{**given, "output_ids": [3], **changes})

    def noted(req: SimpleNamespace, is_rebootstrap: bool = False) -> Any:
        decode_req = SimpleNamespace(req=req, is_rebootstrap=is_rebootstrap)
        disaggregation.note_first_token(None, None, decode_req)
        return (req.customized_info or {}).get(KEY)

    assert noted(request()) == [Entry(None, handed_over=True)]
    assert noted(request(sampling_params=SimpleNamespace(custom_params=None))) is None
    assert noted(request(return_logprob=False)) is None
    # Aborted: no token came.
    assert not noted(request(output_ids=[]))
    # Retracted, and back with its last token.
    entries = [None, Entry(FIRST.entry.candidates)]
    back = request(output_ids=[3, 5], customized_info={KEY: list(entries)})
    assert noted(back, is_rebootstrap=True) == entries
    (entry,) = noted(request(), is_rebootstrap=True)
    assert "without log-probs" in entry.problem
    refused = request(sglang_topp_refused=True)
    assert is_refused(refused)
    assert noted(refused) is None
