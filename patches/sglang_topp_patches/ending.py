"""Ending a request in the scheduler, on every rank in the same step.

The rank that answers counts what is held (`budget`), and decides. Were the request ended there alone, the
next batch would differ from that of the other ranks (tensor parallel, pipeline parallel), and all of them
would wait for each other for ever. So the decision goes the way of SGLang's own time limits: as an
`AbortReq`, broadcast with the requests that arrive next. SGLang would end every request whose id begins
like the one that is named; ours ends that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any
from weakref import ref

from sglang_topp_patches.payload import THRESHOLD, custom_params

__all__ = ["end", "end_here", "end_on_every_rank", "tell_why"]

_BUDGET_EXCEEDED = "BudgetExceeded"
_REASON = "sglang_topp_ending"

_decided: list[ref[Any]] = []


def end(req: Any, message: str, status: HTTPStatus) -> None:
    """Have a request end with an error: at once where it has just finished, else on every rank soon."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    setattr(req, _REASON, FINISH_ABORT(message, status, _BUDGET_EXCEEDED))
    if req.finished():
        tell_why(None, [req])
    else:
        _decided.append(ref(req))


def end_on_every_rank(result: Sequence[Any], self: Any) -> list[Any]:
    """AFTER hook on `Scheduler._poll_timeout_aborts`, whose result SGLang broadcasts.

    Asked for again until it has come about: SGLang skips a broadcast now and then
    (`--scheduler-recv-interval`).
    """
    from sglang.srt.managers.io_struct import AbortReq

    if not _decided:
        return list(result)
    decided = {found for each in _decided if (found := each()) is not None}
    ending = [req for req in decided & _held(self) if not _is_ending(req)]
    _decided[:] = [ref(req) for req in ending]
    aborts = [AbortReq(rid=req.rid, finished_reason=getattr(req, _REASON).to_json()) for req in ending]
    return [*result, *aborts]


def end_here(original: Callable[..., None], self: Any, recv_req: Any) -> None:
    """AROUND hook on `Scheduler.abort_request`, on every rank."""
    reason = recv_req.finished_reason or {}
    if reason.get("err_type") != _BUDGET_EXCEEDED:
        original(self, recv_req)
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for req in _held(self):
        if req.rid == recv_req.rid and not _is_ending(req):
            req.to_finish = FINISH_ABORT(reason["message"], reason["status_code"], _BUDGET_EXCEEDED)
            # Nothing more is taken for it.
            custom_params(req).pop(THRESHOLD, None)


def tell_why(self: Any, reqs: Iterable[Any], *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on `SchedulerOutputStreamer.stream_output`: a request that came to its own end before it
    could be ended has let go of its sets all the same."""
    for req in reqs:
        reason = getattr(req, _REASON, None)
        if reason is not None and req.finished():
            req.finished_reason = reason


def _held(scheduler: Any) -> set[Any]:
    """The requests that this rank works on or keeps waiting."""
    return {*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue, scheduler.chunked_req} - {None}


def _is_ending(req: Any) -> bool:
    return bool(req.finished() or req.to_finish is not None)
