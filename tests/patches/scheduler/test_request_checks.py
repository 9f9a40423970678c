"""What reaches the scheduler: what a request wants, and refusals of what cannot be served exactly."""

from __future__ import annotations

import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_topp_patches import capabilities
from sglang_topp_patches.http.request_fields import send_to_scheduler
from sglang_topp_patches.releases import Feature
from sglang_topp_patches.request import NOTHING, SetsRequest, attach, sets_request
from sglang_topp_patches.scheduler.requests import SchedulerProcess, check_request, receive
from tests.skip_missing_features import needs

SETS = SetsRequest(threshold=0.9)


class UnifiedRadixCache:
    """Named like a class of SGLang's."""


SCHEDULER = SimpleNamespace(server_args=SimpleNamespace(), tree_cache=UnifiedRadixCache())


def arrive(wanted: SetsRequest = NOTHING, *, ids: Any = (1, 2, 3), **sampling: Any) -> Any:
    """Return SGLang's request in the scheduler, after the hooks of both processes."""
    params = SamplingParams(**sampling)
    params.normalize(SimpleNamespace(encode=lambda *args, **kwargs: [1]))
    obj, tokenized = SimpleNamespace(), SimpleNamespace(sampling_params=params)
    attach(obj, wanted)
    send_to_scheduler(tokenized, None, obj)
    sent = pickle.loads(pickle.dumps(tokenized.sampling_params))
    req = Req.__new__(Req)
    receive(Req.__init__, req, "a", "", array("q", ids), sent)
    req.logprob_start_len = len(ids)
    req.set_finish_with_abort = lambda message: setattr(req, "to_finish", message)
    return req


def problem_of(req: Any, **server_args: Any) -> str:
    scheduler = SimpleNamespace(**{**vars(SCHEDULER), "server_args": SimpleNamespace(**server_args)})
    check_request(SchedulerProcess(), scheduler, req)
    return req.to_finish or ""


@pytest.fixture(autouse=True)
def holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "status", lambda: SimpleNamespace(problems=()))


@pytest.mark.parametrize("custom", [None, {}, {"mine": 1}, {"top_logprobs_p": 0, "sglang_topp": -1}])
@pytest.mark.parametrize("wanted", [NOTHING, SETS])
def test_custom_params_arrive_as_they_were_sent(wanted: SetsRequest, custom: Any) -> None:
    req = arrive(wanted, custom_params=custom)
    found = req.sampling_params.custom_params
    assert (
        {name: found[name] for name in found if name != "__req__"} == custom
        if custom
        else found == custom or (found is not None and [*found] == ["__req__"])
    )
    assert sets_request(req) == wanted
    assert not problem_of(req)


@pytest.mark.parametrize(
    ("custom", "name"),
    [
        ({"top_logprobs_p": 0.9}, "top_logprobs_p"),
        ({"top_logprobs_p": 1, "sglang_topp": -1_000_000}, "top_logprobs_p"),
        ({"top_logprobs_p": "x", "sglang_topp": {"threshold": 0.9}}, "top_logprobs_p"),
        ({"top_logprobs_source": "sampler", "sglang_topp": 1}, "top_logprobs_source"),
        ({"return_top_p_token_ids": True, "sglang_topp": 1}, "return_top_p_token_ids"),
        ({"resumed_tokens": 2}, "resumed_tokens"),
    ],
)
def test_what_a_caller_writes_does_not_count(custom: Any, name: str) -> None:
    req = arrive(custom_params=custom)
    problem = problem_of(req)
    assert problem.startswith(f"{name}: candidate sets are not served here: it came through an entry point")
    assert sets_request(req) is NOTHING


def test_the_rust_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert "SGLANG_RUST_SERVER" in problem_of(arrive(custom_params={"top_logprobs_p": 0.9}))


def test_messages_that_cannot_carry_the_request_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_PICKLE_IPC", "0")
    assert "SGLANG_USE_PICKLE_IPC" in "".join(capabilities.environment_problems())
    monkeypatch.setenv("SGLANG_USE_PICKLE_IPC", "1")
    assert capabilities.environment_problems() == ()


def test_a_temperature_that_the_model_brings_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    assert not problem_of(arrive(SETS))
    req = arrive(SETS, temperature=0.6)
    assert "temperature: got 0.6, expected 1" in problem_of(req)
    assert sets_request(req) is NOTHING


@pytest.mark.parametrize(
    ("streaming", "start", "refused"), [(True, 0, True), (True, 3, False), (False, 0, False)]
)
def test_a_prompt_that_sglang_will_not_score(streaming: bool, start: int, refused: bool) -> None:
    req = arrive(SETS)
    req.session, req.logprob_start_len = SimpleNamespace(streaming=streaming), start
    assert bool(problem_of(req)) is refused


def test_a_cache_that_may_hold_kv_of_other_weights() -> None:
    """A storage for KV can be attached to a scheduler that has served prompt sets before."""
    process, scheduler = SchedulerProcess(), SimpleNamespace(**vars(SCHEDULER))

    def problem(start: int) -> str:
        req = arrive(SETS)
        req.logprob_start_len = start
        check_request(process, scheduler, req)
        return req.to_finish or ""

    assert not problem(start=0)
    scheduler.enable_hicache_storage = True
    assert "logprob_start_len: got 0, and enable_hicache_storage: KV" in problem(start=0)
    assert not problem(start=3)
    (note,) = process.capabilities_of(scheduler).notes
    assert note.startswith("requests for the sets of a prompt are refused: enable_hicache_storage")
    scheduler.enable_hicache_storage, scheduler.tree_cache = False, object()
    assert "the prefix cache object may hold KV of other weights" in problem(start=0)
    scheduler.tree_cache = SimpleNamespace(inner=UnifiedRadixCache())
    assert not problem(start=0)


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
    problem = problem_of(arrive(SetsRequest(threshold=1.0, is_for_slime=True), **final))
    assert problem == (words and problem)
    if words:
        assert problem.startswith(f"return_top_p_token_ids: candidate sets are not served here: {words}")
    # Sets in our own fields have no such conditions.
    assert not problem_of(arrive(SETS, **final))


@needs(Feature.RESUMED)
@pytest.mark.parametrize(
    ("final", "name"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"regex": "a"}, "regex"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"ebnf": "a"}, "ebnf"),
        ({"structural_tag": "a"}, "structural_tag"),
        ({"custom_params": {"thinking_budget": 4}}, "custom_params"),
        ({"beam_width": 2}, "beam_width"),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop": ["a"], "n": 1}, ""),
        ({"max_new_tokens": 3, "logit_bias": {"1": 2.0}, "sampling_seed": 1, "ignore_eos": True}, ""),
    ],
)
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_defaults_that_a_resumed_answer_cannot_follow(
    final: dict[str, Any], name: str, threshold: float
) -> None:
    problem = problem_of(arrive(SetsRequest(resumed_tokens=2, threshold=threshold), **final))
    assert problem.startswith(f"sampling_params.{name}: got" if name else "")
    assert bool(problem) is bool(name)
    # An answer that begins here may never be resumed.
    assert not problem_of(arrive(SetsRequest(resumed_tokens=0, threshold=threshold), **final))


@needs(Feature.RESUMED)
def test_resumed_tokens_that_sglang_cuts_off() -> None:
    for count, words in ((2, "resumed_tokens: got 2 with a prompt of 3 tokens, of which"), (0, "")):
        req = arrive(SetsRequest(resumed_tokens=count))
        req.origin_input_ids = req.origin_input_ids[:2]  # as --allow-auto-truncate leaves it
        assert problem_of(req).startswith(words)
        assert bool(problem_of(req)) is bool(words)
