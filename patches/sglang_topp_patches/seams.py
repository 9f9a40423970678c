"""Does the running SGLang still have what the patch set stands on? Fail closed where it does not.

SGLang logs and swallows what a plugin raises, so nothing here raises: what was found is recorded, the
request hooks refuse the feature while a problem is on record, and `GET /server_info` and
`sglang-topp doctor` report it.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from sglang_topp_patches.budget import budget_problem
from sglang_topp_patches.releases import RELEASES, UNLISTED, Release, installed
from sglang_topp_patches.seam_groups import Seam

__all__ = ["SeamCheck", "Status", "check_seams", "difference", "nearest", "status"]


@dataclass(frozen=True)
class SeamCheck:
    """What was found at one seam; `problem` is empty where it holds."""

    seam: Seam
    problem: str = ""


@dataclass(frozen=True)
class Status:
    """What is known about the patch set in this process.

    Attributes:
        sglang_version: the installed SGLang, or empty.
        checks: one per seam; empty where the release is not supported.
        problems: every reason why the feature is refused; empty where it is served.
    """

    sglang_version: str
    checks: tuple[SeamCheck, ...]
    problems: tuple[str, ...]

    @property
    def active(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """What `GET /server_info` shows under `sglang_topp`."""
        return {
            "version": version("sglang-topp"),
            "active": self.active,
            "seams": {check.seam.target: check.problem or "holds" for check in self.checks},
            "refused": {str(feature): reason for feature, reason in installed()[1].refused.items()},
            "problems": list(self.problems),
        }


def check_seams() -> Status:
    """Look at every seam of the installed SGLang release, whether hooks are in place or not."""
    name, release = installed()
    if not name:
        return Status("", (), ("SGLang is not installed",))
    if release is UNLISTED:
        supported = ", ".join(RELEASES)
        return Status(name, (), (f"SGLang {name} is not supported; supported: {supported}",))
    checks = _checks(release)
    problems = [f"{c.seam.target}: {c.problem}" for c in checks if c.problem]
    return Status(name, checks, tuple(filter(None, [*problems, budget_problem()])))


def nearest() -> tuple[str, tuple[SeamCheck, ...]]:
    """The listed release that the installed SGLang, itself not listed, has the most seams of, and what was
    found at each of them."""
    found = {name: _checks(release) for name, release in RELEASES.items()}
    best = min(found, key=lambda name: sum(bool(check.problem) for check in found[name]))
    return best, found[best]


def _checks(release: Release) -> tuple[SeamCheck, ...]:
    return tuple(SeamCheck(seam, _problem(seam)) for seam in release.seams)


@functools.cache
def status() -> Status:
    """`check_seams`, and whether this process's hooks are in place at each of them.

    Call it only once SGLang has loaded its plugins: the first answer is kept, because every request
    asks.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = check_seams()
    patched: set[str] = getattr(HookRegistry, "_patched", set())
    idle = [c.seam.target for c in found.checks if c.seam.hooks and c.seam.target not in patched]
    problems = found.problems + tuple(
        f"{target}: its hook is not in place; is the plugin allowed by SGLANG_PLUGINS, and does SGLang's log"
        " show an error from it?"
        for target in idle
    )
    return Status(found.sglang_version, found.checks, problems)


def _problem(seam: Seam) -> str:
    try:
        target = pkgutil.resolve_name(seam.target)
    except Exception as error:  # an import that fails in any way is a seam that does not hold
        return f"not found ({type(error).__name__}: {error})"
    try:
        names = tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError) as error:
        return f"has no signature to check ({error})"
    return difference(seam, names)


def difference(seam: Seam, names: tuple[str, ...]) -> str:
    """How what stands at a seam, and takes `names`, differs from what the hooks rely on; or nothing."""
    missing = [name for name in seam.parameters if name not in names]
    if missing:
        return f"takes ({', '.join(names)}), expected {', '.join(missing)} among them"
    order = [names.index(name) for name in seam.parameters]
    if order != sorted(order):
        return f"takes ({', '.join(names)}), expected the order {', '.join(seam.parameters)}"
    return ""
