"""A request in the scheduler: receive what it wants, refuse what cannot be served, and keep what it has.

A front end without the plugin (SGLang's Rust server, a gRPC server, or an HTTP worker that did not load the
plugin) passes a request's `custom_params` on unchecked, and would answer 200 without the sets. So
`check_request` runs in the scheduler, behind every front end. It's also the only check that sees the sampling
parameters after SGLang has merged the server's defaults.

Later, a request ends with an error if a set is missing, or if it has too many candidates for one sample
(`refuse`). The scheduler then extracts no more sets for it, and sends the error with the request's next
token. The HTTP process ends the request when it receives the error. The scheduler does not end the request
itself: only one tensor-parallel rank knows of the error, but all ranks must end a request in the same step.

A request for the sets of prompt positions has a *scored prompt*, which must not read KV of older weights. A
weight push with `flush_cache=false` leaves such KV in the prefix cache, and requests in flight insert more of
it after the push. SGLang cannot flush the cache while requests are in flight, so a push with requests in
flight must use `flush_cache=false`. From a push until the next flush, each scored prompt therefore uses a
cache namespace (SGLang's `extra_key`) for the current weights. Prompts that are scored with the same weights
still share cached prefixes. With chunked prefill, later chunks of a prompt attend to the KV of earlier ones,
so `prompts` ends a request with an error if weights are pushed while its prompt is scored.

Weights are identified by the number of weight pushes so far, because weight versions are unreliable: a push
may have none, and SGLang before 0.5.19 does not tell the scheduler a push's weight version.
"""

from __future__ import annotations

import copy
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import torch

from sglang_topp.engine_contract import INTERNAL_PARAMS, RESUMED, find_resume_problem
from sglang_topp_patches.capabilities import Capabilities, nucleus_problem, request_problem
from sglang_topp_patches.hooks import Seam, after, around, before
from sglang_topp_patches.memory import LIST_FORM_COST, budget, sample_refusal
from sglang_topp_patches.releases import internals
from sglang_topp_patches.request import (
    DISTRIBUTION,
    NOTHING,
    NUCLEUS,
    ROUTES,
    SOURCE,
    THRESHOLD,
    Carried,
    SetsRequest,
    attach,
    sets_request,
)
from sglang_topp_patches.scheduler.resume import resumable_req
from sglang_topp_patches.set_buffer import KEY, PackedSet, Problem, SetBuffer

CALLED = (
    Seam(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        "Refuse a request in the scheduler.",
        ("error_msg",),
    ),
)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER_BEFORE_0_5_13 = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_PUSHES = [f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")]
_WEIGHTS = "sglang_topp_weights"
_EXTRA_KEY = "sglang_topp_extra_key"


@dataclass(frozen=True)
class Weights:
    """The identity of the weights that a forward pass uses.

    Attributes:
        push: the number of weight pushes before the forward pass.
        version: the version of the last weight push; empty if SGLang does not tell the scheduler the version.
    """

    push: int
    version: str


@dataclass
class SchedulerProcess:
    """The state of one scheduler process.

    Attributes:
        requests: SGLang's `Req` objects that ask for sets. A request that SGLang drops leaves.
        pushes: the number of weight pushes.
        has_only_current_weights: whether all cached KV was computed with the current weights.
    """

    requests: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    pushes: int = 0
    has_only_current_weights: bool = True
    # Each namespace's name contains this secret, so callers cannot guess it. A caller who could guess the
    # name of a future namespace could fill that namespace with KV of the old weights.
    _secret: str = field(default_factory=partial(secrets.token_hex, 16))
    _capabilities: Capabilities | None = None

    def capabilities_of(self, scheduler: Any) -> Capabilities:
        """Return what this process can serve, from SGLang's `Scheduler`."""
        if self._capabilities is None:
            self._capabilities = Capabilities.of(scheduler.server_args, scheduler)
        return self._capabilities

    @property
    def candidates_in_flight(self) -> int:
        """The number of candidates that this scheduler holds, because it has not sent them yet."""
        buffers = [(req.customized_info or {}).get(KEY) for req in self.requests]
        return sum(buffer.num_held for buffer in buffers if buffer is not None)

    @before(*(f"{_UPDATER}.{push}" for push in _PUSHES), since="0.5.13")
    @before(*(f"{_UPDATER}.{end}_weight_update" for end in ("begin", "end")), since="0.5.21")
    @before(*(f"{_UPDATER_BEFORE_0_5_13}.{push}" for push in _PUSHES), until="0.5.13")
    def note_push(self, updater: Any, *args: Any, **kwargs: Any) -> None:
        """Count a weight push.

        The method also counts a push that fails, because a failed push may have changed some weights. Between
        `begin_weight_update` and `end_weight_update`, other processes may write the weights directly (P2P or
        RDMA).
        """
        # Wait for the accelerator, which may still run the last forward pass with the old weights.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.pushes += 1
        self.has_only_current_weights = False

    @after("sglang.srt.managers.scheduler.Scheduler.flush_cache")
    def note_flush(self, is_flushed: bool, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Record that no KV of older weights is cached any more.

        SGLang does not flush the cache while a request holds KV.
        """
        if is_flushed:
            self.has_only_current_weights = True

    def current_weights(self) -> Weights:
        """Identify the weights that SGLang would use if a forward pass began now."""
        return Weights(self.pushes, internals().weight_version())

    @before("sglang.srt.managers.schedule_batch.Req.init_next_round_input")
    def choose_namespace(self, req: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
        """Choose the cache namespace of a request with a scored prompt or with routed experts.

        SGLang passes `tree_cache` when it tries to admit a waiting or retracted request. SGLang then looks up
        a cached prefix in the request's namespace. For the later chunks of a prompt, SGLang omits
        `tree_cache`, and the request keeps its namespace.

        Each scheduler process puts its own random secret into the names of namespaces, so the names differ
        between ranks. All ranks change namespaces at the same weight pushes, so the caches of all ranks hold
        the same prefixes.
        """
        if not (scores_prompt(req) or returns_routes(req)):
            return
        if tree_cache is None:
            if returns_routes(req) and weights_of(req) != self.current_weights():
                problem = "weights were pushed while the prompt was prefilled; send the request again"
                refuse(req, problem, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        setattr(req, _WEIGHTS, self.current_weights())
        given = vars(req).setdefault(_EXTRA_KEY, req.extra_key)
        req.extra_key = (
            given if self.has_only_current_weights else f"{given or ''}|{self._secret} {self.pushes}"
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
        if carried.request.resumed_tokens is not None:
            self.__class__ = resumable_req()
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
        or _prompt_problem(req, served.prompt_sets)
        or (_nucleus_problem(params, wanted) if wanted.is_for_slime else "")
        or (served.sampler if wanted.is_from_sampler else "")
        or (served.routes if returns_routes(req) else "")
    )


def _nucleus_problem(params: Any, wanted: SetsRequest) -> str:
    """Return why the sampling parameters rule out the exact nuclei of `top_p`, and "" otherwise."""
    if params.top_p != wanted.threshold:
        return f"top_p: this server's default is {params.top_p}; write sampling_params.top_p into the request"
    return nucleus_problem(params.temperature, params.top_k, params.min_p)


def _prompt_problem(req: Any, reason: str) -> str:
    """Return why the sets or the routed experts of a request's prompt cannot be exact, and "" otherwise.

    `reason` is that of the server (`Capabilities.prompt_sets`).
    """
    if not (scores_prompt(req) or returns_routes(req)):
        return ""
    asked = ROUTES if returns_routes(req) else f"logprob_start_len: got {req.logprob_start_len}"
    # A streaming session keeps its KV over weight pushes, and SGLang ignores `logprob_start_len` there.
    if getattr(getattr(req, "session", None), "streaming", False):
        return f"{asked} in a streaming session, where SGLang scores no prompt"
    return reason and f"{asked}, and {reason}"


def admit(req: Any, process: SchedulerProcess) -> None:
    """Count a request that asks for sets among those whose candidates the scheduler holds.

    A request's `custom_params` may hold a reference to the request itself. This function replaces that
    reference with a weak reference, as SGLang itself does from 0.5.23 on. A strong reference would keep an
    aborted request and its sets in memory until a full garbage collection.
    """
    process.requests.add(req)
    custom = req.sampling_params.custom_params
    if isinstance(custom, dict) and custom.get("__req__") is req:
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


def buffer_of(req: Any) -> SetBuffer:
    """Return the request's `SetBuffer`, and begin one if it has none."""
    info = req.customized_info
    if info is None:
        info = req.customized_info = {}
    buffer: SetBuffer | None = info.get(KEY)
    if buffer is None:
        buffer = info[KEY] = SetBuffer()
    return buffer


def add_sets(req: Any, output_index: int, found: Sequence[PackedSet | str], weight_version: str) -> None:
    """Append the sets of a request's new tokens. If one is missing, the request ends with an error.

    Args:
        req: SGLang's `Req`.
        output_index: the index of the first new token in the request's output.
        found: each token's set, or the reason why it is missing.
        weight_version: the version of the weights that drew the tokens.
    """
    buffer = buffer_of(req)
    if output_index < buffer.end:
        # A prefill server that gives its slot to others (`optimistic_release_and_requeue`) prefills the
        # request again, and draws its first token anew. Drop the first attempt's sets.
        buffer.truncate(output_index)
    elif output_index > buffer.end:
        found = ["a token became visible without passing through the sampler"]
    for packed in found:
        if isinstance(packed, str):
            return refuse(req, f"no candidate set at position {buffer.end}: {packed}")
        buffer.append(packed, weight_version)
    refuse_too_many(req)


def refuse_too_many(req: Any) -> None:
    """Refuse a request that has too many candidates for one sample."""
    buffer = buffer_of(req)
    candidates = buffer.num_candidates * (1 if sets_request(req).is_base64 else LIST_FORM_COST)
    if candidates > budget().max_candidates_per_sample:
        problem = sample_refusal(budget(), candidates, buffer.num_positions)
        refuse(req, problem, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def is_refused(req: Any) -> bool:
    """Return whether a request is about to end with an error, and therefore gets no more sets."""
    buffer: SetBuffer | None = req.customized_info.get(KEY) if req.customized_info else None
    return buffer is not None and buffer.problem is not None


def refuse(req: Any, reason: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR) -> None:
    """Drop a request's sets, and make the HTTP process end the request with an error.

    Args:
        req: SGLang's `Req`.
        reason: the error's message, a sentence.
        status: the error's HTTP status. 500 stands for a missing set.
    """
    buffer_of(req).fail(Problem(reason, status))
    # SGLang sends the tokens of a request without `stream` only in groups of 50, so turn `stream` on.
    req.stream = True
    req.sampling_params.stream_interval = 1


def weights_of(req: Any) -> Weights | None:
    """Return the `Weights` that the engine had when the prefill of the request's prompt began.

    The result is None before the prefill, and for a request that needs no cache namespace.
    """
    return getattr(req, _WEIGHTS, None)


def scores_prompt(req: Any) -> bool:
    """Return whether a request asks for the sets of prompt positions."""
    return bool(sets_request(req).threshold and 0 <= req.logprob_start_len < len(req.origin_input_ids))


def returns_routes(req: Any) -> bool:
    """Return whether a request for sets asks for the experts that its tokens were routed to."""
    return bool(sets_request(req).field and req.return_routed_experts)
