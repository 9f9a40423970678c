"""Refuse requests that ask for candidate sets but bypassed the HTTP checks (`http.request_fields`).

Some front ends run without the patch set: SGLang's Rust server, a gRPC server, and an HTTP worker that did
not load the patch set. Such a front end passes a request's `custom_params` to the scheduler unchecked, and
would answer 200 without the sets. This check therefore runs in the scheduler, behind every front end. The
check also refuses a request if SGLang's default sampling parameters make its sets inexact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_topp_patches.capabilities import nucleus_problem, request_problem
from sglang_topp_patches.hooks import Seam, before
from sglang_topp_patches.scheduler.prefix_cache_per_weights import outside_kv_problem, scores_prompt
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler.request_budget import admit
from sglang_topp_patches.scheduler_messages import (
    FIELDS,
    KEY,
    NUCLEUS,
    SOURCE,
    THRESHOLD,
    asking_field,
    custom_params,
)

__all__ = ["CALLED", "check_request"]

CALLED = (
    Seam(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        "Refuse a request in the scheduler.",
        ("error_msg",),
    ),
)


@before("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", always=True, state=SchedulerProcess)
def check_request(process: SchedulerProcess, self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a request that cannot get exact sets.

    The hook also checks the sampling parameters, after SGLang has filled in the model's defaults. The checks
    in the HTTP process run before SGLang fills in the model's defaults.
    """
    custom = custom_params(req)
    field = asking_field(custom.get)
    if not field:
        return
    admit(req, process)
    if req.to_finish is not None:
        return
    params, served = req.sampling_params, process.capabilities_of(self)
    problem = (
        request_problem(params.temperature)
        or (served.speculative if params.top_k != 1 else "")
        or _prompt_problem(self, req)
        or _nucleus_problem(params, custom)
    )
    if KEY not in custom:
        problem = (
            served.sets
            or "it came through an entry point that cannot carry candidate sets; ask POST /generate"
        )
    elif field == SOURCE and served.sampler:
        problem = served.sampler
    if problem:
        for name in FIELDS:
            custom.pop(name, None)
        req.set_finish_with_abort(f"{field}: candidate sets are not served here: {problem}")


def _nucleus_problem(params: Any, custom: Mapping[str, Any]) -> str:
    """Return the reason if a request's sampling parameters rule out exact nuclei, and "" otherwise.

    The check applies only to requests with slime's field `return_top_p_token_ids`. These requests ask for
    nuclei at the threshold `top_p`.
    """
    if not custom.get(NUCLEUS):
        return ""
    if params.top_p != custom.get(THRESHOLD):
        return f"top_p: this server's default is {params.top_p}; write sampling_params.top_p into the request"
    return nucleus_problem(params.temperature, params.top_k, params.min_p)


def _prompt_problem(scheduler: Any, req: Any) -> str:
    """Return the reason if the sets of a request's prompt cannot be exact, and "" otherwise."""
    if not scores_prompt(req):
        return ""
    asked = f"logprob_start_len: got {req.logprob_start_len}"
    # SGLang ignores `logprob_start_len` for requests in a streaming session.
    if getattr(getattr(req, "session", None), "streaming", False):
        return f"{asked} in a streaming session, where SGLang scores no prompt"
    problem = outside_kv_problem(scheduler)
    return problem and f"{asked}, and {problem}"
