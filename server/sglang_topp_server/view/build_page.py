"""Build the page of `sglang-topp view` from the rollouts of one or several runs, which are read twice.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from html import escape
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise, repeat
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError
from sglang_topp_client import Rollout, ScoredRollout, load_scored_rollouts
from sglang_topp_client.storage.parquet_columns import pyarrow, schema
from sglang_topp_client.storage.parquet_files import files_of
from sglang_topp_server.view.run_summary import BADNESS, EDGES, MAX_LISTED, RunSummary, token_metrics
from sglang_topp_server.view.token_text import TokenTexts

DEFAULT_MEGABYTES = 20
_MAX_PROMPT_TOKENS = 1024
_BYTES_PER_CANDIDATE = 6
_PROMPT_CHARS = 160

_Numbers: TypeAlias = Mapping[str, float | None]


class _Run(NamedTuple):
    """A run on the page: its name, a function that reads its rollouts, and other columns of its rows."""

    name: str
    read: Callable[[Collection[int] | None], Iterable[tuple[int, ScoredRollout]]]
    numbers: Iterable[_Numbers]


def page_of_files(
    paths: Sequence[str | os.PathLike[str]],
    *,
    megabytes: float = DEFAULT_MEGABYTES,
    tokenizer: TokenTexts | None = None,
    progress: Callable[[Iterator[ScoredRollout]], Iterator[ScoredRollout]] = iter,
) -> Iterator[bytes]:
    """Yield the HTML of the page for the rollouts in files or directories, in chunks.

    While this function runs, memory holds at most one row group of a file, and the content of the page.

    Args:
        paths: the runs. Each one is a file written by `save_rollouts` or `add_trainer_columns`, or a
            directory written by `RolloutWriter`.
        megabytes: the total size up to which the page holds rollouts token by token.
        tokenizer: maps token ids to texts. Without a tokenizer, the page shows token ids.
        progress: passes on the rollouts of the first pass over a run, and may show how many there are.

    Raises:
        InvalidInputError: there are no rollouts.
        WireError: a file was altered or truncated; the error names the file.
        OSError: the path cannot be read.
    """
    names = [os.path.basename(os.path.normpath(path)) for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    if len(set(names)) < len(names):
        raise InvalidInputError(f"paths: got {' '.join(names)}, expected different runs")
    runs = [
        _Run(name, partial(load_scored_rollouts, path), _other_numbers(path))
        for name, path in zip(names, paths, strict=True)
    ]
    return _page(runs, megabytes, tokenizer, progress)


def page_of_rollouts(rollouts: Collection[Rollout], title: str) -> Iterator[bytes]:
    """Yield the HTML of the page for rollouts in memory; see `page_of_files`."""

    def read(wanted: Collection[int] | None) -> Iterator[tuple[int, ScoredRollout]]:
        for row, rollout in enumerate(rollouts):
            if wanted is None or row in wanted:
                yield row, ScoredRollout(rollout)

    return _page([_Run(title, read, repeat({}))])


def _other_numbers(path: str | os.PathLike[str]) -> Iterator[_Numbers]:
    """Yield the numbers of each row in columns that neither the client nor `add_trainer_columns` writes."""
    pa = pyarrow()
    for file in files_of(path):
        parquet = pa.parquet.ParquetFile(file)
        names = [
            column.name
            for column in parquet.schema_arrow
            if column.name not in {*schema().names, "reward"}
            and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type))
        ]
        for group in range(parquet.num_row_groups) if names else ():
            yield from parquet.read_row_group(group, names).to_pylist()
        if not names:
            yield from repeat({}, parquet.metadata.num_rows)


def _page(
    runs: Sequence[_Run],
    megabytes: float = DEFAULT_MEGABYTES,
    tokenizer: TokenTexts | None = None,
    progress: Callable[[Iterator[ScoredRollout]], Iterator[ScoredRollout]] = iter,
) -> Iterator[bytes]:
    shown: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    prompts: list[NDArray[np.int32]] = []
    details: dict[int, bytes] = {}
    texts: dict[str, Any] = {}
    num_other_texts = 0
    for run in runs:
        summary = RunSummary()
        scores = progress(scored for _, scored in run.read(None))
        for scored, numbers in zip(scores, run.numbers, strict=False):
            summary.add(scored, numbers)
        if not summary.totals["rollouts"]:
            raise InvalidInputError(f"{run.name}: got no rollouts, expected one or more")
        shown.append({"name": run.name, "p": summary.threshold, **summary.to_json()})
        left = int(megabytes * 1e6 / len(runs))
        order = summary.worst_rows(left // _BYTES_PER_CANDIDATE)
        packed: dict[int, bytes] = {}
        for row, scored in run.read(order):
            detail = detail_of(scored)
            packed[row] = base64.b64encode(gzip.compress(msgspec.json.encode(detail), 6, mtime=0))
            if tokenizer is not None:
                num_other_texts += not tokenizer.agrees_with(scored.rollout)
                ids = {*detail["prompt_ids"], *detail["ids"]}
                ids.update(token_id for listed in detail["candidates"] for token_id, _ in listed)
                texts |= tokenizer.texts_of(ids)
        for row in order:
            left -= len(packed[row])
            if left >= 0:
                details[len(rows) + row] = packed[row]
        rows += [{**row, "run": run.name, "prompt": row["prompt"] + len(prompts)} for row in summary.rows]
        prompts += summary.prompts
    positions = {name: [row.pop(f"{name}_at") for row in rows] for name in BADNESS}
    names = dict.fromkeys(name for row in rows for name in row)
    overview = {
        "version": version("sglang-topp"),
        "runs": shown,
        "edges": {name: edges.tolist() for name, edges in EDGES.items()},
        "table": {name: [row.get(name) for row in rows] for name in names},
        "positions": positions,
        "prompts": [_preview(ids, tokenizer) for ids in prompts],
        "megabytes": megabytes,
        "max_listed": MAX_LISTED,
        "texts": None if tokenizer is None else texts,
        "num_other_texts": num_other_texts,
    }
    return _fill_template(" and ".join(run.name for run in runs), overview, details)


def _preview(ids: NDArray[np.int32], tokenizer: TokenTexts | None) -> str:
    """Return the end of a prompt, or of its token ids."""
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids.tolist())
    return text if len(text) <= _PROMPT_CHARS else f"…{text[-_PROMPT_CHARS:]}"


def detail_of(scored: ScoredRollout) -> dict[str, Any]:
    """Return what the page shows of one rollout's tokens, as JSON values; an unknown number is NaN.

    `candidates` lists the first `MAX_LISTED` candidates of each position, and the sampled token, as
    `[token id, log-prob]`.
    """
    rollout, metrics = scored.rollout, token_metrics(scored)
    ratios = "ratio", "replayed"
    candidates: list[list[Any]] = [[] for _ in rollout.output_ids]
    if (sets := rollout.candidates) is not None:
        ranks = np.arange(len(sets.token_ids)) - np.repeat(sets.offsets[:-1], sets.sizes)
        is_listed = (ranks < MAX_LISTED) | (sets.token_ids == np.repeat(sets.sampled_ids, sets.sizes))
        logprobs = _rounded(sets.logprobs[is_listed]) if sets.has_logprobs else [None] * int(is_listed.sum())
        pairs = list(zip(sets.token_ids[is_listed].tolist(), logprobs, strict=True))
        ends = np.concatenate([[0], np.cumsum(is_listed)])[sets.offsets]
        candidates = [pairs[start:end] for start, end in pairwise(ends.tolist())]
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
        "sizes": metrics["sizes"].tolist(),
        "mass": _rounded(metrics["mass"]),
        "entropy": _rounded(metrics["entropy"]),
        **{name: _rounded(metrics[name]) for name in ratios if not np.isnan(metrics[name]).all()},
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
        yield packed
        yield b"</script>\n"
    yield f'<script type="module">{_script()}</script>\n{tail}'.encode()
