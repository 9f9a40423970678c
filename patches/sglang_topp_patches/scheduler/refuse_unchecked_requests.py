"""Receive what a request wants in the scheduler, and refuse it if it cannot be served exactly.

A front end without the plugin (SGLang's Rust server, a gRPC server, or an HTTP worker that did not load the
plugin) passes a request's `custom_params` on unchecked, and would answer 200 without the sets. This check
therefore runs in the scheduler, behind every front end. It's also the only one that sees the sampling
parameters after SGLang has merged the server's defaults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang_topp.engine_contract import (
    INTERNAL_PARAMS,
    RESUMED,
    find_resume_problem,
)
from sglang_topp_patches.capabilities import nucleus_problem, request_problem
from sglang_topp_patches.hooks import Seam, around, before
from sglang_topp_patches.request import (
    DISTRIBUTION,
    NOTHING,
    NUCLEUS,
    SOURCE,
    THRESHOLD,
    Carried,
    SetsRequest,
    attach,
    sets_request,
)
from sglang_topp_patches.scheduler.prefix_cache_per_weights import outside_kv_problem, scores_prompt
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler.request_budget import admit

__all__ = ["CALLED", "check_request", "receive"]

CALLED = (
    Seam(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        "Refuse a request in the scheduler.",
        ("error_msg",),
    ),
)


@around("sglang.srt.managers.schedule_batch.Req.__init__", always=True)
def receive(
    original: Callable[..., None],
    self: Any,
    rid: str,
    origin_input_text: Any,
    origin_input_ids: Any,
    sampling_params: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Attach the `SetsRequest`, and restore the request's `custom_params`."""
    carried = sampling_params.custom_params
    if isinstance(carried, Carried):
        # With pipeline parallelism, the next stage gets the object that came, with the `Carried` in it.
        sampling_params = copy.copy(sampling_params)
        sampling_params.custom_params = carried.custom_params
        attach(self, carried.request)
    original(self, rid, origin_input_text, origin_input_ids, sampling_params, *args, **kwargs)


@before("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", always=True, state=SchedulerProcess)
def check_request(process: SchedulerProcess, self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a request that cannot be served exactly."""
    wanted = sets_request(req)
    if wanted is NOTHING:
        if name := _unchecked_field(req.sampling_params.custom_params):
            problem = process.capabilities_of(self).sets or _OTHER_ENTRY_POINT
            req.set_finish_with_abort(f"{name}: candidate sets are not served here: {problem}")
        return
    if wanted.field:
        admit(req, process)
    if req.to_finish is not None:
        return
    problem = _resume_problem(req, wanted)
    if not problem and wanted.field and (problem := _sets_problem(process, self, req, wanted)):
        problem = f"{wanted.field}: candidate sets are not served here: {problem}"
    if problem:
        attach(req, NOTHING)
        req.set_finish_with_abort(problem)


_OTHER_ENTRY_POINT = "it came through an entry point that cannot carry candidate sets; ask POST /generate"


def _unchecked_field(custom: Any) -> str:
    """Return the field by which a request that bypassed the HTTP checks asks the plugin for something."""
    if not isinstance(custom, dict):
        return ""
    for name in (NUCLEUS, THRESHOLD):
        if custom.get(name):
            return name
    if custom.get(SOURCE) not in (None, DISTRIBUTION):
        return SOURCE
    return RESUMED if custom.get(RESUMED) is not None else ""


def _resume_problem(req: Any, wanted: SetsRequest) -> str:
    """Return why a request cannot resume an answer exactly, and "" if it can."""
    if not wanted.resumed_tokens:
        return ""
    if len(req.origin_input_ids) < len(req.origin_input_ids_unpadded):
        return (
            f"{RESUMED}: got {wanted.resumed_tokens} with a prompt of {len(req.origin_input_ids_unpadded)}"
            f" tokens, of which --allow-auto-truncate keeps {len(req.origin_input_ids)}"
        )
    params = req.sampling_params
    defaults = type(params)()
    names = (name for name in defaults.__struct_fields__ if name not in INTERNAL_PARAMS)
    given = {name: value for name in names if (value := getattr(params, name)) != getattr(defaults, name)}
    problem = find_resume_problem(given)
    return f"sampling_params.{problem} (a default of this server)" if problem else ""


def _sets_problem(process: SchedulerProcess, scheduler: Any, req: Any, wanted: SetsRequest) -> str:
    """Return why the sets of a request cannot be exact, and "" if they can."""
    params, served = req.sampling_params, process.capabilities_of(scheduler)
    return (
        served.sets
        or request_problem(params.temperature)
        or (served.speculative if params.top_k != 1 else "")
        or _prompt_problem(scheduler, req)
        or (_nucleus_problem(params, wanted) if wanted.is_for_slime else "")
        or (served.sampler if wanted.is_from_sampler else "")
    )


def _nucleus_problem(params: Any, wanted: SetsRequest) -> str:
    """Return why the sampling parameters rule out the exact nuclei of `top_p`, and "" otherwise."""
    if params.top_p != wanted.threshold:
        return f"top_p: this server's default is {params.top_p}; write sampling_params.top_p into the request"
    return nucleus_problem(params.temperature, params.top_k, params.min_p)


def _prompt_problem(scheduler: Any, req: Any) -> str:
    """Return why the sets of a request's prompt cannot be exact, and "" otherwise."""
    if not scores_prompt(req):
        return ""
    asked = f"logprob_start_len: got {req.logprob_start_len}"
    # SGLang ignores `logprob_start_len` for requests in a streaming session.
    if getattr(getattr(req, "session", None), "streaming", False):
        return f"{asked} in a streaming session, where SGLang scores no prompt"
    problem = outside_kv_problem(scheduler)
    return problem and f"{asked}, and {problem}"
