"""A request ends on every rank in the same step, whichever of them decides it."""

from __future__ import annotations

import gc
import pickle
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches import ending
from sglang_topp_patches.ending import end, end_here, end_on_every_rank, tell_why
from sglang_topp_patches.payload import THRESHOLD


class Req:
    """As much of SGLang's `Req` as ending one needs."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.to_finish: Any = None
        self.finished_reason: Any = None
        self.sampling_params = SimpleNamespace(custom_params={THRESHOLD: 0.9})

    def finished(self) -> bool:
        return self.finished_reason is not None


class Rank:
    """As much of SGLang's `Scheduler`."""

    def __init__(self, *names: str, waiting: tuple[str, ...] = (), chunked: str = "") -> None:
        self.running = [Req(name) for name in names]
        self.waiting_queue = [Req(name) for name in waiting]
        self.chunked_req = Req(chunked) if chunked else None
        self.aborted: list[Any] = []

    def collect_inflight_reqs(self) -> set[Req]:
        return set(self.running)

    def abort_request(self, recv_req: Any) -> None:
        end_here(lambda self, recv_req: self.aborted.append(recv_req), self, recv_req)


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_decided", [])


def broadcast(first: Rank, *others: Rank) -> int:
    """One step of the scheduler's: what the first rank decided reaches all of them."""
    aborts = end_on_every_rank([], first)
    for abort in aborts:
        for rank in (first, *others):
            rank.abort_request(pickle.loads(pickle.dumps(abort)))
    return len(aborts)


@pytest.mark.parametrize("place", ["running", "waiting", "chunked"])
def test_every_rank_ends_it_wherever_it_is(place: str) -> None:
    names: dict[str, Any] = {"waiting": {"waiting": ("a",)}, "chunked": {"chunked": "a"}}.get(place, {})
    ranks = [Rank(*(["a"] if place == "running" else []), "ab", **names) for _ in range(3)]
    (req, *_) = ranks[0].running if place == "running" else (ranks[0].waiting_queue or [ranks[0].chunked_req])
    end(req, "too much", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    assert req.to_finish is None  # not before the others
    assert broadcast(*ranks) == 1
    for rank in ranks:
        found = {req.rid: req for req in (*rank.running, *rank.waiting_queue, rank.chunked_req) if req}
        reason = found["a"].to_finish.to_json()
        assert (reason["message"], reason["status_code"]) == ("too much", 413)
        assert THRESHOLD not in found["a"].sampling_params.custom_params
        # SGLang's own aborts would take this one along: its name begins in the same way.
        assert found["ab"].to_finish is None
        assert not rank.aborted
    assert broadcast(*ranks) == 0


def test_it_is_said_again_until_it_is_heard() -> None:
    rank = Rank("a")
    end(rank.running[0], "too much", HTTPStatus.TOO_MANY_REQUESTS)
    assert len(end_on_every_rank([], rank)) == 1  # lost on its way
    assert broadcast(rank) == 1
    assert broadcast(rank) == 0


def test_one_that_is_gone_is_not_said() -> None:
    rank = Rank("a", "b")
    for req in rank.running:
        end(req, "too much", HTTPStatus.TOO_MANY_REQUESTS)
    rank.running[0].finished_reason = object()
    rank.running.pop()
    gc.collect()
    assert broadcast(rank) == 0


def test_one_that_came_to_its_own_end_first_still_says_why() -> None:
    rank = Rank("a", "b")
    first, other = rank.running
    end(first, "too much", HTTPStatus.TOO_MANY_REQUESTS)
    first.finished_reason = other.finished_reason = length = object()
    tell_why(None, rank.running)
    assert first.finished_reason.to_json()["message"] == "too much"
    assert other.finished_reason is length


def test_what_sglang_ends_is_left_to_it() -> None:
    from sglang.srt.managers.io_struct import AbortReq

    rank = Rank("a")
    timeout = AbortReq(rid="a", finished_reason={"type": "abort", "message": "late", "status_code": 503})
    assert end_on_every_rank([timeout], rank) == [timeout]
    for abort in (timeout, AbortReq(rid="a"), AbortReq(abort_all=True)):
        rank.abort_request(abort)
    assert len(rank.aborted) == 3
    assert rank.running[0].to_finish is None
