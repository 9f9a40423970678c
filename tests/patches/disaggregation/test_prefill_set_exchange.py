"""A decode server fetches the first token's set from a prefill server, over SGLang's own bootstrap server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import HTTPException
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from sglang_topp_patches.compat.releases import Feature
from sglang_topp_patches.disaggregation import fetch_prefill_sets, serve_prefill_sets
from sglang_topp_patches.disaggregation.input_comparison import differing_names, first_token_inputs
from sglang_topp_patches.disaggregation.prefill_set_store import PATH, FirstToken
from sglang_topp_patches.disaggregation.serve_prefill_sets import PrefillServer
from sglang_topp_patches.http.response_accumulator import ResponseAccumulator
from sglang_topp_patches.http_exception import CallEndedError
from sglang_topp_patches.memory.budget import InFlight
from sglang_topp_patches.request import NOTHING, SetsRequest
from sglang_topp_patches.scheduler.request_budget import is_refused
from sglang_topp_patches.scheduler_messages import KEY, Entry, pack_set
from tests.engine.start_servers import free_port
from tests.skip_missing_features import skip_without

skip_without(Feature.DISAGGREGATION)

TOKEN, LOGPROB = 3, np.float32(-0.25)
OBJ = SimpleNamespace(
    bootstrap_host="127.0.0.1",
    bootstrap_port=0,
    bootstrap_room=11,
    sglang_topp_request=SetsRequest(threshold=0.9),
    text=None,
    input_ids=[1, 2],
    logprob_start_len=-1,
    sampling_params={"temperature": 0.7, "max_new_tokens": 8},
)
INPUTS = first_token_inputs(OBJ)
FIRST = FirstToken(
    TOKEN,
    INPUTS,
    Entry(pack_set(np.array([TOKEN, 9], np.int32), np.array([LOGPROB, -2], np.float32)), weight_version="7"),
    (None, pack_set(np.array([4], np.int32), np.array([-1], np.float32))),
)


DECODE, PREFILL = (
    SimpleNamespace(disaggregation_mode=mode, disaggregation_bootstrap_port=0)
    for mode in ("decode", "prefill")
)
PREFILL_MANAGER = SimpleNamespace(server_args=PREFILL)


@pytest.fixture
def prefill() -> PrefillServer:
    return PrefillServer(InFlight(1 << 20))


def server_class(prefill: PrefillServer) -> type[Any]:
    """Return SGLang's bootstrap server class, with the hook in place."""

    class Server(CommonKVBootstrapServer):
        def _setup_routes(self) -> None:
            super()._setup_routes()
            prefill.add_route(None, self)

    return Server


@pytest.fixture(autouse=True)
def quick_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make both servers repeat their questions and answers soon."""
    monkeypatch.setattr(serve_prefill_sets, "_QUESTION_S", 0.5)
    for module in (serve_prefill_sets, fetch_prefill_sets):
        monkeypatch.setattr(module, "_RETRY_S", 0.05)


def run(cls: type[Any], port: int) -> Any:
    server = cls("127.0.0.1", port)
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
            return server
        except httpx.TransportError:
            continue


def stop(server: Any) -> None:
    for task in list(getattr(server, "_background_tasks", ())):  # which SGLang 0.5.19 and later leave running
        server._loop.call_soon_threadsafe(task.cancel)
    server.close()


@pytest.fixture
def port(prefill: PrefillServer) -> Iterator[int]:
    port = free_port()
    server = run(server_class(prefill), port)
    yield port
    stop(server)


def state(port: int, logprob: float = float(LOGPROB)) -> SimpleNamespace:
    obj = SimpleNamespace(**{**vars(OBJ), "bootstrap_port": port})
    return SimpleNamespace(obj=obj, output_token_logprobs_val=[logprob], input_token_logprobs_val=[])


def decoded(token_id: int) -> ResponseAccumulator:
    """Return a request's state on a decode server: two tokens, of which it drew the second."""
    received = ResponseAccumulator(1)
    received.add(
        [token_id, 5], [Entry(None, handed_over=True), Entry(FIRST.prompt[1], weight_version="7")], []
    )
    assert received.lacks_first
    return received


async def asked(of: SimpleNamespace, token_id: int = TOKEN) -> ResponseAccumulator:
    received = decoded(token_id)
    async with fetch_prefill_sets.open_question(DECODE, of.obj) as question:
        received.add_first_token(await fetch_prefill_sets.fetch_first_token(question, of, token_id))
    assert not received.lacks_first
    return received


def keep(prefill: PrefillServer, first: FirstToken = FIRST) -> None:
    prefill._loop = asyncio.get_running_loop()
    prefill.sets.put(11, first)


async def test_the_answer_joins_what_was_drawn_here(prefill: PrefillServer, port: int) -> None:
    keep(prefill)
    received = await asked(state(port))
    assert received.check(None) == ""
    assert received.generated == [FIRST.entry.candidates, FIRST.prompt[1]]
    assert received.prompt == list(FIRST.prompt)
    assert received.weight_spans.meta_info(2)["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    assert len(prefill.sets) == 0


async def test_a_question_may_come_first(prefill: PrefillServer, port: int) -> None:
    """The decode server asks before the request has ended, and so early that it repeats the question."""
    asking = asyncio.create_task(asked(state(port)))
    await asyncio.sleep(0.2)
    prefill._loop = asyncio.get_running_loop()
    await asyncio.sleep(0.6)
    keep(prefill)
    assert (await asking).check(None) == ""


async def test_a_server_that_comes_late_is_asked_again(prefill: PrefillServer) -> None:
    port = free_port()
    asking = asyncio.create_task(asked(state(port)))
    await asyncio.sleep(0.2)
    server = run(server_class(prefill), port)
    keep(prefill)
    assert (await asking).check(None) == ""
    stop(server)


@pytest.mark.parametrize(
    ("first", "token_id", "logprob", "words"),
    [
        (FIRST, 4, float(LOGPROB), "the set of token 3, and the answer begins with token 4"),
        (FIRST, TOKEN, -0.26, "of log-prob -0.26"),
        (FirstToken(9, INPUTS, FIRST.entry), TOKEN, float(LOGPROB), "the set of token 9"),
        (
            replace(FIRST, inputs={**INPUTS, "top_logprobs_p": "0.5", "prompt": "x"}),
            TOKEN,
            float(LOGPROB),
            "asked with other prompt, top_logprobs_p; both",
        ),
        (FirstToken(TOKEN, INPUTS, Entry(None, "it broke")), TOKEN, float(LOGPROB), "it broke"),
    ],
    ids=["token", "log-prob", "another drawn", "another rule", "problem"],
)
async def test_a_set_of_another_token_is_an_error(
    prefill: PrefillServer, port: int, first: FirstToken, token_id: int, logprob: float, words: str
) -> None:
    keep(prefill, first)
    received = await asked(state(port, logprob), token_id)
    assert words in received.check(None)
    assert received.status == 500


async def test_a_refusal_keeps_its_status(prefill: PrefillServer, port: int) -> None:
    keep(prefill, FirstToken(TOKEN, INPUTS, Entry(None, "too much", 413)))
    received = await asked(state(port))
    assert (received.check(None), received.status) == ("too much", 413)


async def test_a_server_that_has_none_is_an_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_prefill_sets, "_LATE_S", 1.0)
    received = await asked(state(port))
    assert "sent no set within 1 s" in received.check(None)


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
        b'{"room": "1", "inputs": {}}',
        b'{"room": true, "inputs": {}}',
        b"[" * 10**5,
    ):
        answer = httpx.post(f"http://127.0.0.1:{port}{PATH}", content=body)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sglang_topp_request": SetsRequest(threshold=0.5)}, "top_logprobs_p"),
        ({"sglang_topp_request": SetsRequest(is_from_sampler=True)}, "top_logprobs_source"),
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
    other = first_token_inputs(SimpleNamespace(**{**vars(OBJ), **change}))
    assert (other == INPUTS) is (name is None)
    assert name is None or other[name] != INPUTS[name]


def test_a_request_without_sets_differs_in_what_it_asks_for_alone() -> None:
    """Custom parameters that held the plugin's fields alone are left out, or None on the OpenAI routes."""
    sampling = {**OBJ.sampling_params, "custom_params": None}
    other = {**vars(OBJ), "sampling_params": sampling, "sglang_topp_request": NOTHING}
    assert differing_names(INPUTS, first_token_inputs(SimpleNamespace(**other))) == ("top_logprobs_p",)


async def test_only_a_decode_server_asks(prefill: PrefillServer) -> None:
    for mode in ("null", "prefill"):
        args = SimpleNamespace(disaggregation_mode=mode)
        async with fetch_prefill_sets.open_question(args, SimpleNamespace()) as question:
            assert question is None


async def test_only_a_prefill_server_keeps(prefill: PrefillServer) -> None:
    received = ResponseAccumulator(1)
    received.add([TOKEN], [FIRST.entry], [pack_set(*(np.zeros(1, t) for t in (np.int32, np.float32)))] * 2)
    obj = state(0).obj
    for mode, problem, expected in [
        ("decode", "", None),
        ("null", "", None),
        ("prefill", "", FirstToken(TOKEN, INPUTS, FIRST.entry, tuple(received.prompt))),
        ("prefill", "it broke", FirstToken(TOKEN, INPUTS, Entry(None, "it broke"))),
    ]:
        args = SimpleNamespace(disaggregation_mode=mode)
        prefill.keep(args, obj, received.first_token_id, partial(received.first_entry, problem))
        assert await prefill.sets.take(11, INPUTS, 0) == expected
    prefill.keep(PREFILL, obj, None, partial(ResponseAccumulator(1).first_entry, ""))
    obj.bootstrap_room = None
    prefill.keep(PREFILL, obj, TOKEN, partial(received.first_entry, ""))
    assert len(prefill.sets) == 0


async def tokenize(prefill: PrefillServer, **change: Any) -> Any:
    """Receive a request."""

    async def original(self: Any, obj: Any) -> str:
        return "tokenized"

    obj = SimpleNamespace(**{**vars(OBJ), **change})
    return await prefill.await_decode_server(original, PREFILL_MANAGER, obj)


async def test_a_prefill_server_waits_for_the_question(prefill: PrefillServer, port: int) -> None:
    taking_in = asyncio.create_task(tokenize(prefill))
    await asyncio.sleep(0.2)
    assert not taking_in.done()
    asking = asyncio.create_task(fetch_prefill_sets._ask(DECODE, state(port).obj))
    assert await taking_in == "tokenized"
    # The decode server has already asked.
    assert await tokenize(prefill) == "tokenized"
    keep(prefill)
    assert await asking == FIRST


async def test_a_decode_server_that_does_not_ask_is_an_error(
    prefill: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode server would answer without sets. SGLang before 0.5.17 answers a ValueError with 400."""
    monkeypatch.setattr(serve_prefill_sets, "_SKEW_S", 1.0)
    for error, stream in ((HTTPException, False), (CallEndedError, True)):
        with pytest.raises(error) as caught:
            await tokenize(prefill, stream=stream)
        assert "top_logprobs_p: no decode server asked" in str(caught.value)
        assert caught.value.status_code == 503
    for change in ({"sglang_topp_request": NOTHING}, {"bootstrap_room": None}):
        assert await tokenize(prefill, **change) == "tokenized"


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_prefill_server_that_was_not_asked_for_sets_says_so_at_once(
    prefill: PrefillServer, monkeypatch: pytest.MonkeyPatch, port: int, is_first: bool
) -> None:
    prefill._loop = asyncio.get_running_loop()
    monkeypatch.setattr(serve_prefill_sets, "_QUESTION_S", 60.0)
    if is_first:
        await tokenize(prefill, sglang_topp_request=NOTHING)
    asking = asyncio.create_task(fetch_prefill_sets._ask(DECODE, state(port).obj))
    if not is_first:
        await asyncio.sleep(0.2)
        await tokenize(prefill, sglang_topp_request=NOTHING)
    async with asyncio.timeout(30):
        first = await asking
    assert "was asked with other top_logprobs_p; both need the same" in first.entry.problem


async def test_a_batch_is_waited_for_prompt_by_prompt(prefill: PrefillServer, port: int) -> None:
    class Batch:
        def __getitem__(self, i: int) -> SimpleNamespace:
            return SimpleNamespace(**{**vars(OBJ), "bootstrap_room": 20 + i})

    async def original(self: Any, batch_size: int, obj: Any) -> list[str]:
        return ["tokenized"] * batch_size

    asking = []
    waiting = asyncio.create_task(prefill.await_decode_servers(original, PREFILL_MANAGER, 2, Batch()))
    for room in (20, 21):
        await asyncio.sleep(0.2)
        assert not waiting.done()
        obj = SimpleNamespace(**{**vars(state(port).obj), "bootstrap_room": room})
        asking.append(asyncio.create_task(fetch_prefill_sets._ask(DECODE, obj)))
    assert await waiting == ["tokenized"] * 2
    for each in asking:
        each.cancel()


def test_the_scheduler_says_where_the_first_set_is() -> None:
    def request(**changes: Any) -> SimpleNamespace:
        wanted = SetsRequest(threshold=0.9)
        given = {"return_logprob": True, "sglang_topp_request": wanted, "customized_info": None}
        return SimpleNamespace(**{**given, "output_ids": [3], **changes})

    def noted(req: SimpleNamespace, is_rebootstrap: bool = False) -> Any:
        decode_req = SimpleNamespace(req=req, is_rebootstrap=is_rebootstrap)
        fetch_prefill_sets.note_first_token(None, None, decode_req)
        return (req.customized_info or {}).get(KEY)

    assert noted(request()) == [Entry(None, handed_over=True)]
    assert noted(request(sglang_topp_request=NOTHING)) is None
    assert noted(request(return_logprob=False)) is None
    # The request was aborted before its first token.
    assert not noted(request(output_ids=[]))
    # The request was retracted, and returns with its last token.
    entries = [None, Entry(FIRST.entry.candidates)]
    back = request(output_ids=[3, 5], customized_info={KEY: list(entries)})
    assert noted(back, is_rebootstrap=True) == entries
    (entry,) = noted(request(), is_rebootstrap=True)
    assert "without log-probs" in entry.problem
    refused = request(sglang_topp_refused=True)
    assert is_refused(refused)
    assert noted(refused) is None
