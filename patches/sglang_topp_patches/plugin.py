"""The entry point of the group `sglang.srt.plugins`: check the seams, then hook them.

SGLang calls `register` in the launcher and in every process that it starts, before they serve. Where a
seam does not hold, only the hooks that refuse and report are installed.
"""

from __future__ import annotations

import logging
import pkgutil

from sglang_topp_patches import http_app, request
from sglang_topp_patches.releases import installed
from sglang_topp_patches.seams import check_seams

__all__ = ["register"]


def register() -> None:
    """Check every seam and register the hooks; SGLang puts them in place when this returns."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    http_app.install()
    found = check_seams()
    if found.active:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request.extend_request_class(GenerateReqInput)
    for problem in found.problems:
        logging.getLogger(__name__).error("sglang-topp refuses candidate sets: %s", problem)
    for seam in installed()[1].seams:
        for hook in seam.hooks:
            if found.active or hook.always:
                function = pkgutil.resolve_name(f"{__package__}.{hook.function}")
                HookRegistry.register(seam.target, function, HookType[hook.kind])
