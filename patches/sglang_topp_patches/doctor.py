"""`sglang-topp doctor`: load the plugin as SGLang would, and show every seam."""

from __future__ import annotations

from sglang_topp_patches.seams import status

__all__ = ["report"]


def report() -> tuple[bool, list[str]]:
    """Whether the patch set holds here, and the lines that say so, one per seam."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = status()
    lines = [f"SGLang {found.sglang_version}"]
    for check in found.checks:
        lines.append(f"  {'FAILS' if check.problem else 'holds'}  {check.seam.target}")
        lines.append(f"         {check.problem or check.seam.purpose}")
    lines += [f"problem: {problem}" for problem in found.problems]
    lines.append(
        "the patch set holds" if found.active else "the patch set does NOT hold: requests are refused"
    )
    return found.active, lines
