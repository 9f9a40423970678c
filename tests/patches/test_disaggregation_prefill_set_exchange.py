"""A decode server fetches the first token's set from a prefill server, over SGLang's own bootstrap server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from sglang_topp_patches import disaggregation
from sglang_topp_patches.disaggregation import PATH, FirstToken, PrefillServer, first_token_inputs
from sglang_topp_patches.http.answer import Sample
from sglang_topp_patches.memory import InFlight
from sglang_topp_patches.releases import Feature
from sglang_topp_patches.request import NOTHING, SetsRequest
from sglang_topp_patches.scheduler.requests import is_refused
from sglang_topp_patches.set_buffer import KEY, PackedSet, Problem, SetBuffer
from tests.engine.start_servers import free_port
from tests.skip_missing_features import skip_without

skip_without(Feature.DISAGGREGATION)

TOKEN, LOGPROB, ROOM = 3, np.float32(-0.25), 11
OBJ = SimpleNamespace(
    bootstrap_host="127.0.0.1",
    bootstrap_port=0,
    bootstrap_room=ROOM,
    sglang_topp_request=SetsRequest(threshold=0.9),
    text=None,
    input_ids=[1, 2],
    logprob_start_len=-1,
    sampling_params={"temperature": 0.7, "max_new_tokens": 8},
)
INPUTS = first_token_inputs(OBJ)
SET = np.array([TOKEN, 9], np.int32).tobytes(), np.array([LOGPROB, -2], np.float32).tobytes()
OTHER = np.array([4], np.int32).tobytes(), np.array([-1], np.float32).tobytes()


def sets_of(*generated: PackedSet | None, problem: Problem | None = None) -> SetBuffer:
    buffer = SetBuffer()
    for each in generated:
        buffer.append(each, "7" if each else "")
    if problem is None:
        buffer.prompt.append(None)
        buffer.prompt.append(OTHER)
    buffer.problem = problem
    return buffer


FIRST = FirstToken(TOKEN, INPUTS, sets_of(SET))
DECODE = SimpleNamespace(disaggregation_mode="decode", disaggregation_bootstrap_port=0)


@pytest.fixture
def prefill() -> PrefillServer:
    server = PrefillServer(InFlight(1 << 20))
    server.manager = SimpleNamespace(rid_to_state={})
    return server


def server_class(prefill: PrefillServer) -> type[Any]:
    """Return SGLang's bootstrap server class, with the hook in place."""

    class Server(CommonKVBootstrapServer):
        def _setup_routes(self) -> None:
            super()._setup_routes()
            prefill.add_routes(None, self)

    return Server


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


async def asked(of: SimpleNamespace, token_id: int = TOKEN) -> Sample:
    """Return a request's state on a decode server: two tokens, of which it drew the second."""
    received = Sample(SetsRequest(threshold=0.9, is_base64=True))
    part = sets_of(None, OTHER)
    part.prompt.take(2)  # the prefill server has the prompt's sets, too
    received.add([token_id, 5], part)
    assert received.lacks_first
    received.add_first_token(await disaggregation.fetch_first_token(DECODE, of, token_id))
    assert not received.lacks_first
    return received


def keep(prefill: PrefillServer, first: FirstToken = FIRST, room: int | None = ROOM) -> None:
    """End a request on the prefill server."""
    obj = SimpleNamespace(**{**vars(OBJ), "bootstrap_room": room})
    prefill.keep(obj, first.token_id, first.sets)
    if room in prefill._kept:
        prefill._kept[room] = first, prefill._kept[room][1]


async def until_empty(prefill: PrefillServer) -> None:
    async with asyncio.timeout(30):
        while len(prefill._kept):
            await asyncio.sleep(0.01)


async def test_the_answer_joins_what_was_drawn_here(prefill: PrefillServer, port: int) -> None:
    keep(prefill)
    received = await asked(state(port))
    assert received.check(None) == ""
    assert received.sets.generated.sets() == [SET, OTHER]
    assert received.sets.prompt.sets() == [None, OTHER]
    assert received.sets.weight_versions(2)["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    await until_empty(prefill)
    assert prefill._in_flight.total == 0


async def test_an_answer_that_does_not_arrive_is_given_again(prefill: PrefillServer, port: int) -> None:
    """A connection may break after the prefill server has written the whole answer."""
    keep(prefill)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        path = f"{PATH}{ROOM}"
        for _ in range(2):
            first = FirstToken.from_bytes((await http.get(path)).content)
            assert (first.token_id, first.sets.generated.sets()) == (TOKEN, [SET])
        for _ in range(2):
            assert (await http.delete(path)).status_code == 204
        await until_empty(prefill)
        assert (await http.get(path)).status_code == 404


async def test_a_request_that_is_still_running_is_waited_for(prefill: PrefillServer, port: int) -> None:
    """Its first token may overtake its sets."""
    prefill.manager.rid_to_state["a"] = SimpleNamespace(obj=OBJ)
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"http://127.0.0.1:{port}{PATH}{ROOM}")
    assert (answer.status_code, answer.content) == (204, b"")
    asking = asyncio.create_task(asked(state(port)))
    await asyncio.sleep(0.1)
    keep(prefill)
    del prefill.manager.rid_to_state["a"]
    assert (await asking).check(None) == ""


async def test_a_server_that_comes_late_is_asked_again(
    prefill: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disaggregation, "_RETRY_S", 0.05)
    keep(prefill)
    port = free_port()
    asking = asyncio.create_task(asked(state(port)))
    await asyncio.sleep(0.2)
    server = await asyncio.to_thread(run, server_class(prefill), port)
    assert (await asking).check(None) == ""
    stop(server)


@pytest.mark.parametrize("manager", [None, SimpleNamespace(rid_to_state={})])
async def test_a_server_without_the_sets_says_so_at_once(
    prefill: PrefillServer, port: int, manager: Any
) -> None:
    """It was not asked for sets, or gave them up, or has another version of this package."""
    prefill.manager = manager
    received = await asked(state(port))
    # After `_LATE_S` of asking, the error would be another.
    assert "has none for this bootstrap room; was it asked for sets" in received.check(None)


@pytest.mark.parametrize(
    ("first", "token_id", "logprob", "words"),
    [
        (FIRST, 4, float(LOGPROB), "the set of token 3, and the answer begins with token 4"),
        (FIRST, TOKEN, -0.26, "of log-prob -0.26"),
        (FirstToken(9, INPUTS, FIRST.sets), TOKEN, float(LOGPROB), "the set of token 9"),
        (
            replace(FIRST, inputs={**INPUTS, "top_logprobs_p": "0.5", "prompt": "x"}),
            TOKEN,
            float(LOGPROB),
            "asked with other prompt, top_logprobs_p; both",
        ),
        (FirstToken(TOKEN, INPUTS, sets_of(problem=Problem("it broke"))), TOKEN, float(LOGPROB), "it broke"),
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
    keep(prefill, FirstToken(TOKEN, INPUTS, sets_of(problem=Problem("too much", 413))))
    received = await asked(state(port))
    assert (received.check(None), received.status) == ("too much", 413)


async def test_a_server_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "_LATE_S", 1.0)
    received = await asked(state(free_port()))
    assert "sent no set within 1 s: Cannot connect" in received.check(None)


async def test_a_server_without_the_plugin_is_an_error() -> None:
    port = free_port()
    server = await asyncio.to_thread(run, CommonKVBootstrapServer, port)
    received = await asked(state(port))
    assert "is sglang-topp installed there?" in received.check(None)
    stop(server)


def test_questions_that_make_no_sense_are_refused(port: int) -> None:
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, f"http://127.0.0.1:{port}{PATH}x")
        assert answer.status_code == 404


async def test_only_a_prefill_server_keeps(prefill: PrefillServer) -> None:
    """It keeps a room's last sets, and a copy, because the answer's own are freed."""
    obj = state(0).obj
    for _ in range(2):
        sets = sets_of(SET)
        prefill.keep(obj, TOKEN, sets)
        sets.generated.take(1)
        assert len(prefill._kept) == 1
    first, _ = prefill._kept[ROOM]
    assert (first.token_id, first.inputs) == (TOKEN, INPUTS)
    assert (first.sets.generated.sets(), first.sets.prompt.sets()) == ([SET], [None, OTHER])
    assert prefill._in_flight.total == 3
    for room, token_id in ((ROOM + 1, None), (None, TOKEN)):
        obj = SimpleNamespace(**{**vars(OBJ), "bootstrap_room": room})
        prefill.keep(obj, token_id, sets_of(SET))
    assert len(prefill._kept) == 1


async def test_what_nobody_asks_for_goes_and_leaves_nothing(
    prefill: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, tasks = threading.active_count(), len(asyncio.all_tasks())
    monkeypatch.setattr(disaggregation, "_KEPT_S", 0.0)
    for room in range(5):
        keep(prefill, room=room)
        await asyncio.sleep(0.001)
    assert list(prefill._kept) == [4]
    assert prefill._in_flight.total == FIRST.sets.num_held
    assert (threading.active_count(), len(asyncio.all_tasks())) == (threads, tasks)


def test_the_scheduler_says_where_the_first_set_is() -> None:
    def request(**changes: Any) -> SimpleNamespace:
        wanted = SetsRequest(threshold=0.9)
        given = {"return_logprob": True, "sglang_topp_request": wanted, "customized_info": None}
        given["sampling_params"] = SimpleNamespace()
        return SimpleNamespace(**{**given, "output_ids": [3], **changes})

    def noted(req: SimpleNamespace, is_rebootstrap: bool = False) -> Any:
        decode_req = SimpleNamespace(req=req, is_rebootstrap=is_rebootstrap)
        disaggregation.note_first_token(None, None, decode_req)
        buffer = (req.customized_info or {}).get(KEY)
        return None if buffer is None else buffer.generated.sets()

    assert noted(request()) == [None]
    assert noted(request(sglang_topp_request=NOTHING)) is None
    assert noted(request(return_logprob=False)) is None
    # The request was aborted before its first token.
    assert not noted(request(output_ids=[]))
    # The request was retracted, and returns with its last token.
    back = request(output_ids=[3, 5], customized_info={KEY: sets_of(None, SET)})
    assert noted(back, is_rebootstrap=True) == [None, SET]
    again = request()
    assert noted(again, is_rebootstrap=True) == []
    assert "without log-probs" in again.customized_info[KEY].problem.text
    refused = request(customized_info={KEY: sets_of(problem=Problem("why", 413))})
    assert is_refused(refused)
    assert noted(refused) == []
