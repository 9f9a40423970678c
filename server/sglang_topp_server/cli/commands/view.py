"""`sglang-topp view PATH`: write saved rollouts to one HTML page."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from sglang_topp.errors import InvalidInputError
from sglang_topp_server.cli.common import add_command, count

__all__ = ["add_parser"]

_EVERY_S = 0.2


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "view",
        "make one HTML page of saved rollouts, to open or to attach",
        examples=[
            "sglang-topp view step-0.parquet --tokenizer /models/qwen",
            "sglang-topp view run/ -o run.html --rollouts 200",
        ],
    )
    parser.add_argument("path", help="a file of save_rollouts, or a directory of RolloutWriter")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (named after PATH, with .html)")
    parser.add_argument(
        "--rollouts",
        type=count,
        default=64,
        help="how many the page holds token by token, those with the worst tokens first (%(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json or a model's directory, for the texts of tokens; else the page shows ids",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _write_page(args.path, args.output, max_detailed=args.rollouts, tokenizer=args.tokenizer)
    return 0


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
