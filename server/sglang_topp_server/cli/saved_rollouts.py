"""`sglang-topp rollouts PATH`: summarize saved rollouts; `sglang-topp view PATH`: show them on one page.

Both commands read one Parquet row group at a time, and keep only counters.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_server.cli.common import Commands, add_command, count

if TYPE_CHECKING:
    from sglang_topp_client import ScoredRollout
    from sglang_topp_server.view.run_summary import RunSummary

_MAX_NAMES = 5
_EVERY_S = 0.2
_ERASE_LINE = "\r\x1b[K"


def add_parsers(commands: Commands) -> None:
    """Add both commands."""
    rollouts = add_command(
        commands,
        "rollouts",
        "check saved rollouts, and print a summary",
        _rollouts,
        examples=["sglang-topp rollouts step-0.parquet", "sglang-topp rollouts run/"],
    )
    view = add_command(
        commands,
        "view",
        "make one HTML page of saved rollouts, to open or to attach",
        _view,
        details="Several runs are overlaid.",
        examples=[
            "sglang-topp view step-0.parquet --tokenizer /models/qwen",
            "sglang-topp view step-10.parquet step-200.parquet -o steps.html",
        ],
    )
    what = "a file of save_rollouts, or a directory of RolloutWriter"
    rollouts.add_argument("path", help=what)
    view.add_argument("paths", metavar="PATH", nargs="+", help=what)
    view.add_argument("-o", "--output", metavar="FILE", help="the page (named after the first PATH)")
    view.add_argument(
        "--megabytes",
        type=count,
        default=20,
        help="up to how many the page holds rollouts token by token, those with the worst tokens first"
        " (%(default)s)",
    )
    view.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json or a model's directory, for the texts of tokens; else the page shows ids",
    )


def _rollouts(args: argparse.Namespace) -> int:
    """Print the summary of the rollouts at `args.path`.

    If a file is truncated or corrupt, summarize the rollouts that precede the damage, then raise the error.
    """
    from sglang_topp_client import load_scored_rollouts
    from sglang_topp_server.view.run_summary import RunSummary

    path = Path(args.path)
    files = list(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise InvalidInputError(
            f"path: got {args.path!r}, a directory without Parquet files; expected a directory that"
            " RolloutWriter wrote, or a file of save_rollouts"
        )
    summary, fault = RunSummary(), None
    try:
        for _, scored in load_scored_rollouts(path):
            summary.add(scored)
    except WireError as error:
        fault = error
    if fault is None or summary.num_rollouts:
        num_bytes = sum(file.stat().st_size for file in files)
        for name, what in _facts(summary, num_bytes, is_whole=fault is None):
            print(f"{name:16}{what}")
    if fault is not None:
        raise fault
    return 0


def _facts(summary: RunSummary, num_bytes: int, *, is_whole: bool) -> Iterator[tuple[str, str]]:
    sizes, mass = summary.metrics["sizes"], summary.metrics["mass"]
    yield "rollouts", f"{summary.num_rollouts:,}: {_named(summary.reasons)}"
    yield "tokens", f"{summary.num_tokens:,} generated, {summary.num_prompt_tokens:,} of prompts"
    yield "weights", f"{_named(summary.versions)} (tokens)"
    yield "candidate sets", f"{summary.num_sets:,}: {_named(summary.sources)} (rollouts)"
    if summary.num_appended:
        yield "appended", f"{summary.num_appended:,} tokens, which have no sets"
    if summary.num_missing:
        yield "missing sets", f"{summary.num_missing:,}: do not train on these tokens"
    if summary.num_sets:
        median, p99 = summary.size_quantile(0.5), summary.size_quantile(0.99)
        yield "sizes", f"mean {sizes.mean:.1f}, median {median}, p99 {p99}, largest {sizes.largest:,.0f}"
    if len(mass):
        yield "kept mass", f"mean {mass.mean:.4f}, least {mass.least:.4f}"
    per_token = f" ({num_bytes / summary.num_tokens:.1f} per generated token)" if summary.num_tokens else ""
    yield "bytes", f"{num_bytes:,}{per_token if is_whole else ''}"


def _named(counts: Counter[str]) -> str:
    """Format the `_MAX_NAMES` largest counts with their names, then say how many names are left out."""
    shown = ", ".join(f"{name or repr(name)} {number:,}" for name, number in counts.most_common(_MAX_NAMES))
    more = len(counts) - _MAX_NAMES
    return (shown or "none") + (f", … {more} more" if more > 0 else "")


def _view(args: argparse.Namespace) -> int:
    """Write the page of the rollouts at `args.paths`, and print its path and size."""
    from sglang_topp_server.view.build_page import page_of_files
    from sglang_topp_server.view.token_text import TokenTexts

    out = Path(args.output or f"{Path(os.path.abspath(args.paths[0])).stem}.html")
    if out.suffix == ".parquet" or out.is_dir():
        raise InvalidInputError(f"-o: got {out}, expected the name of an HTML file")
    texts = None if args.tokenizer is None else TokenTexts(args.tokenizer)
    progress = _with_progress_line if sys.stderr.isatty() else iter
    chunks = page_of_files(args.paths, megabytes=args.megabytes, tokenizer=texts, progress=progress)
    hidden = out.with_name(f".{out.name}.tmp")
    try:
        with hidden.open("wb") as file:
            file.writelines(chunks)
        num_bytes = hidden.stat().st_size
        hidden.replace(out)
    finally:
        hidden.unlink(missing_ok=True)
    print(f"{out}: {num_bytes / 1e6:.2f} MB")
    return 0


def _with_progress_line(rollouts: Iterator[ScoredRollout]) -> Iterator[ScoredRollout]:
    """Pass on the rollouts, and rewrite a progress line on stderr, at most every 0.2 s."""
    start = next_at = time.monotonic()
    num_tokens = 0
    try:
        for num_rollouts, scored in enumerate(rollouts, 1):
            num_tokens += len(scored.rollout.output_ids)
            if (now := time.monotonic()) >= next_at:
                next_at = now + _EVERY_S
                line = f"reading: {num_rollouts:,} rollouts, {num_tokens:,} tokens, {now - start:.0f} s"
                print(f"{_ERASE_LINE}{line}", end="", file=sys.stderr, flush=True)
            yield scored
    finally:
        print(_ERASE_LINE, end="", file=sys.stderr)
