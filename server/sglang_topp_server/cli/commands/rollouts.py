"""`sglang-topp rollouts PATH`: print statistics of the rollouts in a file or a directory.

To save memory, the command reads one Parquet row group at a time. The command keeps only counters. For
example, it counts the candidate sets of each size.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_server.cli.common import add_command

if TYPE_CHECKING:
    from sglang_topp_client import Rollout

__all__ = ["add_parser"]

_MAX_NAMES = 5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "rollouts",
        "check saved rollouts, and print a summary",
        examples=["sglang-topp rollouts step-0.parquet", "sglang-topp rollouts run/"],
    )
    parser.add_argument("path", help="a file of save_rollouts, or a directory of RolloutWriter")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _print_summary(args.path)
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
        for version, count in rollout.weight_spans or ((rollout.weight_version or "unknown", num_tokens),):
            self._weights[version] += count
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
    shown = ", ".join(f"{name or repr(name)} {count:,}" for name, count in ranked[:_MAX_NAMES])
    more = len(ranked) - _MAX_NAMES
    return (shown or "none") + (f", … {more} more" if more > 0 else "")
