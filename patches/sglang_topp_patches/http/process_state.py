"""HttpProcess: the state that the hooks of one HTTP process share, such as the served model's limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.capabilities import Capabilities
from sglang_topp_patches.disaggregation.serve_prefill_sets import PrefillServer
from sglang_topp_patches.hooks import after
from sglang_topp_patches.http.checkpoint_tensors import Checkpoint
from sglang_topp_patches.http.model_limit_checks import ModelLimits
from sglang_topp_patches.http_exception import CallEndedError
from sglang_topp_patches.memory import InFlight, busy_refusal

__all__ = ["HTTP_SERVER", "HttpProcess", "note_model", "note_server_args"]

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
"""The module that defines SGLang's HTTP server and application.

The hooks look the module up in `sys.modules`, because not every process imports SGLang's HTTP server."""


@dataclass
class HttpProcess:
    """The state that all hooks of one HTTP process share.

    Attributes:
        in_flight: the counter of all candidates that the HTTP process holds.
        prefill_server: the hooks of a prefill server, and the sets that no decode server has fetched yet.
        server_args: SGLang's `ServerArgs`, or None before the tokenizer manager exists.
        model: the served model's limits, or None before the tokenizer manager exists.
        checkpoint: the checkpoint that the engine started from, or None before the tokenizer manager exists.
        is_paused: returns whether generation is paused.
        is_guarded: whether `route_policy.Guard` runs before the routes of SGLang's HTTP server.
        scheduler_states: the plugin's status in each scheduler, as of the last `GET /server_info`. A
            scheduler without the plugin has None instead of a status.
    """

    in_flight: InFlight
    prefill_server: PrefillServer
    server_args: Any = None
    model: ModelLimits | None = None
    checkpoint: Checkpoint | None = None
    is_paused: Callable[[], bool] = lambda: False
    is_guarded: bool = False
    scheduler_states: list[dict[str, Any] | None] = field(default_factory=list)

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
