"""Each request's candidates are counted until they are sent, and a request over its limit is ended."""

from __future__ import annotations

import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches.memory.budget import LIST_FORM_COST, Budget
from sglang_topp_patches.scheduler import extract_generated_sets, request_budget
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler.request_budget import (
    admit,
    charge,
    end_without_set,
    forget_aborted,
    is_refused,
    num_candidates,
)
from sglang_topp_patches.scheduler_messages import KEY, PROMPT_KEY, Entry, PackedSet

PER_SAMPLE = "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE"


def packed(size: int) -> PackedSet:
    return bytes(4 * size), bytes(4 * size)


class Request:
    """The part of SGLang's `Req` that the count needs."""

    def __init__(self, custom_params: dict[str, Any] | None = None) -> None:
        self.sampling_params = self
        self.custom_params = custom_params
        self.customized_info: dict[str, list[Any]] = {KEY: ["a", "b"], PROMPT_KEY: ["c"], "other": ["d"]}
        self.finished_output = False
        self.stream = False
        self.send_token_offset = 0

    def word(self) -> Entry:
        """Return what the HTTP process receives, which then ends the request on all ranks."""
        words = {entry for key in (KEY, PROMPT_KEY) for entry in self.customized_info[key]}
        assert is_refused(self)
        assert len(words) == 1
        return words.pop()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SchedulerProcess:
    monkeypatch.setattr(request_budget, "budget", lambda: Budget(60, 100))
    return SchedulerProcess()


def test_a_sample_ends_beyond_its_limit_and_says_what_fits(process: SchedulerProcess) -> None:
    req = Request()
    admit(req, process)
    for _ in range(6):
        charge(req, 10)
    assert not is_refused(req)
    charge(req, 10)
    word = req.word()
    assert (word.candidates, word.status, word.is_refusal) == (None, 413, True)
    assert "got 70 candidates at 7 positions, expected at most 60" in word.problem
    assert "6 positions fit" in word.problem
    assert PER_SAMPLE in word.problem
    # Its sets are freed, and values of other plugins stay.
    assert process.candidates_in_flight == 0
    assert req.customized_info == {KEY: [word] * 3, PROMPT_KEY: [word], "other": ["d"]}
    # The next token is sent at once, not after the usual fifty.
    assert (req.stream, req.stream_interval) == (True, 1)
    assert pickle.loads(pickle.dumps(word)) == word


def test_lists_count_more() -> None:
    per_sample = Budget(60, 100).max_candidates_per_sample
    req = Request({KEY: LIST_FORM_COST})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_budget, "budget", lambda: Budget(per_sample, 100))
        charge(req, 4)
    assert req.word().status == 413


def test_what_is_not_sent_is_counted_and_nothing_else(process: SchedulerProcess) -> None:
    """A streamed request, one that sends at its end, one that is refused, and one that SGLang drops."""
    streamed, whole, refused, dropped = reqs = [Request() for _ in range(4)]
    for req in reqs:
        req.sampling_params = Request()  # a separate object, as in SGLang
        admit(req, process)
        req.customized_info = {
            PROMPT_KEY: [Entry(None, weight_version="7"), packed(5)],
            KEY: [Entry(packed(size)) for size in (10, 20)],
        }
    assert process.candidates_in_flight == 4 * 35
    streamed.stream, streamed.send_token_offset = True, 1
    extract_generated_sets.free_sent_entries(process, None, None, reqs, True)
    assert process.candidates_in_flight == 3 * 35 + 20
    whole.send_token_offset, whole.finished_output = 2, True
    extract_generated_sets.free_sent_entries(process, None, None, reqs, True)
    assert process.candidates_in_flight == 2 * 35 + 20
    request_budget.refuse(refused, "why", 503)
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
        req.rid, req.customized_info = name, {KEY: [Entry(packed(size))]}
        admit(req, process)
    scheduler = SimpleNamespace(waiting_queue=[reqs["a.1"]])
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(retracted_queue=[reqs["b.1"]])
    forget_aborted(process, scheduler, SimpleNamespace(rid=rid, abort_all=abort_all))
    assert process.candidates_in_flight == left


def test_memory_goes_back_to_the_system_after_large_sets(
    process: SchedulerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(process.trimmer, "trim_soon", lambda: trims.append(num_candidates(req)))
    monkeypatch.setattr(request_budget, "budget", lambda: Budget(1 << 30, 1 << 30))
    for size in (1 << 20, 1 << 21):
        admit(req := Request(), process)
        charge(req, size)
        for req.finished_output in (False, True):
            extract_generated_sets.free_sent_entries(process, None, None, [req], True)
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
    req.customized_info[KEY].append(Entry(None, "why"))
    end_without_set(req)
    assert is_refused(req)
    assert req.customized_info[KEY] == ["a", "b", Entry(None, "why")]
    assert (req.stream, req.stream_interval) == (True, 1)
