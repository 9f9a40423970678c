"""Report the plugin in `GET /server_info`: whether it is active, its problems, and its memory use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sglang_topp_patches.capabilities import environment_notes
from sglang_topp_patches.compat.releases import internals
from sglang_topp_patches.compat.seam_check import status
from sglang_topp_patches.hooks import after, around
from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.memory import budget
from sglang_topp_patches.scheduler import gpu_staging
from sglang_topp_patches.scheduler.process_state import SchedulerProcess, StagingCounts
from sglang_topp_patches.set_buffer import KEY

__all__ = ["add_status", "note_scheduler_states", "report_state"]


@around(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.get_internal_state",
    always=True,
    state=HttpProcess,
)
async def note_scheduler_states(
    process: HttpProcess, original: Callable[[Any], Awaitable[list[Any]]], self: Any
) -> list[Any]:
    """Keep the status that each scheduler reports.

    SGLang calls the hooked function to answer `GET /server_info`.
    """
    states = await original(self)
    process.scheduler_states = [state.get(KEY) for state in states]
    return states


@after("sglang.srt.utils.common.build_server_info", since="0.5.22", always=True, state=HttpProcess)
def add_status(
    process: HttpProcess, result: dict[str, Any], server_args: Any, scheduler_info: Any
) -> dict[str, Any]:
    """Add `{"sglang_topp": {"active": ..., "problems": [...], ...}}`.

    The field `sglang_topp` contains the memory limits and the limits of the served model. The sidecar checks
    requests against the memory limits and the model's limits.
    """
    report = status().to_dict()
    problems = [*process.problems()]
    for rank, state in enumerate(process.scheduler_states):
        if state is None:
            problems.append(f"scheduler {rank} runs without the plugin")
        else:
            problems += [f"scheduler {rank}: {problem}" for problem in state["problems"]]
    result[KEY] = {
        **report,
        "active": not problems,
        "problems": problems,
        "is_paused": process.is_paused(),
        "notes": list(environment_notes()),
        "budget": {**budget().to_dict(), "candidates_in_flight": process.in_flight.total},
        "staging": _staging(process.scheduler_states),
        "model": None if process.model is None else process.model.to_record(),
        # Call `sanitizes_logits` only if the plugin is active, because an unsupported SGLang release may
        # lack the setting that `sanitizes_logits` reads.
        "sanitizes_logits": report["active"] and internals().sanitizes_logits(),
    }
    return result


def _staging(scheduler_states: Sequence[dict[str, Any] | None]) -> dict[str, int]:
    """Return the sums over all schedulers of what they report of their staging areas."""
    there = [state["staging"] for state in scheduler_states if state and "staging" in state]
    names = (*StagingCounts().to_dict(), "max_bytes")
    return {name: sum(each[name] for each in there) for name in names}


@after("sglang.srt.managers.scheduler.Scheduler.get_internal_state", always=True, state=SchedulerProcess)
def report_state(process: SchedulerProcess, result: Any, self: Any, recv_req: Any) -> Any:
    """Add the plugin's status, under `sglang_topp`."""
    report = status().to_dict()
    problems = list(process.capabilities_of(self).problems)
    result.internal_state[KEY] = {
        **report,
        "active": not problems,
        "problems": problems,
        "candidates_in_flight": process.candidates_in_flight,
        "staging": {**process.staging.to_dict(), "max_bytes": gpu_staging.max_bytes(self)},
    }
    return result
