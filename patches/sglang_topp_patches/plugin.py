"""Plugin entry point (group `sglang.srt.plugins`): check the running SGLang, and register the hooks.

SGLang calls `register` in the launcher and in the engine's processes, before they serve. SGLang does not load
plugins in the HTTP workers of `--tokenizer-worker-num`, so `http.worker_app` loads the plugins there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from sglang_topp_patches.compat.releases import UNLISTED, installed
from sglang_topp_patches.compat.seam_check import check_seams, remember
from sglang_topp_patches.hooks import Hook, Seam, seams_of

__all__ = ["register"]


def register() -> None:
    """Check the SGLang functions that this package depends on, and register the hooks of this process.

    If SGLang lacks or has changed one of these functions, only the hooks that refuse requests and report
    problems are registered. SGLang installs the registered hooks after this function returns.
    """
    if _is_detokenizer():
        # The other hooks' modules would import a scheduler and an HTTP server.
        from sglang_topp_patches import memory

        _register(seams_of((memory,)), {})
        return
    from sglang_topp_patches import all_hooks
    from sglang_topp_patches.http import worker_app

    worker_app.install()
    _register(all_hooks.SEAMS, all_hooks.new_states())


def _register(seams: Iterable[Seam], states: Mapping[type[Any], Any]) -> None:
    """Register the hooks among the seams.

    Args:
        seams: what the hooks of this process depend on.
        states: the objects that the hooks share, by their class.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = tuple(seams)
    found = check_seams(seams)
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
