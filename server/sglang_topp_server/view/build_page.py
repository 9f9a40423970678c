"""Build the page of `sglang-topp view` from rollouts, which are read twice.

The first pass over the rollouts computes the statistics, and ranks the rollouts by their worst tokens. The
second pass encodes only the rollouts that the page shows token by token, so memory never holds the tokens of
all rollouts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.metadata import version
from typing import Any, TypeAlias

import numpy as np

from sglang_topp.errors import InvalidInputError
from sglang_topp_client import Rollout, ScoredRollout, load_scored_rollouts
from sglang_topp_server.view.fill_html_template import page_chunks
from sglang_topp_server.view.rollout_table import MAX_ROWS
from sglang_topp_server.view.run_summary import RunSummary
from sglang_topp_server.view.token_metrics import token_metrics
from sglang_topp_server.view.token_text import TokenTexts
from sglang_topp_server.view.token_view_data import MAX_LISTED, encode_detail, ids_of_detail
from sglang_topp_server.view.worst_tokens import TokenPlace

__all__ = ["MAX_DETAILED", "page_of_file", "page_of_rollouts"]

MAX_DETAILED = 64
_MAX_DETAIL_BYTES = 28 * 2**20
"""The maximum total size in bytes of the encoded rollouts that one page contains.

In the page, base64 enlarges 28 MiB of encoded rollouts to 37 MiB. The page thus stays below 50 MB.
"""

_CONTEXT = 12
_MAX_SIBLINGS = 7
Step: TypeAlias = Callable[[str, int, int], None]
"""A progress callback, called with the stage, the number of rollouts, and the number of tokens.

In the stage `"reading"`, the numbers count the rollouts and output tokens read so far. In the stage
`"detail"`, the number of rollouts counts the encoded rollouts, and the number of tokens stays constant.
"""

_Read: TypeAlias = Callable[["Collection[int] | None"], Iterable[tuple[int, ScoredRollout]]]


def page_of_file(
    path: str | os.PathLike[str],
    *,
    max_detailed: int = MAX_DETAILED,
    tokenizer: TokenTexts | None = None,
    step: Step | None = None,
) -> Iterator[bytes]:
    """Yield the HTML of the page for the rollouts in a file or a directory, in chunks.

    While this function runs, memory holds at most one row group of the file, and the content of the page.

    Args:
        path: a file written by `save_rollouts` or `add_trainer_columns`, or a directory written by
            `RolloutWriter`.
        max_detailed: the number of rollouts that the page shows token by token.
        tokenizer: maps token ids to texts. Without a tokenizer, the page shows token ids.
        step: a progress callback, called after each rollout; see `Step`.

    Raises:
        InvalidInputError: there are no rollouts.
        WireError: a file was altered or truncated; the error names the file.
        OSError: the path cannot be read.
    """

    def read(wanted: Collection[int] | None) -> Iterator[tuple[int, ScoredRollout]]:
        return load_scored_rollouts(path, wanted)

    title = os.path.basename(os.path.normpath(path))
    return _page(read, title, max_detailed=max_detailed, tokenizer=tokenizer, step=step)


def page_of_rollouts(
    rollouts: Collection[Rollout], title: str, *, max_detailed: int = MAX_DETAILED
) -> Iterator[bytes]:
    """Yield the HTML of the page for rollouts in memory; see `page_of_file`."""

    def read(wanted: Collection[int] | None) -> Iterator[tuple[int, ScoredRollout]]:
        for row, rollout in enumerate(rollouts):
            if wanted is None or row in wanted:
                yield row, ScoredRollout(rollout)

    return _page(read, title, max_detailed=max_detailed)


def _page(
    read: _Read,
    title: str,
    *,
    max_detailed: int,
    tokenizer: TokenTexts | None = None,
    step: Step | None = None,
) -> Iterator[bytes]:
    summary = RunSummary(max_detailed)
    for _, scored in read(None):
        summary.add(scored)
        if step is not None:
            step("reading", summary.num_rollouts, summary.num_tokens)
    if not summary.num_rollouts:
        raise InvalidInputError(f"{title}: got no rollouts, expected one or more")
    worst = summary.worst_tokens()
    order = _detail_order(summary, worst, max_detailed)
    wanted = {*order, *(place.row for _, place in worst)}
    details, contexts = _Details(order), dict[TokenPlace, dict[str, Any]]()
    ids, num_checked, num_agreeing = np.empty(0, np.int32), 0, 0
    for row, scored in read(wanted):
        for _, place in worst:
            if place.row == row:
                contexts[place] = _context(scored, place.position)
                ids = np.union1d(ids, np.array(contexts[place]["ids"], np.int32))
        details.add(row, scored)
        if tokenizer is not None:
            num_checked += 1
            num_agreeing += tokenizer.agrees_with(scored.rollout)
            ids = np.union1d(ids, ids_of_detail(scored.rollout))
        if step is not None:
            step("detail", len(details), summary.num_tokens)
    chosen = details.chosen()
    overview = {
        "title": title,
        "version": version("sglang-topp"),
        **summary.to_json(),
        "table": summary.table.to_json(),
        "max_rows": MAX_ROWS,
        "max_listed": MAX_LISTED,
        "detailed": [row for row, _ in chosen],
        "wanted": max_detailed,
        "detail_order": order,
        "worst": [
            {"kind": kind, "row": place.row, "position": place.position, **contexts[place]}
            for kind, place in worst
        ],
        "texts": None if tokenizer is None else tokenizer.texts_of(ids.tolist()),
        "tokenizer": {"checked": num_checked, "agree": num_agreeing},
    }
    return page_chunks(title, overview, chosen)


def _detail_order(summary: RunSummary, worst: list[tuple[str, TokenPlace]], count: int) -> list[int]:
    """Return the row numbers of up to `count` rollouts to show token by token.

    The list starts with the rollouts that contain the tokens in `worst`. Next come other samples of the same
    prompts, which take at most half of the remaining places, rounded up. Then come the rollouts in
    `summary.ranked_rows()`. If places remain, the first rollouts of the file fill these places.
    """
    order = list(dict.fromkeys(place.row for _, place in worst))[:count]
    siblings = [
        sample for row in order for sample in summary.table.samples_of_prompt(row)[: _MAX_SIBLINGS + 1]
    ]
    others = [row for row in dict.fromkeys(siblings) if row not in order]
    order += others[: (count - len(order) + 1) // 2]
    order += [row for row in summary.ranked_rows() if row not in order]
    return list(dict.fromkeys([*order, *range(min(count, summary.num_rollouts))]))[:count]


class _Details:
    """The encoded tokens of the rollouts that the page may show token by token.

    The page has a size limit, so `chosen` returns only as many rollouts as fit in the page.

    Args:
        order: the row numbers of the rollouts that the page may show, most important first.
    """

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._encoded: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._encoded)

    def add(self, row: int, scored: ScoredRollout) -> None:
        """Encode and keep the rollout's tokens if `order` contains `row`."""
        if row in self._order:
            self._encoded[row] = encode_detail(scored)

    def chosen(self) -> list[tuple[int, bytes]]:
        """Return the row number and the encoded tokens of each rollout that fits in the page.

        The most important rollout comes first, as in `order`.
        """
        chosen, num_bytes = [], 0
        for row in self._order:
            if num_bytes + len(self._encoded[row]) <= _MAX_DETAIL_BYTES:
                chosen.append((row, self._encoded[row]))
                num_bytes += len(self._encoded[row])
        return chosen


def _context(scored: ScoredRollout, position: int) -> dict[str, Any]:
    """Return the metrics of the token at `position`, and the ids of this token and its neighbors."""
    rollout, metrics = scored.rollout, token_metrics(scored)
    start = max(0, position - _CONTEXT)
    numbers = {
        "size": metrics.sizes[position],
        "mass": metrics.mass[position],
        "entropy": metrics.entropy[position],
        "ratio": metrics.log_ratio[position],
        "replayed": metrics.log_replayed_ratio[position],
        "logprob": rollout.logprobs[position],
    }
    return {
        "start": start,
        "ids": rollout.output_ids[start : position + _CONTEXT + 1].tolist(),
        **{name: round(float(value), 6) if np.isfinite(value) else None for name, value in numbers.items()},
    }
