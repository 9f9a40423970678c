"""Scored prompts share a prefix cache only with prompts of the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches.request import SetsRequest, attach
from sglang_topp_patches.scheduler import requests
from sglang_topp_patches.scheduler.requests import SchedulerProcess, is_refused, weights_of

TREE_CACHE = object()


class Req:
    """The part of SGLang's `Req` that the hooks use."""

    def __init__(
        self, *, p: float = 0.9, start: int = 0, extra_key: str | None = None, routes: bool = False
    ) -> None:
        attach(self, SetsRequest(threshold=p))
        self.return_routed_experts, self.customized_info, self.sampling_params = (
            routes,
            None,
            SimpleNamespace(),
        )
        self.logprob_start_len, self.origin_input_ids, self.extra_key = start, [1, 2, 3], extra_key


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> SchedulerProcess:
    monkeypatch.setattr(requests, "internals", lambda: SimpleNamespace(weight_version=lambda: "7"))
    return SchedulerProcess()


def admitted(cache: SchedulerProcess, **fields: Any) -> Req:
    req = Req(**fields)
    cache.choose_namespace(req, TREE_CACHE)
    return req


def test_without_a_push_all_requests_share_the_cache(cache: SchedulerProcess) -> None:
    assert admitted(cache).extra_key is None
    assert admitted(cache, extra_key="mine").extra_key == "mine"
    cache.note_flush(True, None)
    assert admitted(cache).extra_key is None


def test_each_push_that_flushes_nothing_begins_a_namespace(cache: SchedulerProcess) -> None:
    cache.note_push(None)
    first, second = admitted(cache), admitted(cache)
    assert first.extra_key == second.extra_key is not None
    cache.note_push(None)
    assert admitted(cache).extra_key not in (None, first.extra_key)


def test_no_caller_can_guess_a_namespace(cache: SchedulerProcess) -> None:
    """An ordinary request in a later namespace would leave KV of the old weights there."""
    keys = set()
    for each in (cache, SchedulerProcess()):
        each.note_push(None)
        keys.add(admitted(each).extra_key)
    assert len(keys) == 2


def test_a_callers_own_key_stays(cache: SchedulerProcess) -> None:
    cache.note_push(None)
    assert len({admitted(cache, extra_key=key).extra_key for key in ("mine", "other", None)}) == 3


def test_a_request_that_waits_gets_that_of_its_prefill(cache: SchedulerProcess) -> None:
    waits = admitted(cache, extra_key="mine")
    assert weights_of(waits) == requests.Weights(0, "7")
    for _ in range(2):
        cache.note_push(None)
        cache.choose_namespace(waits, TREE_CACHE)
        assert waits.extra_key == admitted(cache, extra_key="mine").extra_key != "mine"
        assert weights_of(waits) == cache.current_weights()
    cache.note_flush(True, None)
    cache.choose_namespace(waits, TREE_CACHE)
    assert waits.extra_key == "mine"


def test_the_next_chunk_keeps_it(cache: SchedulerProcess) -> None:
    req = admitted(cache)
    began = weights_of(req)
    cache.note_push(None)
    cache.choose_namespace(req)
    assert (req.extra_key, weights_of(req)) == (None, began)
    assert began != cache.current_weights()


def test_a_flush_that_is_refused_changes_nothing(cache: SchedulerProcess) -> None:
    cache.note_push(None)
    kept = admitted(cache).extra_key
    cache.note_flush(False, None)
    assert admitted(cache).extra_key == kept


def test_routed_experts_need_one_and_a_prefill_with_one_version(cache: SchedulerProcess) -> None:
    cache.note_push(None)
    req = admitted(cache, start=-1, routes=True)
    assert req.extra_key == admitted(cache).extra_key is not None
    cache.choose_namespace(req)
    assert not is_refused(req)
    cache.note_push(None)
    cache.choose_namespace(req)
    assert is_refused(req)


@pytest.mark.parametrize("fields", [{"p": 0}, {"p": 0, "routes": True}, {"start": -1}, {"start": 3}])
def test_other_requests_are_left_alone(cache: SchedulerProcess, fields: dict[str, Any]) -> None:
    cache.note_push(None)
    req = admitted(cache, **fields)
    assert req.extra_key is None
    assert weights_of(req) is None
