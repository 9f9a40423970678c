"""All hooks of this package, and the state that they share in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_topp_patches import memory
from sglang_topp_patches.compat.internals import sglang_0_5_19_and_later
from sglang_topp_patches.disaggregation import fetch_prefill_sets, serve_prefill_sets
from sglang_topp_patches.hooks import seams_of
from sglang_topp_patches.http import (
    offline_engine,
    openai,
    process_state,
    prompt_token_ids_0_5_12,
    request_check_middleware_before_0_5_22,
    request_fields,
    resume,
    route_policy,
    server_info,
    sets_in_meta_info,
)
from sglang_topp_patches.memory import InFlight, budget
from sglang_topp_patches.scheduler import (
    extract_generated_sets,
    extract_prompt_sets,
    host_copy_before_0_5_19,
    pipeline_parallel,
    prefix_cache_per_weights,
    refuse_unchecked_requests,
    request_budget,
    requested_rows,
    sampler_candidates,
    speculative_verification,
)
from sglang_topp_patches.scheduler.process_state import SchedulerProcess

__all__ = ["SEAMS", "new_states"]

_MODULES = (
    # The hooks on one function of SGLang are installed in this order, the innermost first.
    *(process_state, request_fields, offline_engine, openai, sets_in_meta_info, server_info),
    *(request_check_middleware_before_0_5_22, route_policy, prompt_token_ids_0_5_12),
    *(refuse_unchecked_requests, request_budget, resume, requested_rows, sampler_candidates),
    *(host_copy_before_0_5_19, extract_generated_sets, extract_prompt_sets, speculative_verification),
    *(prefix_cache_per_weights, pipeline_parallel, fetch_prefill_sets, serve_prefill_sets),
    *(memory, sglang_0_5_19_and_later),
)

SEAMS = tuple(seams_of(_MODULES))
"""Everything of SGLang that this package depends on, in any release: what it hooks, and what it calls."""


def new_states() -> Mapping[type[Any], Any]:
    """Return the objects that the hooks of one process share, by their class, before any request."""
    in_flight = InFlight(budget().max_candidates_in_flight)
    prefill_server = serve_prefill_sets.PrefillServer(in_flight)
    http = process_state.HttpProcess(in_flight, prefill_server)
    scheduler = SchedulerProcess()
    return {type(each): each for each in (prefill_server, http, scheduler, scheduler.prefix_cache)}
