"""A threshold that reaches the scheduler without having passed the checks ends its request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches import admission
from sglang_topp_patches.payload import KEY

ASKED = {"top_logprobs_p": 0.9}


class Request:
    def __init__(self, custom_params: Any, temperature: float = 1.0) -> None:
        self.sampling_params = SimpleNamespace(custom_params=custom_params, temperature=temperature)
        self.to_finish: Any = None

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish = message


SCHEDULER = SimpleNamespace(server_args=SimpleNamespace())


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "status", lambda: SimpleNamespace(problems=()))


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("custom", [None, {}, {"mine": 1}, {"top_logprobs_p": 0}, "x", [ASKED]])
def test_who_does_not_ask_passes(custom: Any) -> None:
    req = Request(custom)
    admission.check_request(SCHEDULER, req)
    assert req.to_finish is None


@pytest.mark.usefixtures("whole")
def test_what_came_through_the_checks_passes() -> None:
    req = Request({"top_logprobs_p": 0.9, KEY: 1})
    admission.check_request(SCHEDULER, req)
    assert req.to_finish is None


@pytest.mark.usefixtures("whole")
def test_what_came_another_way_is_refused() -> None:
    req = Request({"top_logprobs_p": 0.9})
    admission.check_request(SCHEDULER, req)
    assert "ask POST /generate" in req.to_finish
    assert "top_logprobs_p" not in req.sampling_params.custom_params


@pytest.mark.usefixtures("whole")
def test_the_rust_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    req = Request({"top_logprobs_p": 0.9})
    admission.check_request(SCHEDULER, req)
    assert "SGLANG_RUST_SERVER" in req.to_finish


@pytest.mark.usefixtures("whole")
def test_a_temperature_that_the_model_brings_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request itself may name none; only here is it known."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    for temperature, refused in ((1.0, False), (0.6, True)):
        req = Request({"top_logprobs_p": 0.9, KEY: 1}, temperature)
        admission.check_request(SCHEDULER, req)
        assert bool(req.to_finish) is refused
        if refused:
            assert "got 0.6 where only temperature 1" in req.to_finish


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("streaming", "start", "refused"), [(True, 0, True), (True, 3, False), (False, 0, False)]
)
def test_a_prompt_that_sglang_will_not_score(streaming: bool, start: int, refused: bool) -> None:
    req: Any = Request({"top_logprobs_p": 0.9, KEY: 1})
    req.session, req.origin_input_ids = SimpleNamespace(streaming=streaming), [1, 2, 3]
    req.logprob_start_len = start
    admission.check_request(SCHEDULER, req)
    assert bool(req.to_finish) is refused
