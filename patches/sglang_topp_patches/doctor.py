"""Build the report of `sglang-topp doctor`: whether this package works with the installed SGLang.

Like SGLang, `report` loads the plugin with `load_plugins`.
"""

from __future__ import annotations

from sglang_topp_patches import refusal_reasons
from sglang_topp_patches.all_hooks import SEAMS
from sglang_topp_patches.compat.releases import installed
from sglang_topp_patches.compat.seam_check import SeamCheck, status
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
        seams = [seam for seam in SEAMS if seam.is_in(found.sglang_version)]
        checks = tuple(SeamCheck(seam, seam.problem()) for seam in seams)
        holding = sum(not check.problem for check in checks)
        lines.append(f"{holding} of the {len(checks)} functions that are hooked or called are as expected:")
    for check in checks:
        lines.append(f"  {'FAILS' if check.problem else 'holds'}  {check.seam.target}")
        lines.append(f"         {check.problem or check.seam.purpose}")
    lines += [f"refused: {feature}: {reason}" for feature, reason in installed()[1].refused.items()]
    problems = [*found.problems, *refusal_reasons.environment_problems()]
    lines += [f"problem: {problem}" for problem in problems]
    lines += [f"note: {note}" for note in refusal_reasons.environment_notes()]
    lines += [f"{name}: {limit}" for name, limit in budget().to_dict().items()]
    lines.append("the patch set does NOT hold: requests are refused" if problems else "the patch set holds")
    return not problems, lines
