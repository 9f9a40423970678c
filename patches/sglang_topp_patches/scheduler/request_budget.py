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

from sglang_topp_patches.compat.releases import internals
from sglang_topp_patches.hooks import before
from sglang_topp_patches.memory.budget import budget, per_sample_refusal
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler_messages import KEY, PROMPT_KEY, Entry, custom_params

__all__ = ["admit", "charge", "end_without_set", "forget_aborted", "is_refused", "num_candidates", "refuse"]

_CANDIDATES = "sglang_topp_candidates"
_POSITIONS = "sglang_topp_positions"
_REFUSED = "sglang_topp_refused"


def admit(req: Any, process: SchedulerProcess) -> None:
    """Count a request that asks for sets among those whose candidates the scheduler holds.

    A request's `custom_params` may hold a reference to the request itself. This function replaces that
    reference with a weak reference, as SGLang itself does from 0.5.23 on. A strong reference would keep an
    aborted request and its sets in memory until a full garbage collection.
    """
    process.requests.add(req)
    custom = custom_params(req)
    if custom.get("__req__") is req:
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
    total, at = num_candidates(req) + candidates, getattr(req, _POSITIONS, 0) + positions
    setattr(req, _CANDIDATES, total)
    setattr(req, _POSITIONS, at)
    cost = custom_params(req).get(KEY, 1)
    if problem := per_sample_refusal(budget(), total * cost, at):
        refuse(req, problem, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def num_candidates(req: Any) -> int:
    """Return how many candidates a request has had so far, at all of its positions."""
    return getattr(req, _CANDIDATES, 0)


def is_refused(req: Any) -> bool:
    """Return whether a request is about to end with an error, and therefore gets no more sets."""
    return getattr(req, _REFUSED, False)


def refuse(req: Any, reason: str, status: HTTPStatus) -> None:
    """Drop a request's sets, and make the HTTP process end the request with an error.

    The scheduler extracts no more sets for the request.

    Args:
        req: SGLang's `Req`.
        reason: the error's message, a sentence.
        status: the error's HTTP status. The status must not be 500, because the HTTP process does not treat
            an `Entry` (the message for one token) with status 500 as a refusal.
    """
    refusal = Entry(None, reason, status)
    end_without_set(req)
    info = req.customized_info = req.customized_info or {}
    # SGLang sends only the elements of `info[KEY]` from index `send_token_offset` on. So add an element for
    # the next token to `info[KEY]`. If SGLang has not sent the list `info[PROMPT_KEY]` yet, SGLang sends this
    # list with the next token.
    info[KEY] = [refusal] * (max(len(info.get(KEY, ())), req.send_token_offset) + 1)
    rows = internals().prompt_rows()
    rows += [refusal] * max(1, len(info.get(PROMPT_KEY, ())))
    info[PROMPT_KEY] = rows


def end_without_set(req: Any) -> None:
    """Extract no more sets for a request, and make SGLang send the request's next token at once.

    This next token has no set. When the HTTP process receives a token without a set, the HTTP process ends
    the request with an error.
    """
    setattr(req, _REFUSED, True)
    # SGLang sends the tokens of a request without `stream` only in groups of 50, so turn `stream` on.
    req.stream = True
    req.sampling_params.stream_interval = 1
