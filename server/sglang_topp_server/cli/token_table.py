"""Print the table of `sglang-topp generate`: one row per token, with its candidates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_topp_client import Rollout
from sglang_topp_server.view.token_text import TokenTexts

__all__ = ["print_rollouts", "server_token_texts", "token_texts"]

_MAX_SHOWN = 6
_SAMPLED, _HEADING, _FAINT = "bold cyan", "bold", "dim"
# The console width if the output is a file or a pipe. At this width, rich wraps no row of the table.
_UNLIMITED = 1 << 16


def token_texts(path: str | None) -> TokenTexts | None:
    """Load the texts of the tokens from the tokenizer at `path`, or return None if `path` is None.

    Raises:
        InvalidInputError: there is no tokenizer at `path`.
        ModuleNotFoundError: the package `tokenizers` is not installed.
    """
    return None if path is None else TokenTexts(path)


def server_token_texts(info: Mapping[str, Any], rollouts: Sequence[Rollout]) -> TokenTexts | None:
    """Return the token texts of the server's model, if this machine has the model's tokenizer.

    Args:
        info: the result of `RolloutClient.server_info` for a sidecar or an engine.
        rollouts: rollouts that the server generated. This function checks that the local tokenizer decodes
            the rollouts' tokens to the rollouts' texts.

    Returns:
        The texts of the tokens. None if this machine does not have the tokenizer or the package `tokenizers`,
        or if the local tokenizer decodes the tokens of `rollouts` to other texts.
    """
    engine = info.get("engine")
    path = (engine if isinstance(engine, Mapping) else info).get("model_path")
    if not isinstance(path, str) or not Path(path, "tokenizer.json").is_file():
        return None
    try:
        texts = TokenTexts(path)
    except ModuleNotFoundError:
        return None
    return texts if all(texts.agrees_with(rollout) for rollout in rollouts) else None


def print_rollouts(rollouts: Sequence[Rollout], texts: TokenTexts | None) -> None:
    """Print a heading and a table for each rollout.

    Output to a terminal is colored, unless NO_COLOR is set. A model's text is printed as a Python literal, so
    that it cannot control the terminal.

    Args:
        rollouts: the rollouts to print.
        texts: the token texts; if `texts` is None, the tables show token ids.
    """
    console = Console(
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )
    if not console.is_terminal:
        console.width = _UNLIMITED
    for index, rollout in enumerate(rollouts):
        if index:
            console.print()
        console.print(Text(_heading(rollout), _HEADING))
        console.print(Text(repr(rollout.text), _FAINT), soft_wrap=True)
        console.print(_table(rollout, texts))


def _heading(rollout: Rollout) -> str:
    parts = [
        f"prompt {rollout.prompt_index}, sample {rollout.sample_index}: {len(rollout.output_ids):,} tokens",
        f"finish reason {rollout.finish_reason}",
    ]
    if rollout.weight_version is not None:
        parts.append(f"weights {rollout.weight_version!r}")
    if (sets := rollout.candidates) is not None and len(sets):
        parts.append(f"mean kept mass {np.exp(sets.logprob_sum.astype(np.float64)).mean():.4f}")
        parts.append(f"candidates per token: mean {sets.sizes.mean():.1f}, largest {sets.sizes.max():,}")
    return ", ".join(parts)


def _table(rollout: Rollout, texts: TokenTexts | None) -> Table:
    table = Table(box=None, header_style=_FAINT, pad_edge=False)
    table.add_column("position", justify="right")
    table.add_column("token", style=_SAMPLED)
    table.add_column("probability", justify="right")
    if rollout.candidates is not None:
        table.add_column("kept mass", justify="right")
        table.add_column("candidates")
    for position, (token_id, logprob) in enumerate(
        zip(rollout.output_ids.tolist(), rollout.logprobs, strict=True)
    ):
        row: list[str | Text] = [str(position), Text(_text_of(token_id, texts)), f"{np.exp(logprob):.4f}"]
        if rollout.candidates is not None:
            row += [
                f"{np.exp(rollout.candidates.logprob_sum[position]):.4f}",
                _candidates(rollout, position, texts),
            ]
        table.add_row(*row)
    return table


def _candidates(rollout: Rollout, position: int, texts: TokenTexts | None) -> Text:
    """Return the most likely candidates with their probabilities, and the number of further candidates."""
    assert rollout.candidates is not None
    token_ids, logprobs = rollout.candidates[position]
    assert logprobs is not None
    shown = Text()
    for token_id, logprob in zip(token_ids[:_MAX_SHOWN].tolist(), logprobs, strict=False):
        is_sampled = token_id == rollout.output_ids[position]
        shown.append(f"{_text_of(token_id, texts)} ", _SAMPLED if is_sampled else "")
        shown.append(f"{np.exp(logprob):.3f}  ", _FAINT)
    if len(token_ids) > _MAX_SHOWN:
        shown.append(f"… {len(token_ids) - _MAX_SHOWN:,} more", _FAINT)
    shown.rstrip()
    return shown


def _text_of(token_id: int, texts: TokenTexts | None) -> str:
    text = None if texts is None else texts.text_of(token_id)
    if text is None:
        return str(token_id)
    return repr(bytes(text) if isinstance(text, list) else text)
