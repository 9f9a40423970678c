"""`HttpProcess`: what one HTTP process knows, such as the model's limits, and its `GET /server_info`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.capabilities import Capabilities, environment_notes, status
from sglang_topp_patches.disaggregation import PrefillServer
from sglang_topp_patches.hooks import after, around
from sglang_topp_patches.http.checkpoint_tensors import Checkpoint
from sglang_topp_patches.http.model_limit_checks import ModelLimits
from sglang_topp_patches.memory import InFlight, budget, busy_refusal
from sglang_topp_patches.releases import internals
from sglang_topp_patches.scheduler.requests import SchedulerProcess
from sglang_topp_patches.scheduler.sets import max_staging_bytes, staging_counts
from sglang_topp_patches.set_buffer import KEY

__all__ = [
    "HTTP_SERVER",
    "CallEndedError",
    "HttpProcess",
    "add_status",
    "note_model",
    "note_scheduler_states",
    "note_server_args",
    "report_state",
]

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
"""The module that defines SGLang's HTTP server and application.

The hooks look the module up in `sys.modules`, because not every process imports SGLang's HTTP server."""


class CallEndedError(ValueError):
    """An error that ends an HTTP call with the given status.

    SGLang turns a `CallEndedError`, which is a ValueError, into an error response with the status
    `status_code`. In a stream, SGLang sends an error event with the code `status_code`.

    Attributes:
        status_code: the HTTP status of the answer.
    """

    def __init__(self, problem: str, status_code: int = HTTPStatus.TOO_MANY_REQUESTS) -> None:
        super().__init__(problem)
        self.status_code = status_code


@dataclass
class HttpProcess:
    """The state that all hooks of one HTTP process share.

    Attributes:
        in_flight: the counter of all candidates that the HTTP process holds.
        server_args: SGLang's `ServerArgs`, or None before the tokenizer manager exists.
        model: the served model's limits, or None before the tokenizer manager exists.
        checkpoint: the checkpoint that the engine started from, or None before the tokenizer manager exists.
        is_paused: returns whether generation is paused.
        is_guarded: whether `route_policy.Guard` runs before the routes of SGLang's HTTP server.
        scheduler_states: the plugin's status in each scheduler, as of the last `GET /server_info`. A
            scheduler without the plugin has None instead of a status.
    """

    in_flight: InFlight = field(default_factory=lambda: InFlight(budget().max_candidates_in_flight))
    server_args: Any = None
    model: ModelLimits | None = None
    checkpoint: Checkpoint | None = None
    is_paused: Callable[[], bool] = lambda: False
    is_guarded: bool = False
    scheduler_states: list[dict[str, Any] | None] = field(default_factory=list)

    @cached_property
    def prefill_server(self) -> PrefillServer:
        """The hooks of a prefill server, and the sets that no decode server has fetched yet."""
        return PrefillServer(self.in_flight)

    def problems(self) -> tuple[str, ...]:
        """Return every reason why this process refuses requests for sets, or () if there is no reason."""
        return (*self.capabilities.problems, *self.route_problems())

    @cached_property
    def capabilities(self) -> Capabilities:
        """The features that this process can serve. Its first use is after SGLang has loaded its plugins."""
        return Capabilities.of(self.server_args)

    def route_problems(self) -> tuple[str, ...]:
        """Return an error message in a 1-tuple if SGLang's routes run without `Guard`, and () otherwise.

        `Guard` is the middleware that checks requests before the routes (`http.route_policy`). Without
        `Guard`, some routes would answer a request for sets without the sets.
        """
        module = sys.modules.get(HTTP_SERVER)
        # A process without a tokenizer manager serves no requests, even if it imports SGLang's HTTP server.
        if self.server_args is None or module is None:
            return ()
        if self.is_guarded or module.app.middleware_stack is None:
            return ()
        return ("SGLang's HTTP server began to serve before its routes could be guarded",)

    def check_room(self, *, is_streamed: bool) -> None:
        """Refuse a new request for sets while this process holds more candidates than fit.

        Raises:
            CallEndedError: there is no room, and the answer is streamed.
            HTTPException: there is no room, and the answer is not streamed.
        """
        from fastapi import HTTPException

        problem = busy_refusal(self.in_flight.total, self.in_flight.limit)
        if problem and is_streamed:
            raise CallEndedError(problem)
        # Do not raise `CallEndedError` here, because it is a ValueError. On `/generate`, SGLang before 0.5.17
        # answers every ValueError with 400, and ignores the error's `status_code`.
        if problem:
            raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, problem)

    def check_request(self, get: Callable[[str], Any]) -> None:
        """Raise InvalidInputError unless a request for candidate sets fits the served model.

        Args:
            get: a function that takes the name of a request field, and returns the field's value. The
                function returns the value that the caller sent, not SGLang's normalized value. If the caller
                did not send the field, the function returns None.

        Raises:
            InvalidInputError: a value does not fit the model. The error message names the field, the value,
                and the expected values.
        """
        if self.model is None:
            raise InvalidInputError("the model's sizes are not known in this process; nothing can be checked")
        self.model.check_request(get)


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", always=True, state=HttpProcess)
def note_server_args(
    process: HttpProcess, result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any
) -> None:
    """Store the server's arguments."""
    process.server_args = server_args
    process.is_paused = lambda: bool(self.is_pause)
    process.__dict__.pop("capabilities", None)  # those without the arguments
    process.prefill_server.manager = self


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", state=HttpProcess)
def note_model(
    process: HttpProcess, result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any
) -> None:
    """Store the model's limits and its checkpoint."""
    process.model = ModelLimits.of(self, server_args)
    process.checkpoint = Checkpoint.of(self, server_args)


# -- GET /server_info ----------------------------------------------------------------------------------------


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
    names = (*staging_counts, "max_bytes")
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
        "staging": {**staging_counts, "max_bytes": max_staging_bytes(self)},
    }
    return result
