"""Check that the running SGLang has every seam: each SGLang function that the patch set wraps or calls.

SGLang logs and swallows a plugin's exceptions, so this module records problems instead of raising errors. If
this module finds a problem, the hooks in the HTTP process refuse every request for candidate sets.
`GET /server_info` and `sglang-topp doctor` list all problems that this module records.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from sglang_topp_patches.compat.releases import RELEASES, UNLISTED, Release, installed
from sglang_topp_patches.compat.seams import Seam
from sglang_topp_patches.memory.budget import budget_problem

__all__ = ["SeamCheck", "Status", "check_seams", "difference", "nearest", "status"]


@dataclass(frozen=True)
class SeamCheck:
    """The result of the check of one seam.

    A seam is an SGLang function or class. `problem` is empty if the check succeeded.
    """

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
            "seams": {check.seam.target: check.problem or "holds" for check in self.checks},
            "refused": {str(feature): reason for feature, reason in installed()[1].refused.items()},
            "problems": list(self.problems),
        }


def check_seams() -> Status:
    """Check every seam of the installed SGLang release, whether or not hooks are installed."""
    name, release = installed()
    if not name:
        return Status("", (), ("SGLang is not installed",))
    if release is UNLISTED:
        supported = ", ".join(RELEASES)
        return Status(name, (), (f"SGLang {name} is not supported; supported: {supported}",))
    checks = _checks(release)
    problems = [f"{c.seam.target}: {c.problem}" for c in checks if c.problem]
    return Status(name, checks, tuple(filter(None, [*problems, _patch_of_slime(), budget_problem()])))


def nearest() -> tuple[str, tuple[SeamCheck, ...]]:
    """Return the supported release that is most like the installed SGLang, and one check per seam.

    The most similar release is the one with the fewest failed checks.
    """
    found = {name: _checks(release) for name, release in RELEASES.items()}
    best = min(found, key=lambda name: sum(bool(check.problem) for check in found[name]))
    return best, found[best]


def _patch_of_slime() -> str:
    """Return a message if slime's patch was applied to the installed SGLang, else an empty string.

    slime is a training framework. slime's patch of the sampler renormalizes the log-probs of some requests
    before the hooks read the log-probs. The checks of the signatures do not detect slime's patch.
    """
    for module in ("sampler", "utils.logprob", "logprob_processor"):
        try:
            pkgutil.resolve_name(f"sglang.srt.layers.{module}:renorm_logprob_over_top_p")
        except (ImportError, AttributeError):
            continue
        return (
            f"sglang.srt.layers.{module} has renorm_logprob_over_top_p: this SGLang was changed by slime's"
            " sglang-top_p.patch, and its log-probs are not always those of the whole vocabulary; install"
            " SGLang without that patch file (this plugin answers return_top_p_token_ids itself)"
        )
    return ""


def _checks(release: Release) -> tuple[SeamCheck, ...]:
    return tuple(SeamCheck(seam, _problem(seam)) for seam in release.seams)


@functools.cache
def status() -> Status:
    """Check every seam, and check whether this process has installed the hooks.

    Call this function only after SGLang has loaded its plugins. The function caches its first result, because
    every request needs the status.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = check_seams()
    patched: set[str] = getattr(HookRegistry, "_patched", set())
    # If `check_seams` finds a problem, the plugin installs only the hooks whose `always` is True.
    expected = [c.seam.target for c in found.checks if any(found.active or h.always for h in c.seam.hooks)]
    idle = [target for target in expected if target not in patched]
    problems = found.problems + tuple(
        f"{target}: its hook is not in place; do SGLANG_PLUGINS and SGLANG_PLATFORM allow the plugin, and"
        " does SGLang's log show an error from it?"
        for target in idle
    )
    return Status(found.sglang_version, found.checks, problems)


def _problem(seam: Seam) -> str:
    try:
        target = pkgutil.resolve_name(seam.target)
    except Exception as error:  # importing a module of SGLang may raise any error
        cause = _import_error(seam.target) or error
        return f"not found ({type(cause).__name__}: {cause})"
    try:
        names = tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError) as error:
        return f"has no signature to check ({error})"
    return difference(seam, names)


def _import_error(target: str) -> ImportError | None:
    """Return the ImportError that a module in the dotted path `target` raises during its import, or None.

    If a dependency of a module is missing, the module raises an ImportError. `pkgutil.resolve_name` ignores
    this ImportError, and raises an AttributeError about the module's parent instead.
    """
    for name in accumulate(target.split("."), "{}.{}".format):
        try:
            importlib.import_module(name)
        except ImportError as error:
            is_no_module = isinstance(error, ModuleNotFoundError) and error.name == name
            return None if is_no_module else error
    return None


def difference(seam: Seam, names: tuple[str, ...]) -> str:
    """Return how a function's parameter names differ from those that `seam` expects, or an empty string."""
    missing = [name for name in seam.parameters if name not in names]
    if missing:
        return f"takes ({', '.join(names)}), expected {', '.join(missing)} among them"
    order = [names.index(name) for name in seam.parameters]
    if order != sorted(order):
        return f"takes ({', '.join(names)}), expected the order {', '.join(seam.parameters)}"
    return ""
