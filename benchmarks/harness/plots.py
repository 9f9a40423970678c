"""Draw bar charts of benchmark results; `python -m benchmarks.harness.plots` redraws all charts.

Each bar shows a row's median ratio: how many times faster or smaller the row is than the table's first row.
The whisker spans the smallest to the largest ratio over all rounds. A dotted line shows the ratio that the
table's last row should reach.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.harness.result_files import FOLDER

__all__ = ["draw"]

_BASELINE, _BAR, _WHISKER, _TARGET = "#b8b8b8", "#2f6f9f", "#222222", "#b5442e"
# A chart whose largest ratio exceeds this number gets a logarithmic axis. On a linear axis, the bars of the
# small ratios would be too short to see.
_MAX_LINEAR_RATIO = 20
_WIDTH, _DPI = 8.0, 92  # 736 pixels, the width of the site's column
_TITLE_CHARS, _FOOTER_CHARS = 100, 125


def draw(path: Path) -> list[Path]:
    """Draw every picture that a result file names, and return the pictures' paths.

    The pictures are written beside the result file. Drawing needs matplotlib.
    """
    result = json.loads(path.read_text())
    panels: dict[str, list[dict[str, Any]]] = {}
    for table in result["tables"]:
        if table["picture"] is not None:
            panels.setdefault(table["picture"], []).append(table)
    return [_draw(path.with_name(f"{name}.png"), result, tables) for name, tables in panels.items()]


def _draw(path: Path, result: dict[str, Any], tables: list[dict[str, Any]]) -> Path:
    # Import matplotlib here, because only `make bench` installs it. `Figure` needs neither pyplot's global
    # state nor a display.
    from matplotlib.figure import Figure

    sizes = [len(table["rows"]) for table in tables]
    more_lines = sum(_title(table).count("\n") for table in tables)
    height = 0.3 * sum(sizes) + 0.8 * len(sizes) + 0.17 * more_lines + 0.5
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(len(tables), 1, height_ratios=[size + 0.6 for size in sizes], squeeze=False)
    for each, table in zip(axes.flat, tables, strict=True):
        _panel(each, table)
    figure.supxlabel(_measured_on(result), fontsize=8, color="#555555")
    # Leave matplotlib's version out of the file, so that the same tables always give the same file.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    return path


def _panel(axes: Any, table: dict[str, Any]) -> None:
    rows = table["rows"]
    ratios = [row["ratio"] for row in rows]
    medians = [ratio["median"] for ratio in ratios]
    largest, smallest = max(ratio["max"] for ratio in ratios), min(medians)
    places = range(len(rows))
    left = 0.0
    if largest > _MAX_LINEAR_RATIO:
        left = 0.5 * min(1.0, smallest)
        axes.set_xscale("log")
    # A logarithmic axis has no zero, so the bars start at the left edge of the axis.
    axes.barh(places, [m - left for m in medians], left=left, color=[_BASELINE] + [_BAR] * (len(rows) - 1))
    for place, row in zip(places, rows, strict=True):
        ratio, figure = row["ratio"], _short(row["figure"]["median"])
        if table["rounds"] > 1 and place:
            axes.plot([ratio["min"], ratio["max"]], [place, place], color=_WHISKER, linewidth=1, marker="|")
        text = f"{_short(ratio['median'])}×  ({figure} {table['unit']})"
        end = ratio["max"] if place else ratio["median"]
        offset = {"textcoords": "offset points", "xytext": (6, 0), "va": "center", "fontsize": 9}
        axes.annotate(text, (end, place), **offset)
    if table["target"] is not None:
        axes.axvline(table["target"], color=_TARGET, linewidth=0.8, linestyle=":")
    axes.set_yticks(places, [row["label"] for row in rows], fontsize=9)
    axes.invert_yaxis()
    # Leave room for the text to the right of the longest bar.
    axes.set_xlim(left, largest * (largest / left) ** 0.45 if left else largest * 1.45)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(_title(table), fontsize=10, loc="right")  # the labels' width varies
    axes.spines[["top", "right"]].set_visible(False)


def _title(table: dict[str, Any]) -> str:
    return textwrap.fill(f"{table['title']}: times {table['better']}", _TITLE_CHARS)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _measured_on(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    gpu = machine["gpu"]["name"] if machine["gpu"] else "no GPU"
    return textwrap.fill(
        f"{machine['cpu']}, {machine['cores']} cores, {gpu}; torch {versions['torch']};"
        f" {result['date']}, commit {versions['commit']}, load {machine['load']}",
        _FOOTER_CHARS,
    )


if __name__ == "__main__":
    for each in sorted(FOLDER.glob("*.json")):
        for drawn in draw(each):
            print(drawn.name)
