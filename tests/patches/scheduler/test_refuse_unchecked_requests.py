"""A request for sets that reaches the scheduler without the HTTP checks ends with an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches import capabilities
from sglang_topp_patches.scheduler import refuse_unchecked_requests
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler_messages import KEY

ASKED = {"top_logprobs_p": 0.9}


class Request:
    def __init__(self, custom_params: Any, temperature: float = 1.0) -> None:
        self.sampling_params = SimpleNamespace(
            custom_params=custom_params, temperature=temperature, top_k=-1, top_p=1.0, min_p=0.0
        )
        self.to_finish: Any = None
        self.logprob_start_len, self.origin_input_ids, self.session = 3, [1, 2, 3], None

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish = message


class UnifiedRadixCache:
    """Named like a class of SGLang's."""


PROCESS = SchedulerProcess()
SCHEDULER = SimpleNamespace(server_args=SimpleNamespace(), tree_cache=UnifiedRadixCache())


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "status", lambda: SimpleNamespace(problems=()))
    monkeypatch.setattr(PROCESS, "_capabilities", None)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("custom", [None, {}, {"mine": 1}, {"top_logprobs_p": 0}, "x", [ASKED]])
def test_who_does_not_ask_passes(custom: Any) -> None:
    req = Request(custom)
    refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, req)
    assert req.to_finish is None


@pytest.mark.usefixtures("whole")
def test_what_came_through_the_checks_passes() -> None:
    req = Request({"top_logprobs_p": 0.9, KEY: 1})
    refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, req)
    assert req.to_finish is None


@pytest.mark.usefixtures("whole")
def test_what_came_another_way_is_refused() -> None:
    req = Request({"top_logprobs_p": 0.9})
    refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, req)
    assert "ask POST /generate" in req.to_finish
    assert "top_logprobs_p" not in req.sampling_params.custom_params


@pytest.mark.usefixtures("whole")
def test_the_rust_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    req = Request({"top_logprobs_p": 0.9})
    refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, req)
    assert "SGLANG_RUST_SERVER" in req.to_finish


@pytest.mark.usefixtures("whole")
def test_a_temperature_that_the_model_brings_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may name no threshold. Only the scheduler knows that."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    for temperature, refused in ((1.0, False), (0.6, True)):
        req = Request({"top_logprobs_p": 0.9, KEY: 1}, temperature)
        refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, req)
        assert bool(req.to_finish) is refused
        if refused:
            assert "temperature: got 0.6, expected 1" in req.to_finish


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("streaming", "start", "refused"), [(True, 0, True), (True, 3, False), (False, 0, False)]
)
def test_a_prompt_that_sglang_will_not_score(streaming: bool, start: int, refused: bool) -> None:
    req: Any = Request({"top_logprobs_p": 0.9, KEY: 1})
    req.session, req.origin_input_ids = SimpleNamespace(streaming=streaming), [1, 2, 3]
    req.logprob_start_len = start
    refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, req)
    assert bool(req.to_finish) is refused


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("final", "words"),
    [
        ({}, ""),
        ({"top_k": 1 << 30}, ""),
        ({"top_p": 0.8}, "top_p: this server's default is 0.8; write sampling_params.top_p into the request"),
        ({"top_k": 1}, "top_k: got 1, expected -1"),
        ({"min_p": 0.1}, "min_p: got 0.1, expected 0"),
    ],
)
def test_defaults_of_the_server_that_are_no_nucleus(final: dict[str, Any], words: str) -> None:
    """slime's field stands for the sets of `top_p`, which the request itself may lack."""
    custom = {"return_top_p_token_ids": True, "top_logprobs_p": 1.0, KEY: 1}
    req = Request(custom)
    vars(req.sampling_params).update(final)
    refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, req)
    assert bool(req.to_finish) is bool(words)
    if words:
        expected = f"return_top_p_token_ids: candidate sets are not served here: {words}"
        assert req.to_finish.startswith(expected)
        assert not custom.keys() & {"return_top_p_token_ids", "top_logprobs_p"}
    # Sets in our own fields have no such conditions.
    ours = Request({"top_logprobs_p": 0.9, KEY: 1})
    vars(ours.sampling_params).update(final)
    refuse_unchecked_requests.check_request(PROCESS, SCHEDULER, ours)
    assert ours.to_finish is None
