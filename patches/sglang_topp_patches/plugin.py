"""Plugin entry point (group `sglang.srt.plugins`): check the running SGLang, and register the hooks.

SGLang calls `register` in the launcher and in the engine's processes, before they serve. SGLang does not load
plugins in the HTTP workers of `--tokenizer-worker-num`, so `http.worker_app` loads the plugins there.
`register` checks every seam: each SGLang function that the patch set wraps or calls. If SGLang lacks or has
changed one of these functions, `register` registers only the hooks that refuse requests and report problems.
"""

from __future__ import annotations

import logging
import pkgutil
from dataclasses import dataclass
from functools import partial

from sglang_topp_patches.compat.releases import installed
from sglang_topp_patches.compat.seam_check import check_seams
from sglang_topp_patches.disaggregation.serve_prefill_sets import PrefillServer
from sglang_topp_patches.http import worker_app
from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.memory.budget import InFlight, budget
from sglang_topp_patches.scheduler.prefix_cache_per_weights import PrefixCache
from sglang_topp_patches.scheduler.process_state import SchedulerProcess

__all__ = ["ProcessState", "register"]


@dataclass(frozen=True)
class ProcessState:
    """The mutable state of one SGLang process.

    A `compat.seams.Hook` describes each hook. If the field `state` of this `Hook` names an attribute of
    `ProcessState`, the hook receives the value of that attribute as its first argument.

    Attributes:
        in_flight: counts the candidates that the process holds. `http.in_flight` and `scheduler.in_flight`
            refer to the same counter.
        http: the state for the hooks of an HTTP process.
        prefill_server: on a prefill server, keeps the candidate sets of prompts and first tokens until decode
            servers fetch these sets; the same object as `http.prefill_server`.
        scheduler: the state for the hooks of a scheduler process.
        prefix_cache: tracks which weights computed the KV in the scheduler's prefix cache; the same object as
            `scheduler.prefix_cache`.
    """

    in_flight: InFlight
    http: HttpProcess
    prefill_server: PrefillServer
    scheduler: SchedulerProcess
    prefix_cache: PrefixCache

    @classmethod
    def new(cls) -> ProcessState:
        """Return the state of a process that has served no request."""
        in_flight = InFlight(budget().max_candidates_in_flight)
        http = HttpProcess(in_flight, PrefillServer(in_flight))
        scheduler = SchedulerProcess(in_flight)
        return cls(in_flight, http, http.prefill_server, scheduler, scheduler.prefix_cache)


def register() -> None:
    """Check the SGLang functions that the patch set depends on, and register the hooks.

    SGLang installs the registered hooks after this function returns.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    worker_app.install()
    found = check_seams()
    for problem in found.problems:
        logging.getLogger(__name__).error("sglang-topp refuses candidate sets: %s", problem)
    state = ProcessState.new()
    for seam in installed()[1].seams:
        for hook in seam.hooks:
            if found.active or hook.always:
                function = pkgutil.resolve_name(f"{__package__}.{hook.function}")
                if hook.state:
                    function = partial(function, getattr(state, hook.state))
                HookRegistry.register(seam.target, function, HookType[hook.kind])
