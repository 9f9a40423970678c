"""Each request's candidates are counted until they are sent, and a request over its limit is ended."""

from __future__ import annotations

import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches.memory.budget import Budget, InFlight
from sglang_topp_patches.request import SetsRequest, attach
from sglang_topp_patches.scheduler import extract_generated_sets, request_budget
from sglang_topp_patches.scheduler.request_budget import (
    admit,
    charge,
    close_accounts_of_aborted,
    end_without_set,
    is_refused,
)
from sglang_topp_patches.scheduler_messages import KEY, PROMPT_KEY, Entry

PER_SAMPLE, IN_FLIGHT = "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE", "SGLANG_TOPP_MAX_CANDIDATES_IN_FLIGHT"


class Request:
    """The part of SGLang's `Req` that an account needs."""

    def __init__(self, custom_params: dict[str, Any] | None = None) -> None:
        self.sampling_params = self
        self.custom_params = custom_params
        self.customized_info: dict[str, list[Any]] = {KEY: ["a", "b"], PROMPT_KEY: ["c"], "other": ["d"]}
        self.finished_reason: Any = None
        self.finished_output = False
        self.stream = False
        self.send_token_offset = 0

    def word(self) -> Entry:
        """Return what the HTTP process receives, which then ends the request on all ranks."""
        words = {entry for key in (KEY, PROMPT_KEY) for entry in self.customized_info[key]}
        assert is_refused(self)
        assert len(words) == 1
        return words.pop()

    def finished(self) -> bool:
        return self.finished_reason is not None


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> InFlight:
    monkeypatch.setattr(request_budget, "budget", lambda: Budget(60, 100))
    return InFlight(100)


def admitted(limits: InFlight, custom_params: dict[str, Any] | None = None) -> Request:
    req = Request(custom_params)
    attach(req, SetsRequest(threshold=0.9, is_base64=True))
    admit(req, limits)
    return req


def test_a_sample_ends_beyond_its_limit_and_says_what_fits(limits: InFlight) -> None:
    req = admitted(limits)
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
    assert limits.total == 0
    assert req.customized_info == {KEY: [word] * 3, PROMPT_KEY: [word], "other": ["d"]}
    # The next token is sent at once, not after the usual fifty.
    assert (req.stream, req.stream_interval) == (True, 1)
    assert pickle.loads(pickle.dumps(word)) == word


def test_a_sample_that_has_just_finished_ends_all_the_same(limits: InFlight) -> None:
    req = admitted(limits)
    req.finished_reason = object()
    charge(req, 61)
    assert req.word().status == 413


def test_the_largest_one_makes_room(limits: InFlight) -> None:
    large, small = admitted(limits), admitted(limits)
    charge(large, 60)
    charge(small, 40)
    assert not is_refused(large)
    charge(small, 5)
    assert not is_refused(small)
    word = large.word()
    assert word.status == 429
    assert "hold 105 candidates, more than the 100 that fit" in word.problem
    assert IN_FLIGHT in word.problem
    assert limits.total == 45
    # It may get another set before it ends. That set is not counted, and no second error is recorded.
    charge(large, 1)
    assert limits.total == 45
    assert large.word() is word


def test_the_word_goes_out_with_the_next_token_where_all_entries_were_sent(limits: InFlight) -> None:
    """Between two of its tokens, another request's set makes this request the largest."""
    large, small = admitted(limits), admitted(limits)
    charge(large, 59)
    large.send_token_offset = 2  # and SGLang sends the entries from there to the last token
    large.customized_info[KEY] = [None, None]
    charge(small, 45)
    word = large.word()
    num_tokens = 3
    assert large.customized_info[KEY][large.send_token_offset : num_tokens] == [word]


def test_memory_without_an_owner_makes_the_largest_one_end(limits: InFlight) -> None:
    """The staged rows of a pass cannot be ended, so a request is ended to make room."""
    large, small = admitted(limits), admitted(limits)
    charge(large, 30)
    charge(small, 10)
    staged = limits.open(None)
    staged.add(80, 0)
    assert large.word().status == 429
    assert not is_refused(small)
    assert limits.total == 90
    del staged
    assert limits.total == 10


def test_lists_count_more(limits: InFlight) -> None:
    req = admitted(limits)
    attach(req, SetsRequest(threshold=0.9))
    charge(req, 4)
    assert req.word().status == 413


def test_what_ends_however_it_ends_is_let_go_of(limits: InFlight) -> None:
    finished, dropped = admitted(limits), admitted(limits)
    charge(finished, 30)
    charge(dropped, 30)
    finished.finished_reason = object()
    charge(finished, 10)
    assert limits.total == 30
    del dropped
    gc.collect()
    assert limits.total == 0
    charge(admitted(limits), 100 - 1)  # there is room again


@pytest.mark.parametrize("customized_info", [None, {}, {KEY: ["a"]}])
def test_the_account_closes_when_the_output_is_sent(
    limits: InFlight, customized_info: dict[str, list[Any]] | None
) -> None:
    """A prefill server finishes its requests long after their only set."""
    req, other = admitted(limits), admitted(limits)
    charge(req, 30)
    charge(other, 10)
    req.customized_info = customized_info
    extract_generated_sets.free_sent_entries(None, None, [req, other], True)
    assert limits.total == 40
    req.finished_output = True
    extract_generated_sets.free_sent_entries(None, None, [req, other], True)
    assert limits.total == 10


@pytest.mark.parametrize(("rid", "abort_all", "left"), [("b", False, 11), ("x", False, 61), ("", True, 1)])
def test_accounts_of_waiting_requests_close_on_abort(
    limits: InFlight, rid: str, abort_all: bool, left: int
) -> None:
    reqs = {name: admitted(limits) for name in ("a.1", "b.1", "running")}
    for (name, req), count in zip(reqs.items(), (10, 50, 1), strict=True):
        req.rid = name
        charge(req, count)
    scheduler = SimpleNamespace(waiting_queue=[reqs["a.1"]])
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(retracted_queue=[reqs["b.1"]])
    close_accounts_of_aborted(scheduler, SimpleNamespace(rid=rid, abort_all=abort_all))
    assert limits.total == left


def test_a_request_that_sglang_drops_is_not_left_to_the_collector(limits: InFlight) -> None:
    """SGLang before 0.5.23 puts the request itself among its custom parameters."""
    req = admitted(limits, {"mine": 1})
    req.custom_params = {**req.custom_params, "__req__": req}
    admit(req, limits)
    req.sampling_params = Request(req.custom_params)  # a separate object, as in SGLang
    assert req.custom_params["__req__"].send_token_offset == 0  # which custom logit processors read
    charge(req, 30)
    gc.disable()
    try:
        gone = weakref.ref(req)
        del req
        assert gone() is None
        assert limits.total == 0
    finally:
        gc.enable()


def test_a_request_without_a_set_holds_nothing_and_is_sent_at_once(limits: InFlight) -> None:
    req = admitted(limits)
    charge(req, 30)
    req.customized_info[KEY].append(Entry(None, "why"))
    end_without_set(req)
    assert is_refused(req)
    assert limits.total == 0
    assert req.customized_info[KEY] == ["a", "b", Entry(None, "why")]
    assert (req.stream, req.stream_interval) == (True, 1)
