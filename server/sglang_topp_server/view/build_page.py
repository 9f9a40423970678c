"""Build the page of `sglang-topp view` from rollouts, which are read twice.

The first pass computes the statistics, and ranks the rollouts by their worst tokens. The second pass encodes
only the rollouts that the page shows token by token, so memory never holds the tokens of all rollouts.

The page holds its data as JSON or base64, in script elements that browsers do not execute. The data never
contain the character `<`, and so cannot end a script element early.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError
from sglang_topp_client import Rollout, ScoredRollout, load_scored_rollouts
from sglang_topp_server.view.run_summary import RunSummary
from sglang_topp_server.view.token_metrics import token_metrics
from sglang_topp_server.view.token_text import TokenTexts

__all__ = [
    "MAX_DETAILED",
    "MAX_LISTED",
    "content_security_policy",
    "detail_of",
    "page_of_file",
    "page_of_rollouts",
]

MAX_DETAILED = 64
MAX_LISTED = 48
_MAX_PROMPT_TOKENS = 1024
_MAX_DETAIL_BYTES = 28 * 2**20
"""The maximum total size in bytes of the encoded rollouts that one page contains.

In the page, base64 enlarges 28 MiB of encoded rollouts to 37 MiB. The page thus stays below 50 MB.
"""

_Read: TypeAlias = Callable[["Collection[int] | None"], Iterable[tuple[int, ScoredRollout]]]


def page_of_file(
    path: str | os.PathLike[str],
    *,
    max_detailed: int = MAX_DETAILED,
    tokenizer: TokenTexts | None = None,
    step: Callable[[int, int], None] | None = None,
) -> Iterator[bytes]:
    """Yield the HTML of the page for the rollouts in a file or a directory, in chunks.

    While this function runs, memory holds at most one row group of the file, and the content of the page.

    Args:
        path: a file written by `save_rollouts` or `add_trainer_columns`, or a directory written by
            `RolloutWriter`.
        max_detailed: the number of rollouts that the page shows token by token.
        tokenizer: maps token ids to texts. Without a tokenizer, the page shows token ids.
        step: called with the number of rollouts and output tokens that the first pass has read so far.

    Raises:
        InvalidInputError: there are no rollouts.
        WireError: a file was altered or truncated; the error names the file.
        OSError: the path cannot be read.
    """

    def read(wanted: Collection[int] | None) -> Iterator[tuple[int, ScoredRollout]]:
        return load_scored_rollouts(path, wanted)

    title = os.path.basename(os.path.normpath(path))
    return _page(read, title, max_detailed, tokenizer, step)


def page_of_rollouts(rollouts: Collection[Rollout], title: str) -> Iterator[bytes]:
    """Yield the HTML of the page for rollouts in memory; see `page_of_file`."""

    def read(wanted: Collection[int] | None) -> Iterator[tuple[int, ScoredRollout]]:
        for row, rollout in enumerate(rollouts):
            if wanted is None or row in wanted:
                yield row, ScoredRollout(rollout)

    return _page(read, title, MAX_DETAILED)


def _page(
    read: _Read,
    title: str,
    max_detailed: int,
    tokenizer: TokenTexts | None = None,
    step: Callable[[int, int], None] | None = None,
) -> Iterator[bytes]:
    summary = RunSummary()
    for _, scored in read(None):
        summary.add(scored)
        if step is not None:
            step(summary.num_rollouts, summary.num_tokens)
    if not summary.num_rollouts:
        raise InvalidInputError(f"{title}: got no rollouts, expected one or more")
    order = summary.worst_rows(max_detailed)
    details: dict[int, bytes] = {}
    texts: dict[str, Any] = {}
    num_other_texts = 0
    for row, scored in read(order):
        detail = detail_of(scored)
        details[row] = gzip.compress(msgspec.json.encode(detail), compresslevel=6, mtime=0)
        if tokenizer is not None:
            num_other_texts += not tokenizer.agrees_with(scored.rollout)
            ids = {*detail["prompt_ids"], *detail["ids"]}
            ids.update(token_id for listed in detail["candidates"] for token_id, _ in listed)
            texts |= tokenizer.texts_of(ids)
    chosen: dict[int, bytes] = {}
    num_bytes = 0
    for row in order:
        if num_bytes + len(details[row]) <= _MAX_DETAIL_BYTES:
            chosen[row] = details[row]
            num_bytes += len(details[row])
    overview = {
        "title": title,
        "version": version("sglang-topp"),
        **summary.to_json(),
        "max_listed": MAX_LISTED,
        "detailed": list(chosen),
        "wanted": len(order),
        "texts": None if tokenizer is None else texts,
        "num_other_texts": num_other_texts,
    }
    return _fill_template(title, overview, chosen)


def detail_of(scored: ScoredRollout) -> dict[str, Any]:
    """Return what the page shows of one rollout's tokens, as JSON values; an unknown number is NaN.

    `candidates` lists the first `MAX_LISTED` candidates of each position, and the sampled token, as
    `[token id, log-prob]`.
    """
    rollout, metrics = scored.rollout, token_metrics(scored)
    candidates: list[list[Any]] = [[] for _ in rollout.output_ids]
    if (sets := rollout.candidates) is not None:
        ranks = np.arange(len(sets.token_ids)) - np.repeat(sets.offsets[:-1], sets.sizes)
        is_listed = (ranks < MAX_LISTED) | (sets.token_ids == np.repeat(sets.sampled_ids, sets.sizes))
        logprobs = _rounded(sets.logprobs[is_listed]) if sets.has_logprobs else [None] * int(is_listed.sum())
        pairs = list(zip(sets.token_ids[is_listed].tolist(), logprobs, strict=True))
        ends = np.concatenate([[0], np.cumsum(is_listed)])[sets.offsets]
        candidates = [pairs[start:end] for start, end in pairwise(ends.tolist())]
    ratios = {"ratio": metrics.ratio, "replayed": metrics.replayed}
    return {
        "text": rollout.text,
        "request_id": rollout.request_id,
        "num_prompt_tokens": len(rollout.prompt_ids),
        "source": rollout.top_logprobs_source,
        "p": rollout.top_logprobs_p,
        "latency_s": rollout.latency_s,
        "appended": rollout.appended_spans,
        "weights": rollout.weight_spans or (),
        "prompt_ids": rollout.prompt_ids[-_MAX_PROMPT_TOKENS:].tolist(),
        "ids": rollout.output_ids.tolist(),
        "logprobs": _rounded(rollout.logprobs),
        "candidates": candidates,
        "sizes": metrics.sizes.tolist(),
        "mass": _rounded(metrics.mass),
        "entropy": _rounded(metrics.entropy),
        **{name: _rounded(values) for name, values in ratios.items() if not np.isnan(values).all()},
    }


def _rounded(values: NDArray[Any]) -> list[Any]:
    # The page shows six decimals at most. JSON has no infinity.
    return list(np.round(np.clip(values.astype(np.float64), -1e9, 1e9), 6).tolist())


# -- the template --------------------------------------------------------------------------------------


def _asset(name: str) -> str:
    return files("sglang_topp_server.view").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    return _asset("overview.js") + _asset("rollout.js")


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def content_security_policy() -> str:
    """Return the content security policy, which allows only the page's own script and style."""
    return (
        f"default-src 'none'; script-src {_source_hash(_script())};"
        f" style-src {_source_hash(_asset('page.css'))}; base-uri 'none'; form-action 'none'"
    )


def _fill_template(title: str, overview: dict[str, Any], details: dict[int, bytes]) -> Iterator[bytes]:
    """Yield the HTML of the page: the statistics as JSON, and each rollout's tokens as gzip in base64."""
    head, body, tail = re.split(r"<!-- (?:STYLE|DATA) -->\n", _asset("page.html"))
    head = head.replace("{{policy}}", escape(content_security_policy())).replace("{{title}}", escape(title))
    yield f"{head}<style>{_asset('page.css')}</style>\n{body}".encode()
    text = json.dumps(overview, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    yield f'<script type="application/json" id="overview">{text}</script>\n'.encode()
    for row, packed in details.items():
        yield f'<script type="text/plain" id="detail-{row}">'.encode()
        yield base64.b64encode(packed)
        yield b"</script>\n"
    yield f'<script type="module">{_script()}</script>\n{tail}'.encode()
