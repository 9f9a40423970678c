"""`GET /server_info` tells whether the patch set holds, here and in every scheduler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sglang_topp_patches import mode, model, routes
from sglang_topp_patches.budget import budget, in_flight
from sglang_topp_patches.payload import KEY
from sglang_topp_patches.releases import internals
from sglang_topp_patches.seams import status
from sglang_topp_patches.staging import counts

__all__ = ["add_status", "note_scheduler_states", "report_state"]

_scheduler_states: list[dict[str, Any] | None] = []


async def note_scheduler_states(original: Callable[[Any], Awaitable[list[Any]]], self: Any) -> list[Any]:
    """AROUND hook on `TokenizerManager.get_internal_state`, which SGLang awaits for every answer."""
    global _scheduler_states
    states = await original(self)
    _scheduler_states = [state.get(KEY) for state in states]
    return states


def add_status(result: dict[str, Any], server_args: Any, scheduler_info: Any) -> dict[str, Any]:
    """AFTER hook on `build_server_info`: `{"sglang_topp": {"active": ..., "problems": [...], ...}}`, with
    what the sidecar checks requests against."""
    report = status().to_dict()
    problems = [*report["problems"], *mode.refusals_of(server_args), *routes.refusals()]
    for rank, state in enumerate(_scheduler_states):
        if state is None:
            problems.append(f"scheduler {rank} runs without the patch set")
        else:
            problems += [f"scheduler {rank}: {problem}" for problem in state["problems"]]
    result[KEY] = {
        **report,
        "active": not problems,
        "problems": problems,
        "notes": list(mode.environment_notes()),
        "budget": {**budget().to_dict(), "candidates_in_flight": in_flight().total},
        "staging": _staging(),
        "model": model.to_record(),
        # Asked only of a release that is supported: another may not have the switch.
        "sanitizes_logits": report["active"] and internals().sanitizes_logits(),
    }
    return result


def _staging() -> dict[str, int]:
    """How often rows did not fit their staging area, in all schedulers that have been asked."""
    there = [state["staging"] for state in _scheduler_states if state and "staging" in state]
    return {name: sum(each[name] for each in there) for name in counts.to_dict()}


def report_state(result: Any, self: Any, recv_req: Any) -> Any:
    """AFTER hook on `Scheduler.get_internal_state`: a scheduler's own status, under the same key."""
    report = status().to_dict()
    problems = [*report["problems"], *mode.refusals_of(self.server_args)]
    result.internal_state[KEY] = {
        **report,
        "active": not problems,
        "problems": problems,
        "candidates_in_flight": in_flight().total,
        "staging": counts.to_dict(),
    }
    return result
