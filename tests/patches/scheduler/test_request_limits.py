"""Each request's candidates are counted until they are sent, and a request over its limit is ended."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches import memory
from sglang_topp_patches.memory import Budget
from sglang_topp_patches.request import SetsRequest, attach
from sglang_topp_patches.scheduler import requests
from sglang_topp_patches.scheduler.requests import (
    SchedulerProcess,
    add_sets,
    admit,
    buffer_of,
    forget_aborted,
    is_refused,
    refuse,
)
from sglang_topp_patches.set_buffer import PackedSet, Problem, SetBuffer

PER_SAMPLE = "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE"


def packed(size: int) -> PackedSet:
    return bytes(4 * size), bytes(4 * size)


class Request:
    """The part of SGLang's `Req` that the count needs."""

    def __init__(self, custom_params: dict[str, Any] | None = None) -> None:
        self.sampling_params = self
        self.custom_params = custom_params
        attach(self, SetsRequest(threshold=0.9, is_base64=True))
        self.customized_info: dict[str, Any] | None = {"other": ["d"]}
        self.finished_output = False
        self.stream = False
        self.send_token_offset = 0

    def hold(self, generated: list[int], prompt: Sequence[int] = ()) -> None:
        """Append sets of these sizes."""
        for size in generated:
            buffer_of(self).append(packed(size), "7")
        for size in prompt:
            buffer_of(self).prompt.append(packed(size))

    def word(self) -> Problem:
        """Return what the HTTP process receives, which then ends the request on all ranks."""
        assert is_refused(self)
        problem = buffer_of(self).problem
        assert problem is not None
        assert buffer_of(self).num_held == 0
        (sent,) = pickle.loads(pickle.dumps(buffer_of(self)[0:1]))
        assert sent.problem == problem
        return problem


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SchedulerProcess:
    monkeypatch.setattr(requests, "budget", lambda: Budget(60, 100))
    return SchedulerProcess()


def test_a_sample_ends_beyond_its_limit_and_says_what_fits(process: SchedulerProcess) -> None:
    req = Request()
    admit(req, process)
    for index in range(6):
        add_sets(req, index, [packed(10)], "7")
        buffer_of(req)[0 : index + 1]  # what was sent counts too
    assert not is_refused(req)
    add_sets(req, 6, [packed(10)], "7")
    word = req.word()
    assert (word.status, word.is_refusal) == (413, True)
    assert "got 70 candidates at 7 positions, expected at most 60" in word.text
    assert "6 positions fit" in word.text
    assert PER_SAMPLE in word.text
    assert req.customized_info["other"] == ["d"]  # values of other plugins stay
    # The next token is sent at once, not after the usual fifty.
    assert (req.stream, req.stream_interval) == (True, 1)


def test_lists_count_more() -> None:
    per_sample = Budget(60, 100).max_candidates_per_sample
    attach(req := Request(), SetsRequest(threshold=0.9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "budget", lambda: Budget(per_sample, 100))
        add_sets(req, 0, [packed(4)], "7")
    assert req.word().status == 413


def test_what_is_not_sent_is_counted_and_nothing_else(process: SchedulerProcess) -> None:
    """A streamed request, one that sends at its end, one that is refused, and one that SGLang drops."""
    streamed, whole, refused, dropped = reqs = [Request() for _ in range(4)]
    for req in reqs:
        req.sampling_params = Request()  # a separate object, as in SGLang
        admit(req, process)
        req.hold([10, 20], [2, 3])
    assert process.candidates_in_flight == 4 * 35
    buffer_of(streamed)[0:1]
    assert process.candidates_in_flight == 3 * 35 + 20
    buffer_of(whole)[0:2]
    assert process.candidates_in_flight == 2 * 35 + 20
    refuse(refused, "why", 503)
    assert process.candidates_in_flight == 35 + 20
    del dropped, reqs, req
    assert process.candidates_in_flight == 20
    admit(without := Request(), process)
    without.customized_info = None
    assert process.candidates_in_flight == 20


@pytest.mark.parametrize(("rid", "abort_all", "left"), [("b", False, 11), ("x", False, 61), ("", True, 1)])
def test_what_is_aborted_while_it_waits_is_not_counted(
    process: SchedulerProcess, rid: str, abort_all: bool, left: int
) -> None:
    reqs = {name: Request() for name in ("a.1", "b.1", "running")}
    for (name, req), size in zip(reqs.items(), (10, 50, 1), strict=True):
        req.rid = name
        req.hold([size])
        admit(req, process)
    scheduler = SimpleNamespace(waiting_queue=[reqs["a.1"]])
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(retracted_queue=[reqs["b.1"]])
    forget_aborted(process, scheduler, SimpleNamespace(rid=rid, abort_all=abort_all))
    assert process.candidates_in_flight == left


def test_memory_goes_back_to_the_system_after_large_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(memory.trimmer, "trim_soon", lambda: trims.append(size))
    for size in (1 << 20, 1 << 21):
        buffer = SetBuffer()
        for count in (size - 1, 1):
            buffer.append(packed(count), "7")
            buffer[buffer.first : buffer.end]
    assert trims == [1 << 21]


def test_a_request_that_sglang_drops_is_not_left_to_the_collector(process: SchedulerProcess) -> None:
    """SGLang before 0.5.23 puts the request itself among its custom parameters."""
    req = Request({"mine": 1})
    req.custom_params = {**req.custom_params, "__req__": req}
    admit(req, process)
    req.sampling_params = Request(req.custom_params)  # a separate object, as in SGLang
    assert req.custom_params["__req__"].send_token_offset == 0  # which custom logit processors read
    gc.disable()
    try:
        gone = weakref.ref(req)
        del req
        assert gone() is None
    finally:
        gc.enable()


def test_a_request_without_a_set_is_sent_at_once() -> None:
    req = Request()
    refuse(req, "why")
    assert (req.word().text, req.word().is_refusal) == ("why", False)
    assert (req.stream, req.stream_interval) == (True, 1)
