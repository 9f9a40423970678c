"""Build the report of `sglang-topp doctor`: whether the patch set works with the installed SGLang.

Like SGLang, `report` loads the plugin with `load_plugins`. The report has an entry for each seam, which is an
SGLang function that the patch set wraps or calls.
"""

from __future__ import annotations

from sglang_topp_patches import refusal_reasons
from sglang_topp_patches.compat.find_definitions import PackageSource
from sglang_topp_patches.compat.releases import installed
from sglang_topp_patches.compat.seam_check import SeamCheck, nearest, status
from sglang_topp_patches.memory.budget import budget

__all__ = ["report"]


def report() -> tuple[bool, list[str]]:
    """Return two values: whether the installed SGLang can serve candidate sets, and the report's lines."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = status()
    lines = [f"SGLang {found.sglang_version}"]
    checks = found.checks
    if found.sglang_version and not checks:
        name, checks = nearest()
        holding = sum(not check.problem for check in checks)
        lines.append(f"not a supported release; compared with {name}, the nearest:")
        lines.append(f"{holding} of its {len(checks)} seams hold")
    for check in checks:
        lines.append(f"  {'FAILS' if check.problem else 'holds'}  {check.seam.target}")
        lines.append(f"         {check.problem or check.seam.purpose}")
        lines += [f"         that name is at {place}" for place in _elsewhere(check)]
    lines += [f"refused: {feature}: {reason}" for feature, reason in installed()[1].refused.items()]
    problems = [*found.problems, *refusal_reasons.environment_problems()]
    lines += [f"problem: {problem}" for problem in problems]
    lines += [f"note: {note}" for note in refusal_reasons.environment_notes()]
    lines += [f"{name}: {limit}" for name, limit in budget().to_dict().items()]
    lines.append("the patch set does NOT hold: requests are refused" if problems else "the patch set holds")
    return not problems, lines


def _elsewhere(check: SeamCheck) -> tuple[str, ...]:
    """Return up to three other paths where SGLang defines the name of a missing function or class."""
    if not check.problem:
        return ()
    try:
        source = PackageSource.installed()
    except LookupError:
        return ()
    return () if source.has(check.seam.target) else source.elsewhere(check.seam.target)[:3]
