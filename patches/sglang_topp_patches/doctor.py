"""Build the report of `sglang-topp doctor`: whether this package works with the installed SGLang.

Like SGLang, `report` loads the plugin with `load_plugins`. That imports most of SGLang, which takes 20 s of a
core; the checks themselves take milliseconds.
"""

from __future__ import annotations

from sglang_topp_patches.all_hooks import SEAMS
from sglang_topp_patches.capabilities import environment_notes, environment_problems
from sglang_topp_patches.compat.releases import installed
from sglang_topp_patches.compat.seam_check import SeamCheck, status
from sglang_topp_patches.memory import budget

__all__ = ["report"]


def report(verbose: bool) -> tuple[bool, list[str]]:
    """Return two values: whether the installed SGLang can serve candidate sets, and the report's lines.

    Args:
        verbose: also list every function that is hooked or called, and why each refused feature is refused.
            Without it, the report of an SGLang that serves sets has at most five lines.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = status()
    seams = (seam for seam in SEAMS if seam.is_in(found.sglang_version))
    # On a release that is not supported, `status` checks nothing, and the reader wants to know what differs.
    checks = found.checks or tuple(SeamCheck(seam, seam.problem()) for seam in seams)
    num_good = sum(not check.problem for check in checks)
    lines = [
        f"SGLang {found.sglang_version}: {num_good} of the {len(checks)} functions that are hooked or called"
        " are as expected"
    ]
    for check in checks:
        if verbose or check.problem:
            lines.append(f"  {'FAILS' if check.problem else 'holds'}  {check.seam.target}")
            lines.append(f"         {check.problem or check.seam.purpose}")
    refused = installed()[1].refused
    limits = budget().to_dict()
    if verbose:
        lines += [f"refused: {feature}: {reason}" for feature, reason in refused.items()]
        lines += [f"{name}: {limit}" for name, limit in limits.items()]
    else:
        lines += [f"refused on this release (-v says why): {', '.join(refused)}"] if refused else []
        lines.append(f"limits: {', '.join(f'{name} {limit}' for name, limit in limits.items())}")
    problems = [*found.problems, *environment_problems()]
    lines += [f"problem: {problem}" for problem in problems]
    lines += [f"note: {note}" for note in environment_notes()]
    lines.append("the plugin does NOT hold: requests are refused" if problems else "the plugin holds")
    return not problems, lines
