"""`sglang-topp view PATH`: show saved rollouts on one HTML page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_topp.errors import InvalidInputError
from sglang_topp_server.cli.common import Commands, add_command, count

if TYPE_CHECKING:
    from sglang_topp_client import ScoredRollout


def add_parsers(commands: Commands) -> None:
    """Add the command."""
    view = add_command(
        commands,
        "view",
        "make one HTML page of saved rollouts, to open or to attach",
        _run,
        details="Several runs are overlaid.",
        examples=[
            "sglang-topp view step-0.parquet --tokenizer /models/qwen",
            "sglang-topp view step-10.parquet step-200.parquet -o steps.html",
        ],
    )
    view.add_argument(
        "paths", metavar="PATH", nargs="+", help="a file of save_rollouts, or a directory of RolloutWriter"
    )
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


def _run(args: argparse.Namespace) -> int:
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
    """Pass on the rollouts, and rewrite a line on stderr that counts them."""
    num_rollouts = num_tokens = 0

    def show(end: str = "") -> None:
        line = f"\rreading: {num_rollouts:,} rollouts, {num_tokens:,} tokens"
        print(line, end=end, file=sys.stderr, flush=True)

    try:
        for scored in rollouts:
            num_rollouts += 1
            num_tokens += len(scored.rollout.output_ids)
            if num_rollouts % 100 == 1:
                show()
            yield scored
    finally:
        show("\n")
