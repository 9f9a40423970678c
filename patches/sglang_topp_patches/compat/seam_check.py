"""Check that the running SGLang has every function and class that this package depends on.

SGLang logs and swallows a plugin's exceptions, so this module records problems instead of raising errors. If
it finds one, the hooks in the HTTP process refuse every request for candidate sets. `GET /server_info` and
`sglang-topp doctor` list all problems.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from sglang_topp_patches.compat.releases import RELEASES, UNLISTED, installed
from sglang_topp_patches.hooks import Hook, Seam
from sglang_topp_patches.memory import budget_problem

__all__ = ["SeamCheck", "Status", "check_seams", "remember", "status"]


@dataclass(frozen=True)
class SeamCheck:
    """The result of the check of one seam. `problem` is empty if the seam is as expected."""

    seam: Seam
    problem: str = ""


@dataclass(frozen=True)
class Status:
    """Whether this process can serve candidate sets, and the problems if it cannot.

    Attributes:
        sglang_version: the version of the installed SGLang; empty if SGLang is not installed.
        checks: one `SeamCheck` per seam; empty if SGLang is not installed, or if the installed release is not
            supported.
        problems: every reason why this process refuses requests for sets; empty if the process serves sets.
    """

    sglang_version: str
    checks: tuple[SeamCheck, ...]
    problems: tuple[str, ...]

    @property
    def active(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that `GET /server_info` shows under `sglang_topp`."""
        return {
            "version": version("sglang-topp"),
            "active": self.active,
            # A function with several hooks has one check for each. Problems come last, so that they show.
            "seams": {
                check.seam.target: check.problem or "holds"
                for check in sorted(self.checks, key=lambda check: bool(check.problem))
            },
            "refused": {str(feature): reason for feature, reason in installed()[1].refused.items()},
            "problems": list(self.problems),
        }


def check_seams(seams: Iterable[Seam]) -> Status:
    """Check the seams of the installed SGLang release, whether or not hooks are installed."""
    name, release = installed()
    if not name:
        return Status("", (), ("SGLang is not installed",))
    if release is UNLISTED:
        supported = ", ".join(RELEASES)
        return Status(name, (), (f"SGLang {name} is not supported; supported: {supported}",))
    checks = tuple(SeamCheck(seam, seam.problem()) for seam in seams if seam.is_in(name))
    problems = [f"{check.seam.target}: {check.problem}" for check in checks if check.problem]
    return Status(name, checks, tuple(filter(None, [*problems, _patch_of_slime(), budget_problem()])))


def _patch_of_slime() -> str:
    """Return a message if slime's patch was applied to the installed SGLang, else an empty string.

    slime is a training framework. Its patch of the sampler renormalizes the log-probs of some requests before
    the hooks read them, and changes no signature that is checked. The checks of the signatures have imported
    the sampler's modules.
    """
    for name in ("sampler", "utils.logprob", "logprob_processor"):
        if hasattr(sys.modules.get(f"sglang.srt.layers.{name}"), "renorm_logprob_over_top_p"):
            return (
                f"sglang.srt.layers.{name} has renorm_logprob_over_top_p: this SGLang was changed by slime's"
                " sglang-top_p.patch, and its log-probs are not always those of the whole vocabulary; install"
                " SGLang without that patch file (this plugin answers return_top_p_token_ids itself)"
            )
    return ""


_found: Status | None = None


def remember(found: Status) -> None:
    """Keep the result of the check in `plugin.register`, for `status`."""
    global _found
    _found = found


@functools.cache
def status() -> Status:
    """Return the result of the check in `plugin.register`, and check that its hooks are in place.

    Call this function only after SGLang has loaded its plugins. The result is cached, because every request
    needs it.
    """
    if _found is None:
        problem = (
            "the plugin was not loaded in this process; do SGLANG_PLUGINS and SGLANG_PLATFORM allow it, and"
            " does SGLang's log show an error from it?"
        )
        return Status(installed()[0], (), (problem,))
    from sglang.srt.plugins.hook_registry import HookRegistry

    patched: set[str] = getattr(HookRegistry, "_patched", set())
    hooks = [check.seam for check in _found.checks if isinstance(check.seam, Hook)]
    # If the check finds a problem, the plugin installs only the hooks whose `always` is True.
    idle = {hook.target for hook in hooks if _found.active or hook.always} - patched
    problems = tuple(
        f"{target}: its hook is not in place; does SGLang's log show an error from it?"
        for target in sorted(idle)
    )
    return Status(_found.sglang_version, _found.checks, _found.problems + problems)
