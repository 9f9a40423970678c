"""Plugin entry point (group `sglang.srt.plugins`): check the running SGLang, and register the hooks.

SGLang calls `register` in the launcher and in the engine's processes, before they serve. It loads no plugins
in the HTTP workers of `--tokenizer-worker-num`: a worker imports the application that
`SGLANG_HTTP_SERVER_APP_PATH` names. `register` sets the variable to this module's `app`, whose import loads
the plugins.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib import import_module
from typing import Any

from sglang_topp_patches.hooks import Hook, Seam, seams_of

# The hooks on one function of SGLang are installed in this order, the innermost first.
_MODULES = (
    "http.process_state",
    "http.request_fields",
    "http.answer",
    "http.guard",
    "scheduler.requests",
    "scheduler.resume",
    "scheduler.host_copy_before_0_5_19",
    "scheduler.step",
    "scheduler.prompts",
    "scheduler.verification",
    "scheduler.routes",
    "scheduler.pipeline",
    "disaggregation",
    "releases",
)

_APP_PATH = "SGLANG_HTTP_SERVER_APP_PATH"
_USERS_APP_PATH = "SGLANG_TOPP_HTTP_SERVER_APP_PATH"
_DEFAULT_APP_PATH = "sglang.srt.entrypoints.http_server:app"


def register() -> None:
    """Check the SGLang functions that this package depends on, and register the hooks of this process.

    If SGLang lacks or has changed one of these functions, only the hooks that refuse requests and report
    problems are registered. SGLang installs the registered hooks after this function returns.

    Raises:
        SystemExit: the hooks cannot be registered. SGLang would swallow any other error, and serve without
        them.
    """
    try:
        if _is_detokenizer():
            return  # the hooks' modules would import a scheduler and an HTTP server
        if (path := os.environ.get(_APP_PATH, _DEFAULT_APP_PATH)) != f"{__name__}:app":
            os.environ |= {_USERS_APP_PATH: path, _APP_PATH: f"{__name__}:app"}
        _register(all_seams())
    except Exception as error:
        raise SystemExit(
            f"sglang-topp cannot patch SGLang: {type(error).__name__}: {error}; to serve without it,"
            " uninstall it or set SGLANG_PLUGINS to other plugins"
        ) from error


def __getattr__(name: str) -> Any:
    """Load the plugins, and return `app`, the application of an HTTP worker."""
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return pkgutil.resolve_name(os.environ.get(_USERS_APP_PATH, _DEFAULT_APP_PATH))


@cache
def all_seams() -> tuple[Seam, ...]:
    """Return everything of SGLang that this package depends on, in any release: what it hooks and calls."""
    return tuple(seams_of(import_module(f"{__package__}.{name}") for name in _MODULES))


def new_states() -> Mapping[type[Any], Any]:
    """Return the objects that the hooks of one process share, by their class, before any request."""
    from sglang_topp_patches.http.process_state import HttpProcess
    from sglang_topp_patches.scheduler.requests import SchedulerProcess

    http, scheduler = HttpProcess(), SchedulerProcess()
    return {type(each): each for each in (http, http.prefill_server, scheduler)}


def _register(seams: Sequence[Seam]) -> None:
    """Register the hooks among the seams."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_topp_patches.capabilities import check_seams, remember
    from sglang_topp_patches.releases import UNLISTED, installed

    states, found = new_states(), check_seams(seams)
    remember(found)
    for problem in found.problems:
        logging.getLogger(__name__).error("sglang-topp refuses candidate sets: %s", problem)
    name, release = installed()
    for hook in seams:
        # On an unlisted release, try every hook that refuses requests. SGLang logs those that do not fit.
        if not isinstance(hook, Hook) or not (release is UNLISTED or hook.is_in(name)):
            continue
        if found.active or hook.always:
            function = hook.function if hook.state is None else partial(hook.function, states[hook.state])
            HookRegistry.register(hook.target, function, HookType[hook.kind])


def _is_detokenizer() -> bool:
    """Return whether this is SGLang's detokenizer process. It sets its title before it loads plugins."""
    setproctitle = sys.modules.get("setproctitle")
    return setproctitle is not None and setproctitle.getproctitle() == "sglang::detokenizer"


def report(verbose: bool) -> tuple[bool, list[str]]:
    """Build the report of `sglang-topp doctor`: whether this package works with the installed SGLang.

    Like SGLang, it loads the plugin with `load_plugins`. That imports most of SGLang, which takes 20 s of a
    core; the checks themselves take milliseconds.

    Args:
        verbose: also list every function that is hooked or called, and why each refused feature is refused.
            Without it, the report of an SGLang that serves sets has at most five lines.

    Returns:
        whether the installed SGLang can serve candidate sets, and the report's lines.
    """
    from sglang.srt.plugins import load_plugins

    from sglang_topp_patches import capabilities, releases
    from sglang_topp_patches.memory import budget

    load_plugins()
    found = capabilities.status()
    seams = (seam for seam in all_seams() if seam.is_in(found.sglang_version))
    # On a release that is not supported, `status` checks nothing, and the reader wants to know what differs.
    checks = found.checks or tuple(capabilities.SeamCheck(seam, seam.problem()) for seam in seams)
    num_good = sum(not check.problem for check in checks)
    lines = [
        f"SGLang {found.sglang_version}: {num_good} of the {len(checks)} functions that are hooked or called"
        " are as expected"
    ]
    for check in checks:
        if verbose or check.problem:
            lines.append(f"  {'FAILS' if check.problem else 'holds'}  {check.seam.target}")
            lines.append(f"         {check.problem or check.seam.purpose}")
    refused = releases.installed()[1].refused
    limits = asdict(budget())
    if verbose:
        lines += [f"refused: {feature}: {reason}" for feature, reason in refused.items()]
    elif refused:
        lines.append(f"refused on this release (-v says why): {', '.join(refused)}")
    lines.append(f"limits: {', '.join(f'{name} {limit}' for name, limit in limits.items())}")
    problems = [*found.problems, *capabilities.environment_problems()]
    lines += [f"problem: {problem}" for problem in problems]
    lines += [f"note: {note}" for note in capabilities.environment_notes()]
    lines.append("the plugin does NOT hold: requests are refused" if problems else "the plugin holds")
    return not problems, lines
