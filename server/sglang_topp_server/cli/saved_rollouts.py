"""`sglang-topp rollouts PATH`: summarize saved rollouts; `sglang-topp view PATH`: show them on one page.

Both commands read one Parquet row group at a time, and keep only counters.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_server.cli.common import Commands, add_command, count

if TYPE_CHECKING:
    from sglang_topp_client import Rollout

__all__ = ["add_parsers"]

_MAX_NAMES = 5
_EVERY_S = 0.2


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
        examples=[
            "sglang-topp view step-0.parquet --tokenizer /models/qwen",
            "sglang-topp view run/ -o run.html --rollouts 200",
        ],
    )
    for parser in (rollouts, view):
        parser.add_argument("path", help="a file of save_rollouts, or a directory of RolloutWriter")
    view.add_argument("-o", "--output", metavar="FILE", help="the page (named after PATH, with .html)")
    view.add_argument(
        "--rollouts",
        type=count,
        default=64,
        help="how many the page holds token by token, those with the worst tokens first (%(default)s)",
    )
    view.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json or a model's directory, for the texts of tokens; else the page shows ids",
    )


def _rollouts(args: argparse.Namespace) -> int:
    _print_summary(args.path)
    return 0


def _view(args: argparse.Namespace) -> int:
    _write_page(args.path, args.output, max_detailed=args.rollouts, tokenizer=args.tokenizer)
    return 0


def _print_summary(path: str) -> None:
    """Print the summary of the rollouts at `path`.

    If a file is truncated or corrupt, summarize the rollouts that precede the damage, then raise the error.

    Raises:
        InvalidInputError: a directory has no Parquet files.
        WireError: a file is truncated or corrupt; the error names the file.
        OSError: the path cannot be read.
    """
    from sglang_topp_client import load_rollouts

    if os.path.isdir(path) and not _parquet_files(path):
        raise InvalidInputError(
            f"path: got {path!r}, a directory without Parquet files; expected a directory that RolloutWriter"
            " wrote, or a file of save_rollouts"
        )
    summary = _Summary()
    fault = None
    try:
        for rollout in load_rollouts(path):
            summary.add(rollout)
    except WireError as error:
        fault = error
    if fault is None or summary.num_rollouts:
        print("\n".join(summary.lines(_num_bytes(path), is_whole=fault is None)))
    if fault is not None:
        raise fault


def _num_bytes(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in _parquet_files(path))


def _parquet_files(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return [entry for entry in entries if entry.name.endswith(".parquet")]


class _Summary:
    """Counters of rollouts, tokens, and candidate sets, for the summary that the command prints."""

    def __init__(self) -> None:
        self.num_rollouts = 0
        self._num_prompt = self._num_output = self._num_empty = 0
        self._reasons: Counter[str] = Counter()
        self._weights: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._sizes = np.zeros(0, np.int64)
        self._mass_sum, self._mass_least, self._num_masses = 0.0, np.inf, 0

    def add(self, rollout: Rollout) -> None:
        num_tokens = len(rollout.output_ids)
        self.num_rollouts += 1
        self._num_prompt += len(rollout.prompt_ids)
        self._num_output += num_tokens
        self._reasons[rollout.finish_reason] += 1
        for version, number in rollout.weight_spans or ((rollout.weight_version or "unknown", num_tokens),):
            self._weights[version] += number
        if rollout.candidates is None:
            self._sources["no sets"] += 1
        else:
            self._sources[rollout.top_logprobs_source or "another source"] += 1
            self._add_sets(rollout.candidates)

    def _add_sets(self, sets: CandidateSets) -> None:
        is_filled = sets.sizes > 0
        self._num_empty += len(sets) - int(np.count_nonzero(is_filled))
        counts = np.bincount(sets.sizes[is_filled], minlength=len(self._sizes))
        counts[: len(self._sizes)] += self._sizes
        self._sizes = counts
        if sets.has_logprobs and is_filled.any():
            masses = np.exp(sets.logprob_sum[is_filled].astype(np.float64))
            self._mass_sum += float(masses.sum())
            self._mass_least = min(self._mass_least, float(masses.min()))
            self._num_masses += len(masses)

    def lines(self, num_bytes: int, *, is_whole: bool) -> list[str]:
        num_sets = int(self._sizes.sum())
        rows = [
            ("rollouts", f"{self.num_rollouts:,}: {_named(self._reasons)}"),
            ("tokens", f"{self._num_output:,} generated, {self._num_prompt:,} of prompts"),
            ("weights", f"{_named(self._weights)} (tokens)"),
            ("candidate sets", f"{num_sets:,}: {_named(self._sources)} (rollouts)"),
        ]
        if self._num_empty:
            rows.append(("empty sets", f"{self._num_empty:,} (appended tokens)"))
        if num_sets:
            total = int(self._sizes @ np.arange(len(self._sizes)))
            rows.append(
                (
                    "sizes",
                    f"mean {total / num_sets:.1f}, median {self._quantile(0.5)}, p99 {self._quantile(0.99)},"
                    f" largest {len(self._sizes) - 1:,}",
                )
            )
        if self._num_masses:
            mean = self._mass_sum / self._num_masses
            rows.append(("kept mass", f"mean {mean:.4f}, least {self._mass_least:.4f}"))
        per_token = ""
        if is_whole and self._num_output:
            per_token = f" ({num_bytes / self._num_output:.1f} per generated token)"
        rows.append(("bytes", f"{num_bytes:,}{per_token}"))
        return [f"{name:16}{what}" for name, what in rows]

    def _quantile(self, q: float) -> int:
        """Return the `q`-quantile of the set sizes, without interpolation."""
        seen = np.cumsum(self._sizes)
        return int(np.searchsorted(seen, q * seen[-1]))


def _named(counts: Mapping[str, int]) -> str:
    """Format the `_MAX_NAMES` largest counts with their names, then say how many names are left out."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name or repr(name)} {number:,}" for name, number in ranked[:_MAX_NAMES])
    more = len(ranked) - _MAX_NAMES
    return (shown or "none") + (f", … {more} more" if more > 0 else "")


def _write_page(path: str, target: str | None, *, max_detailed: int, tokenizer: str | None) -> None:
    """Write the page, and print its path and size.

    Args:
        path: a file written by `save_rollouts`, or a directory written by `RolloutWriter`.
        target: the HTML file, which is replaced if it exists. If `target` is None, the function writes
            to the working directory, and names the file after `path`, with .html as the suffix.
        max_detailed: how many rollouts the page shows token by token.
        tokenizer: a `tokenizer.json`, or a directory that holds one.

    Raises:
        InvalidInputError: there are no rollouts, or the tokenizer cannot be read.
        WireError: a file is truncated or corrupt; the error names the file.
        OSError: a file cannot be read or written.
    """
    from sglang_topp_server.view.build_page import page_of_file
    from sglang_topp_server.view.token_text import TokenTexts

    out = Path(target or f"{Path(os.path.abspath(path)).stem}.html")
    if out.suffix == ".parquet" or out.is_dir():
        raise InvalidInputError(f"-o: got {out}, expected the name of an HTML file")
    progress = _ProgressLine()
    texts = None if tokenizer is None else TokenTexts(tokenizer)
    chunks = page_of_file(path, max_detailed=max_detailed, tokenizer=texts, step=progress.update)
    hidden = out.with_name(f".{out.name}.tmp")
    try:
        with hidden.open("wb") as file:
            file.writelines(chunks)
        num_bytes = hidden.stat().st_size
        hidden.replace(out)
    finally:
        hidden.unlink(missing_ok=True)
        progress.close()
    print(f"{out}: {num_bytes / 1e6:.1f} MB")


class _ProgressLine:
    """A progress line on stderr, shown only on a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._next, self._has_written = self._start, False

    def update(self, stage: str, num_rollouts: int, num_tokens: int) -> None:
        """Rewrite the progress line, at most every 0.2 s."""
        now = time.monotonic()
        if self._is_terminal and now >= self._next:
            self._next, self._has_written = now + _EVERY_S, True
            tokens = f", {num_tokens:,} tokens" if stage == "reading" else ""
            sys.stderr.write(f"\r\x1b[K{stage}: {num_rollouts:,} rollouts{tokens}, {now - self._start:.0f} s")
            sys.stderr.flush()

    def close(self) -> None:
        """Erase the line."""
        if self._has_written:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
