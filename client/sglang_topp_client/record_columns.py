"""Rollouts as the columns of a table, both ways; every bit of every field comes back.

One row is one rollout. T is the number of its output tokens::

    prompt_index, sample_index      int64
    request_id                      string
    prompt_ids, output_ids          list<int32>
    text                            string
    logprobs                        list<float>, T
    candidate_ids                   list<list<int32>>, T; null where there are no sets
    candidate_logprobs              list<list<float>>, the same lengths; null as well where the sets have none
    candidate_sampled_ids           list<int32>, T; null where they are the output_ids, as they mostly are
    top_logprobs_source             string or null
    finish_reason, weight_version   string
    weight_versions                 list<struct<version: string, start: int32, end: int32>>, or null
    cached_tokens                   int64
    latency_s                       double
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp_client.checks import is_text, shown, whole_number
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.versions import WeightSpans, spans_to_json

__all__ = ["check_rollout", "num_bytes_of", "pyarrow", "schema", "to_rollouts", "to_table"]

_MAX_ENTRIES = (1 << 31) - 1
_INT64_MAX = (1 << 63) - 1
_COUNTS = ("prompt_index", "sample_index", "cached_tokens")
_TEXTS = ("request_id", "text", "finish_reason", "weight_version")
_ARRAYS: dict[str, type[np.number[Any]]] = {
    "prompt_ids": np.int32,
    "output_ids": np.int32,
    "logprobs": np.float32,
}


def pyarrow() -> Any:
    """The module, which only those who save or load rollouts need.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise ModuleNotFoundError(
            "pyarrow is not installed; rollouts are saved and loaded by it: pip install 'sglang-topp[data]'",
            name="pyarrow",
        ) from None
    return pyarrow


def schema() -> Any:
    """The `pyarrow.Schema` of the table."""
    pa = pyarrow()

    def whole(name: str, kind: Any) -> Any:
        return pa.field(name, kind, nullable=False)

    def listed(kind: Any) -> Any:
        return pa.list_(whole("element", kind))

    span = pa.struct([whole("version", pa.string()), whole("start", pa.int32()), whole("end", pa.int32())])
    return pa.schema(
        [
            whole("prompt_index", pa.int64()),
            whole("sample_index", pa.int64()),
            whole("request_id", pa.string()),
            whole("prompt_ids", listed(pa.int32())),
            whole("output_ids", listed(pa.int32())),
            whole("text", pa.string()),
            whole("logprobs", listed(pa.float32())),
            pa.field("candidate_ids", listed(listed(pa.int32()))),
            pa.field("candidate_logprobs", listed(listed(pa.float32()))),
            pa.field("candidate_sampled_ids", listed(pa.int32())),
            pa.field("top_logprobs_source", pa.string()),
            whole("finish_reason", pa.string()),
            whole("weight_version", pa.string()),
            pa.field("weight_versions", listed(span)),
            whole("cached_tokens", pa.int64()),
            whole("latency_s", pa.float64()),
        ]
    )


def check_rollout(rollout: Rollout) -> None:
    """Raise InvalidInputError unless the columns can hold `rollout`; the field at fault is named."""
    if not isinstance(rollout, Rollout):
        raise InvalidInputError(f"got {type(rollout).__name__}, expected a Rollout")
    for name in _COUNTS:
        if whole_number(name, getattr(rollout, name), 0) > _INT64_MAX:
            raise InvalidInputError(f"{name}: got {shown(getattr(rollout, name))}, expected 64 bits")
    for name in _TEXTS:
        _check_text(name, getattr(rollout, name))
    if rollout.top_logprobs_source is not None:
        _check_text("top_logprobs_source", rollout.top_logprobs_source)
    for name, dtype in _ARRAYS.items():
        array = getattr(rollout, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            kind = (
                f"{array.dtype} {list(array.shape)}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise InvalidInputError(f"{name}: got {kind}, expected {dtype.__name__} with one dimension")
    if not isinstance(rollout.latency_s, Real):
        raise InvalidInputError(f"latency_s: got {shown(rollout.latency_s)}, expected seconds")
    num_tokens = len(rollout.output_ids)
    if len(rollout.logprobs) != num_tokens:
        raise InvalidInputError(f"logprobs: got {len(rollout.logprobs)} for {num_tokens} output_ids")
    if (spans := rollout.weight_spans) is not None:
        for version, count in spans:
            _check_text("weight_spans", version)
            whole_number("weight_spans", count, 0)
        if sum(count for _, count in spans) != num_tokens:
            raise InvalidInputError(f"weight_spans: got {shown(spans)} for {num_tokens} output_ids")
    if (sets := rollout.candidates) is not None:
        if len(sets) != num_tokens:
            raise InvalidInputError(f"candidates: got {len(sets)} positions for {num_tokens} output_ids")
        if len(sets.token_ids) > _MAX_ENTRIES:
            raise InvalidInputError(
                f"candidates: got {len(sets.token_ids)}, expected at most {_MAX_ENTRIES} in a rollout"
            )


def num_bytes_of(rollout: Rollout) -> int:
    """About how many bytes a checked rollout takes in the columns, before they are compressed."""
    sets = rollout.candidates
    num_tokens = len(rollout.prompt_ids) + 2 * len(rollout.output_ids)
    num_candidates = 0 if sets is None else len(sets) + len(sets.token_ids) * (2 if sets.has_logprobs else 1)
    return 4 * (num_tokens + num_candidates) + len(rollout.text)


def to_table(rollouts: Sequence[Rollout]) -> Any:
    """The `pyarrow.Table` of checked rollouts, with fewer than 2^31 candidates in all."""
    pa = pyarrow()
    kinds = schema()
    sets = [rollout.candidates for rollout in rollouts]
    with_logprobs = [one if one is not None and one.has_logprobs else None for one in sets]
    others = [_other_sampled_ids(rollout) for rollout in rollouts]
    spans = [None if one.weight_spans is None else spans_to_json(one.weight_spans) for one in rollouts]
    columns = {
        name: _lists(pa, [getattr(rollout, name) for rollout in rollouts], dtype)
        for name, dtype in _ARRAYS.items()
    } | {
        "candidate_ids": _nested(
            pa, sets, [None if one is None else one.token_ids for one in sets], np.int32
        ),
        "candidate_logprobs": _nested(
            pa, with_logprobs, [None if one is None else one.logprobs for one in with_logprobs], np.float32
        ),
        "candidate_sampled_ids": _lists(pa, others, np.int32),
        "weight_versions": pa.array(spans, kinds.field("weight_versions").type),
    }
    for field in kinds:
        if field.name not in columns:
            values = [getattr(rollout, field.name) for rollout in rollouts]
            columns[field.name] = pa.array(values, field.type)
    return pa.table([columns[field.name] for field in kinds], schema=kinds)


def to_rollouts(table: Any) -> Iterator[Rollout]:
    """The rows of a table of `to_table`, one after the other; each has its arrays to itself.

    Raises:
        InvalidInputError: a row holds no valid candidate sets.
    """
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    num_rows = len(table)
    del table
    prompt_ids, output_ids, logprobs = (_Lists(columns[name]) for name in _ARRAYS)
    sets, plain = _Sets(columns), (*_COUNTS, *_TEXTS, "latency_s", "top_logprobs_source")
    for row in range(num_rows):
        spans = columns["weight_versions"][row].as_py()
        yield Rollout(
            **{name: columns[name][row].as_py() for name in plain},
            prompt_ids=prompt_ids[row],
            output_ids=output_ids[row],
            logprobs=logprobs[row],
            candidates=sets.read(row, output_ids[row]),
            weight_spans=None if spans is None else _spans(spans),
        )


class _Lists:
    """A column of lists; a row of numbers is a copy, which does not keep the column."""

    def __init__(self, column: Any) -> None:
        self.offsets = column.offsets.to_numpy()
        self._is_null = column.is_null().to_numpy(zero_copy_only=False)
        self.values = column.values

    def is_null(self, row: int) -> bool:
        return bool(self._is_null[row])

    def span(self, row: int) -> slice:
        return slice(self.offsets[row], self.offsets[row + 1])

    def __getitem__(self, row: int) -> NDArray[Any]:
        numbers: NDArray[Any] = self.values.to_numpy()[self.span(row)]
        return numbers.copy()


class _Sets:
    """The three columns of candidate sets."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._ids, self._logprobs = _Lists(columns["candidate_ids"]), _Lists(columns["candidate_logprobs"])
        self._sampled_ids = _Lists(columns["candidate_sampled_ids"])
        self._positions, self._known = _Lists(self._ids.values), _Lists(self._logprobs.values)

    def read(self, row: int, output_ids: NDArray[np.int32]) -> CandidateSets | None:
        if self._ids.is_null(row):
            return None
        token_ids, offsets = self._flat(self._positions, self._ids.span(row))
        logprobs = None
        if not self._logprobs.is_null(row):
            logprobs, _ = self._flat(self._known, self._logprobs.span(row))
        sampled_ids = output_ids if self._sampled_ids.is_null(row) else self._sampled_ids[row]
        return CandidateSets(token_ids, logprobs, offsets, sampled_ids)

    @staticmethod
    def _flat(lists: _Lists, rows: slice) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The numbers of neighbouring lists, copied, and their offsets."""
        offsets = lists.offsets[rows.start : rows.stop + 1].astype(np.int64)
        return lists.values.to_numpy()[offsets[0] : offsets[-1]].copy(), offsets - offsets[0]


def _lists(pa: Any, rows: Sequence[NDArray[Any] | None], dtype: type[np.number[Any]]) -> Any:
    values = np.concatenate([np.empty(0, dtype), *(row for row in rows if row is not None)])
    return _with_offsets(pa, rows, pa.array(values))


def _nested(
    pa: Any,
    sets: Sequence[CandidateSets | None],
    values: Sequence[NDArray[Any] | None],
    dtype: type[np.number[Any]],
) -> Any:
    """Of each row, its numbers `values`, cut by the sizes of its `sets`."""
    sizes = [None if one is None else one.sizes for one in sets]
    flat = np.concatenate([np.empty(0, dtype), *(row for row in values if row is not None)])
    inner_sizes = np.concatenate([np.empty(0, np.int64), *(row for row in sizes if row is not None)])
    return _with_offsets(pa, sizes, _cut(pa, inner_sizes, pa.array(flat)))


def _with_offsets(pa: Any, rows: Sequence[NDArray[Any] | None], values: Any) -> Any:
    lengths = np.array([0 if row is None else len(row) for row in rows], np.int64)
    is_null = np.array([row is None for row in rows], bool)
    return _cut(pa, lengths, values, pa.array(is_null) if is_null.any() else None)


def _cut(pa: Any, lengths: NDArray[np.int64], values: Any, mask: Any = None) -> Any:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    kind = pa.list_(pa.field("element", values.type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind, mask=mask)


def _other_sampled_ids(rollout: Rollout) -> NDArray[np.int32] | None:
    sets = rollout.candidates
    if sets is None or np.array_equal(sets.sampled_ids, rollout.output_ids):
        return None
    return sets.sampled_ids


def _spans(objects: Sequence[dict[str, Any]]) -> WeightSpans:
    return tuple((one["version"], one["end"] - one["start"]) for one in objects)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not is_text(value):
        raise InvalidInputError(f"{name}: got {shown(value)!a}, expected text")
