"""`HttpProcess`: what one HTTP process knows, such as the model's limits, and its `GET /server_info`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any

from sglang_topp.malloc_trim import LARGE_BYTES
from sglang_topp_patches.capabilities import Capabilities, environment_notes, status
from sglang_topp_patches.disaggregation import PrefillServer
from sglang_topp_patches.hooks import after
from sglang_topp_patches.http.checkpoint_tensors import Checkpoint
from sglang_topp_patches.http.model_limit_checks import ModelLimits
from sglang_topp_patches.memory import InFlight, budget, busy_refusal, trimmer
from sglang_topp_patches.releases import internals
from sglang_topp_patches.request import SetsRequest
from sglang_topp_patches.scheduler.requests import SchedulerProcess
from sglang_topp_patches.scheduler.sets import max_staging_bytes, staging_counts
from sglang_topp_patches.set_buffer import KEY

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


class Call:
    """One HTTP call to a route that takes a prompt, or one of `sglang.Engine`, until its answer was sent.

    Attributes:
        path: the route.
        is_served: whether the call may be answered with sets.
        is_openai: whether the sets go into the `sglext` of an OpenAI answer.
        requests: what each prompt of a body for `/generate` wants. `request_fields.normalize` takes it.
        fields: the plugin's fields of another call, which no class of SGLang has room for.
            `request_fields.set_fields` takes them. A call that still has `requests` or `fields` when it's
            answered is an error.
        samples: an `answer.Sample` for each sample whose sets are sent at the end (OpenAI routes), in order.
        num_choices: the number of samples in the answer. The first of `samples` may be warm-ups.
        candidates: the number of candidates that the call holds, for all samples together.
    """

    def __init__(
        self,
        path: str = "",
        *,
        is_served: bool = True,
        is_openai: bool = False,
        requests: tuple[SetsRequest, ...] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.is_served, self.is_openai = path, is_served, is_openai
        self.requests, self.fields = requests, fields
        self.samples: list[Any] = []
        self.num_choices = 0
        self.candidates = 0
        self._in_flight: InFlight | None = None

    def count_in(self, in_flight: InFlight) -> None:
        """Count the call's candidates in `in_flight`, the counter of this process, until `close`."""
        self._in_flight = in_flight

    def add(self, candidates: int) -> None:
        """Count candidates that arrived for the call, or that were freed if the number is negative."""
        if self._in_flight is not None:
            self.candidates += candidates
            self._in_flight.total += candidates

    def close(self) -> None:
        """Stop counting: the answer was sent or has failed. SGLang drops what arrives later."""
        if self._in_flight is not None:
            self._in_flight.total -= self.candidates
            if self.candidates * 8 >= LARGE_BYTES:
                trimmer.trim_soon()
        self._in_flight = None


current_call: ContextVar[Call | None] = ContextVar("sglang_topp_call", default=None)
"""The call that the current asyncio task handles, or None."""


@dataclass
class HttpProcess:
    """The state that all hooks of one HTTP process share.

    Attributes:
        in_flight: the counter of all candidates that the HTTP process holds.
        server_args: SGLang's `ServerArgs`, or None before the tokenizer manager exists.
        manager: SGLang's `TokenizerManager`, or None before it exists.
        model: the served model's limits, or None before the tokenizer manager exists.
        checkpoint: the checkpoint that the engine started from, or None before the tokenizer manager exists.
        is_guarded: whether `guard.Guard` runs before the routes of SGLang's HTTP server.
    """

    in_flight: InFlight = field(default_factory=lambda: InFlight(budget().max_candidates_in_flight))
    server_args: Any = None
    manager: Any = None
    model: ModelLimits | None = None
    checkpoint: Checkpoint | None = None
    is_guarded: bool = False

    @cached_property
    def prefill_server(self) -> PrefillServer:
        """The hooks of a prefill server, and the sets that no decode server has fetched yet."""
        return PrefillServer(self.in_flight)

    @cached_property
    def capabilities(self) -> Capabilities:
        """The features that this process can serve. Its first use is after SGLang has loaded its plugins."""
        return Capabilities.of(self.server_args)

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

    def report(self, internal_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what `GET /server_info` shows under `sglang_topp`: whether it is active, its problems, ...

        It has the limits of the memory and of the served model, against which the sidecar checks requests.

        Args:
            internal_states: what each scheduler reports, with the result of `report_state` under
            `sglang_topp`.
        """
        found, states = status().to_dict(), [state.get(KEY) for state in internal_states]
        problems = [*self.capabilities.problems]
        for rank, state in enumerate(states):
            if state is None:
                problems.append(f"scheduler {rank} runs without the plugin")
            else:
                problems += [f"scheduler {rank}: {problem}" for problem in state["problems"]]
        notes = [*environment_notes(), *(note for state in states if state for note in state["notes"])]
        stagings = [state["staging"] for state in states if state and "staging" in state]
        names = (*staging_counts, "max_bytes")
        return {
            **found,
            "active": not problems,
            "problems": problems,
            "is_paused": bool(self.manager and self.manager.is_pause),
            "notes": list(dict.fromkeys(notes)),
            "budget": {**asdict(budget()), "candidates_in_flight": self.in_flight.total},
            "staging": {name: sum(each[name] for each in stagings) for name in names},
            "model": None if self.model is None else asdict(self.model.model),
            # An unsupported SGLang release may lack the setting that `sanitizes_logits` reads.
            "sanitizes_logits": found["active"] and internals().sanitizes_logits(),
        }


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", always=True, state=HttpProcess)
def note_server_args(
    process: HttpProcess, result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any
) -> None:
    """Store what is known of the server, and guard an application that serves already."""
    process.server_args, process.manager = server_args, self
    process.__dict__.pop("capabilities", None)  # those without the arguments
    process.prefill_server.manager = self
    if status().active:
        process.model = ModelLimits.of(self, server_args)
        process.checkpoint = Checkpoint.of(self, server_args)
    if not process.is_guarded and (server := sys.modules.get(HTTP_SERVER)) is not None:
        server.app.middleware_stack = None  # the next call builds it again


@after("sglang.srt.managers.scheduler.Scheduler.get_internal_state", always=True, state=SchedulerProcess)
def report_state(process: SchedulerProcess, result: Any, self: Any, recv_req: Any) -> Any:
    """Add the plugin's status, under `sglang_topp`."""
    report = status().to_dict()
    served = process.capabilities_of(self)
    result.internal_state[KEY] = {
        **report,
        "active": not served.problems,
        "problems": list(served.problems),
        "notes": served.notes,
        "candidates_in_flight": process.candidates_in_flight,
        "staging": {**staging_counts, "max_bytes": max_staging_bytes(self)},
    }
    return result
