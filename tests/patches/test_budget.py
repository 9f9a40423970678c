"""What is held is counted, and let go of; what does not fit ends with a reason."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches import budget as module
from sglang_topp_patches.budget import LIST_FORM_COST, Budget, InFlight, charge, is_refused
from sglang_topp_patches.payload import KEY, PROMPT_KEY, Entry

PER_SAMPLE, IN_FLIGHT = "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE", "SGLANG_TOPP_MAX_CANDIDATES_IN_FLIGHT"


class Request:
    """As much of SGLang's `Req` as an account needs."""

    def __init__(self, custom_params: dict[str, Any] | None = None) -> None:
        self.sampling_params = self
        self.custom_params = custom_params
        self.customized_info: dict[str, list[Any]] = {KEY: ["a", "b"], PROMPT_KEY: ["c"], "other": ["d"]}
        self.finished_reason: Any = None
        self.send_token_offset = 0

    def word(self) -> Entry:
        """What the HTTP process is told; the request itself goes on until that ends it, on all ranks."""
        words = {entry for key in (KEY, PROMPT_KEY) for entry in self.customized_info[key]}
        assert is_refused(self)
        assert len(words) == 1
        return words.pop()

    def finished(self) -> bool:
        return self.finished_reason is not None


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> InFlight:
    flight = InFlight(100)
    monkeypatch.setattr(module, "budget", lambda: Budget(60, 100))
    monkeypatch.setattr(module, "in_flight", lambda: flight)
    return flight


def test_limits_come_from_the_environment_or_from_the_memory() -> None:
    assert Budget.of({}, 1 << 50) == Budget(1 << 25, 1 << 42)
    assert Budget.of({}, 1 << 30) == Budget(1 << 22, 1 << 22)
    assert Budget.of({PER_SAMPLE: "7", IN_FLIGHT: " 9 "}, 1 << 30) == Budget(7, 9)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e6", "many", "9" * 400, "٣"])
@pytest.mark.parametrize("name", [PER_SAMPLE, IN_FLIGHT])
def test_limits_that_are_none_are_named(name: str, text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: got .*, expected a positive integer"):
        Budget.of({name: text}, 1 << 30)


def test_a_limit_that_cannot_be_read_turns_the_feature_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_topp_patches.seams import check_seams

    monkeypatch.setenv(PER_SAMPLE, "lots")
    assert any(PER_SAMPLE in problem for problem in check_seams().problems)


def test_a_sample_ends_beyond_its_limit_and_says_what_fits(limits: InFlight) -> None:
    req = Request()
    for _ in range(6):
        charge(req, 10)
    assert not is_refused(req)
    charge(req, 10)
    word = req.word()
    assert (word.candidates, word.status, word.is_refusal) == (None, 413, True)
    assert "got 70 candidates at 7 positions, expected at most 60" in word.problem
    assert "6 positions fit" in word.problem
    assert PER_SAMPLE in word.problem
    # Nothing is held of it any more, and another's values are left alone.
    assert limits.total == 0
    assert req.customized_info == {KEY: [word] * 3, PROMPT_KEY: [word], "other": ["d"]}
    assert pickle.loads(pickle.dumps(word)) == word


def test_a_sample_that_has_just_finished_ends_all_the_same(limits: InFlight) -> None:
    req = Request()
    req.finished_reason = object()
    charge(req, 61)
    assert req.word().status == 413


def test_the_largest_one_makes_room(limits: InFlight) -> None:
    large, small = Request(), Request()
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
    # It may get another set before it is gone: that is not counted, and not held against it twice.
    charge(large, 1)
    assert limits.total == 45
    assert large.word() is word


def test_the_word_goes_out_with_the_next_token_where_all_entries_were_sent(limits: InFlight) -> None:
    """Another's set makes this the largest, between two of its own tokens."""
    large, small = Request(), Request()
    charge(large, 59)
    large.send_token_offset = 2  # and SGLang sends what stands from there on, up to the last token
    large.customized_info[KEY] = [None, None]
    charge(small, 45)
    word = large.word()
    num_tokens = 3
    assert large.customized_info[KEY][large.send_token_offset : num_tokens] == [word]


def test_lists_count_more(limits: InFlight) -> None:
    req = Request({KEY: LIST_FORM_COST})
    charge(req, 4)
    assert req.word().status == 413


def test_what_ends_however_it_ends_is_let_go_of(limits: InFlight) -> None:
    finished, dropped = Request(), Request()
    charge(finished, 30)
    charge(dropped, 30)
    finished.finished_reason = object()
    charge(finished, 10)
    assert limits.total == 30
    del dropped
    gc.collect()
    assert limits.total == 0
    charge(Request(), 100 - 1)  # there is room again
