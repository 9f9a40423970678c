"""Count each request's candidates against the limits on memory, and refuse a request that exceeds a limit.

To refuse a request, the scheduler stops extracting sets for the request, and sends an error message with the
request's next token. When the HTTP process receives the error message, it ends the request with an error. The
scheduler does not end the request itself: only one tensor-parallel rank knows that a request exceeded a
limit, but all ranks must end a request in the same step.

A request's candidates count against the limits (`memory.budget.Account`) from the request's first set until
the scheduler sends the request's last output, refuses the request, or aborts the request in a queue. If none
of these events occurs, the candidates count until SGLang's `Req` object is freed. A request with candidates
is in a queue only after SGLang has retracted it, which means that SGLang has freed the request's KV cache.
"""

from __future__ import annotations

import weakref
from http import HTTPStatus
from typing import Any

from sglang_topp_patches.compat.releases import internals
from sglang_topp_patches.hooks import before
from sglang_topp_patches.memory.budget import (
    LIST_FORM_COST,
    Account,
    InFlight,
    budget,
    per_sample_refusal,
    prompt_refusal,
)
from sglang_topp_patches.request import sets_request
from sglang_topp_patches.scheduler_messages import KEY, PROMPT_KEY, Entry

__all__ = [
    "admit",
    "charge",
    "close_account",
    "close_accounts_of_aborted",
    "end_without_set",
    "is_refused",
    "refuse",
    "refuse_prompt",
]

_IN_FLIGHT = "sglang_topp_in_flight"
_ACCOUNT = "sglang_topp_account"
_REFUSED = "sglang_topp_refused"


def admit(req: Any, in_flight: InFlight) -> None:
    """Attach `in_flight`, the counter of all candidates in flight, to the request, for later use by `charge`.

    A request's `custom_params` may hold a reference to the request itself. This function replaces that
    reference with a weak reference, as SGLang itself does from 0.5.23 on. A strong reference would keep an
    aborted request and its sets in memory until a full garbage collection.
    """
    setattr(req, _IN_FLIGHT, in_flight)
    custom = req.sampling_params.custom_params
    if isinstance(custom, dict) and custom.get("__req__") is req:
        custom["__req__"] = weakref.proxy(req)


def charge(req: Any, candidates: int, positions: int = 1) -> None:
    """Count a request's new candidates, and refuse the request if its candidates exceed a limit.

    If the request is finished, SGLang is about to send the request's sets. In this case, `charge` subtracts
    all candidates of the request from the count of candidates in flight.

    Args:
        req: SGLang's `Req`, for which `admit` has been called.
        candidates: the number of candidates in the request's new sets. If the request drops sets, pass the
            number of dropped candidates as a negative number.
        positions: the number of token positions of the new sets. If the request drops sets, pass the number
            of dropped positions as a negative number.
    """
    account: Account | None = getattr(req, _ACCOUNT, None)
    if account is None:
        reference = weakref.ref(req)
        in_flight: InFlight = getattr(req, _IN_FLIGHT)
        account = in_flight.open(lambda reason: _refuse_if_alive(reference(), reason))
        setattr(req, _ACCOUNT, account)
    account.add(candidates * (1 if sets_request(req).is_base64 else LIST_FORM_COST), positions)
    if problem := per_sample_refusal(budget(), account.candidates, account.positions):
        refuse(req, problem, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    if req.finished():
        account.close()


def close_account(req: Any) -> None:
    """Subtract all candidates of a request from the count of candidates in flight."""
    account: Account | None = getattr(req, _ACCOUNT, None)
    if account is not None:
        account.close()


@before("sglang.srt.managers.scheduler.Scheduler.abort_request")
def close_accounts_of_aborted(self: Any, recv_req: Any) -> None:
    """Call `close_account` for requests aborted in a queue.

    SGLang removes an aborted request from the waiting queue, and sends no more tokens for the request. But
    SGLang may keep a reference to the request for two more forward passes.
    """
    decode_queue = getattr(self, "disagg_decode_prealloc_queue", None)
    for req in (*self.waiting_queue, *getattr(decode_queue, "retracted_queue", ())):
        if recv_req.abort_all or req.rid.startswith(recv_req.rid):
            close_account(req)


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


def refuse_prompt(req: Any, *, is_busy: bool) -> None:
    """Refuse a request because the sets of its prompt exceed a limit.

    Args:
        req: SGLang's `Req`.
        is_busy: True if all requests together exceed the limit on candidates in flight; False if this request
            alone exceeds the limit per sample.
    """
    status = HTTPStatus.TOO_MANY_REQUESTS if is_busy else HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    refuse(req, prompt_refusal(budget(), is_busy=is_busy), status)


def end_without_set(req: Any) -> None:
    """Extract no more sets for a request, and make SGLang send the request's next token at once.

    This next token has no set. When the HTTP process receives a token without a set, the HTTP process ends
    the request with an error.
    """
    setattr(req, _REFUSED, True)
    close_account(req)
    # SGLang sends the tokens of a request without `stream` only in groups of 50, so turn `stream` on.
    req.stream = True
    req.sampling_params.stream_interval = 1


def _refuse_if_alive(req: Any, reason: str) -> None:
    if req is not None:
        refuse(req, reason, HTTPStatus.TOO_MANY_REQUESTS)
