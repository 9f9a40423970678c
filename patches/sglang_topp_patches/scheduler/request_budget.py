"""Count each request's candidates, and refuse a request that has too many for one sample.

To refuse a request, the scheduler stops extracting sets for the request, and sends an error message with the
request's next token. When the HTTP process receives the error message, it ends the request with an error. The
scheduler does not end the request itself: only one tensor-parallel rank knows that a request exceeded a
limit, but all ranks must end a request in the same step.
"""

from __future__ import annotations

import weakref
from http import HTTPStatus
from typing import Any

from sglang_topp_patches.hooks import before
from sglang_topp_patches.memory import LIST_FORM_COST, budget, per_sample_refusal
from sglang_topp_patches.request import sets_request
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.set_buffer import KEY, Problem, SetBuffer

__all__ = ["admit", "buffer_of", "charge", "end_without_set", "forget_aborted", "is_refused", "refuse"]


def buffer_of(req: Any) -> SetBuffer:
    """Return the request's `SetBuffer`, and begin one if it has none."""
    info = req.customized_info
    if info is None:
        info = req.customized_info = {}
    buffer: SetBuffer | None = info.get(KEY)
    if buffer is None:
        buffer = info[KEY] = SetBuffer()
    return buffer


def admit(req: Any, process: SchedulerProcess) -> None:
    """Count a request that asks for sets among those whose candidates the scheduler holds.

    A request's `custom_params` may hold a reference to the request itself. This function replaces that
    reference with a weak reference, as SGLang itself does from 0.5.23 on. A strong reference would keep an
    aborted request and its sets in memory until a full garbage collection.
    """
    process.requests.add(req)
    custom = req.sampling_params.custom_params
    if isinstance(custom, dict) and custom.get("__req__") is req:
        custom["__req__"] = weakref.proxy(req)


@before("sglang.srt.managers.scheduler.Scheduler.abort_request", state=SchedulerProcess)
def forget_aborted(process: SchedulerProcess, self: Any, recv_req: Any) -> None:
    """Count the candidates of a request no more that is aborted while it waits.

    SGLang sends no more of it, but an idle scheduler keeps its last batch, and so perhaps the request.
    """
    decode_queue = getattr(self, "disagg_decode_prealloc_queue", None)
    for req in (*self.waiting_queue, *getattr(decode_queue, "retracted_queue", ())):
        if recv_req.abort_all or req.rid.startswith(recv_req.rid):
            process.requests.discard(req)


def charge(req: Any, candidates: int, positions: int = 1) -> None:
    """Count a request's new candidates, and refuse the request if it has too many for one sample.

    Args:
        req: SGLang's `Req`.
        candidates: the number of candidates in the request's new sets. If the request drops sets, pass the
            number of dropped candidates as a negative number.
        positions: the number of token positions of the new sets. If the request drops sets, pass the number
            of dropped positions as a negative number.
    """
    buffer = buffer_of(req)
    buffer.num_candidates += candidates
    buffer.num_positions += positions
    cost = 1 if sets_request(req).is_base64 else LIST_FORM_COST
    if problem := per_sample_refusal(budget(), buffer.num_candidates * cost, buffer.num_positions):
        refuse(req, problem, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def is_refused(req: Any) -> bool:
    """Return whether a request is about to end with an error, and therefore gets no more sets."""
    buffer: SetBuffer | None = req.customized_info.get(KEY) if req.customized_info else None
    return buffer is not None and buffer.problem is not None


def refuse(req: Any, reason: str, status: HTTPStatus) -> None:
    """Drop a request's sets, and make the HTTP process end the request with an error.

    The scheduler extracts no more sets for the request.

    Args:
        req: SGLang's `Req`.
        reason: the error's message, a sentence.
        status: the error's HTTP status, other than 500, which stands for a missing set.
    """
    buffer_of(req).fail(Problem(reason, status))
    # SGLang sends the tokens of a request without `stream` only in groups of 50, so turn `stream` on.
    req.stream = True
    req.sampling_params.stream_interval = 1


def end_without_set(req: Any, reason: str) -> None:
    """End a request like `refuse`, because one of its sets is missing."""
    refuse(req, reason, HTTPStatus.INTERNAL_SERVER_ERROR)
