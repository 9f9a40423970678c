"""Convert rollouts to the columns of an Arrow table and back, with every field restored bit for bit.

One row of the table is one rollout. T is the number of the rollout's output tokens. The columns are::

    prompt_index, sample_index      int64
    request_id                      string
    prompt_ids, output_ids          list<int32>
    text                            string
    logprobs                        list<float>, T
    candidate_ids                   list<list<int32>>, T; null without sets
    candidate_logprobs              list<list<float>>, the same lengths; null if the sets have no log-probs
    candidate_sampled_ids           list<int32>, T, of the sets; null without sets, or if equal to output_ids
    top_logprobs_source             string or null
    top_logprobs_p                  double or null
    sampling_params                 string, a JSON object, or null
    finish_reason                   string
    weight_version                  string or null
    weight_versions                 list<struct<version: string, start: int32, end: int32>>, or null
    cached_tokens                   int64
    latency_s                       double
    routing_key                     string
    appended_spans                  list<struct<start: int32, end: int32>>

Most columns hold the attribute of the same name in `sglang_topp_client.rollout.Rollout`. The columns
`candidate_...` hold the attribute `candidates`. The sampled ids can differ from `output_ids`, because an
empty set may have the sampled id `NO_TOKEN`. The column `weight_versions` holds the attribute `weight_spans`.

A trainer adds the columns below. Each is optional, and may be null in any row::

    trainer_logprobs                list<float>, T; natural log-probs over the whole vocabulary
    trainer_masked_logprobs         list<float>, T; natural log-probs over the candidate sets
    reward                          double
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.argument_checks import is_text, whole_number
from sglang_topp_client.rollout import Rollout, WeightSpans, spans_to_json

__all__ = [
    "TrainerScores",
    "check_rollout",
    "num_bytes_of",
    "pyarrow",
    "read_columns",
    "schema",
    "to_batch",
    "to_rollouts",
    "trainer_fields",
    "trainer_scores",
]

_MAX_ENTRIES = (1 << 31) - 1
_INT64_MAX = (1 << 63) - 1
_COUNTS = ("prompt_index", "sample_index", "cached_tokens")
_TEXTS = ("request_id", "text", "finish_reason", "routing_key")
_TEXTS_OR_NONE = ("top_logprobs_source", "weight_version")
_ARRAYS: dict[str, type[np.number[Any]]] = {
    "prompt_ids": np.int32,
    "output_ids": np.int32,
    "logprobs": np.float32,
}


def pyarrow() -> Any:
    """Import and return `pyarrow`, an optional dependency.

    Raises:
        ModuleNotFoundError: pyarrow is not installed; the error names the extra to install.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise ModuleNotFoundError(
            "pyarrow is not installed; saving and loading rollouts needs it: pip install 'sglang-topp[data]'",
            name="pyarrow",
        ) from None
    return pyarrow


def schema() -> Any:
    """Return the `pyarrow.Schema` of the table."""
    pa = pyarrow()

    def whole(name: str, kind: Any) -> Any:
        return pa.field(name, kind, nullable=False)

    def listed(kind: Any) -> Any:
        return pa.list_(whole("element", kind))

    span = pa.struct([whole("version", pa.string()), whole("start", pa.int32()), whole("end", pa.int32())])
    stretch = pa.struct([whole("start", pa.int32()), whole("end", pa.int32())])
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
            pa.field("top_logprobs_p", pa.float64()),
            pa.field("sampling_params", pa.string()),
            whole("finish_reason", pa.string()),
            pa.field("weight_version", pa.string()),
            pa.field("weight_versions", listed(span)),
            whole("cached_tokens", pa.int64()),
            whole("latency_s", pa.float64()),
            whole("routing_key", pa.string()),
            whole("appended_spans", listed(stretch)),
        ]
    )


def check_rollout(rollout: Rollout) -> None:
    """Raise InvalidInputError if a field of `rollout` cannot be stored. The error names the field."""
    if not isinstance(rollout, Rollout):
        raise InvalidInputError(f"got {type(rollout).__name__}, expected a Rollout")
    for name in _COUNTS:
        if whole_number(name, getattr(rollout, name), 0) > _INT64_MAX:
            raise InvalidInputError(f"{name}: got {describe(getattr(rollout, name))}, expected 64 bits")
    for name in _TEXTS:
        _check_text(name, getattr(rollout, name))
    for name in _TEXTS_OR_NONE:
        if getattr(rollout, name) is not None:
            _check_text(name, getattr(rollout, name))
    _params_to_json(rollout)
    for name, dtype in _ARRAYS.items():
        array = getattr(rollout, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            kind = (
                f"{array.dtype} {list(array.shape)}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise InvalidInputError(f"{name}: got {kind}, expected {dtype.__name__} with one dimension")
    if rollout.top_logprobs_p is not None and not isinstance(rollout.top_logprobs_p, Real):
        raise InvalidInputError(f"top_logprobs_p: got {describe(rollout.top_logprobs_p)}, expected a number")
    if not isinstance(rollout.latency_s, Real):
        raise InvalidInputError(f"latency_s: got {describe(rollout.latency_s)}, expected seconds")
    num_tokens = len(rollout.output_ids)
    if len(rollout.logprobs) != num_tokens:
        raise InvalidInputError(f"logprobs: got {len(rollout.logprobs)} for {num_tokens} output_ids")
    if (spans := rollout.weight_spans) is not None:
        for version, count in spans:
            _check_text("weight_spans", version)
            whole_number("weight_spans", count, 0)
        if sum(count for _, count in spans) != num_tokens:
            raise InvalidInputError(f"weight_spans: got {describe(spans)} for {num_tokens} output_ids")
    end = 0
    for span in rollout.appended_spans:
        start, after = (whole_number("appended_spans", bound, end) for bound in span)
        if not start < after <= num_tokens:
            raise InvalidInputError(f"appended_spans: got {describe(span)} for {num_tokens} output_ids")
        end = after
    if (sets := rollout.candidates) is not None:
        if len(sets) != num_tokens:
            raise InvalidInputError(f"candidates: got {len(sets)} positions for {num_tokens} output_ids")
        if len(sets.token_ids) > _MAX_ENTRIES:
            raise InvalidInputError(
                f"candidates: got {len(sets.token_ids)}, expected at most {_MAX_ENTRIES} per rollout"
            )


def num_bytes_of(rollout: Rollout) -> int:
    """Return the approximate uncompressed size of a rollout's columns, in bytes."""
    sets = rollout.candidates
    num_tokens = len(rollout.prompt_ids) + 2 * len(rollout.output_ids)
    num_candidates = 0 if sets is None else len(sets) + len(sets.token_ids) * (2 if sets.has_logprobs else 1)
    return 4 * (num_tokens + num_candidates) + len(rollout.text)


def to_batch(rollouts: Sequence[Rollout]) -> Any:
    """Convert rollouts to a `pyarrow.RecordBatch`.

    `check_rollout` must accept each rollout. The rollouts must have fewer than 2^31 candidates in total.
    """
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
        "sampling_params": pa.array([_params_to_json(one) for one in rollouts], pa.string()),
        "appended_spans": pa.array(
            [[{"start": start, "end": end} for start, end in one.appended_spans] for one in rollouts],
            kinds.field("appended_spans").type,
        ),
    }
    for field in kinds:
        if field.name not in columns:
            values = [getattr(rollout, field.name) for rollout in rollouts]
            columns[field.name] = pa.array(values, field.type)
    return pa.record_batch([columns[field.name] for field in kinds], schema=kinds)


def to_rollouts(batch: Any, rows: Sequence[int] | None = None) -> Iterator[Rollout]:
    """Yield the rollouts of a `pyarrow.RecordBatch`.

    Each rollout has its own copies of the arrays, so that a rollout does not keep the batch in memory.

    Args:
        batch: the batch, which may have other columns too; see `read_columns`.
        rows: the number of each row, for errors; counted from 0 if None.

    Raises:
        InvalidInputError: a column cannot be read, or a row holds no valid rollout; the error names it.
    """
    columns = read_columns(batch, schema())
    rows = range(len(batch)) if rows is None else rows
    del batch
    prompt_ids, output_ids, logprobs = (_Lists(columns[name]) for name in _ARRAYS)
    sets, plain = _Sets(columns), (*_COUNTS, *_TEXTS, *_TEXTS_OR_NONE, "latency_s", "top_logprobs_p")
    for row, number in enumerate(rows):
        spans = columns["weight_versions"][row].as_py()
        try:
            rollout = Rollout(
                **{name: columns[name][row].as_py() for name in plain},
                prompt_ids=prompt_ids[row],
                output_ids=output_ids[row],
                logprobs=logprobs[row],
                candidates=sets.read(row, output_ids[row]),
                weight_spans=None if spans is None else _spans(spans),
                sampling_params=_params_from_json(columns["sampling_params"][row].as_py()),
                appended_spans=tuple(
                    (span["start"], span["end"]) for span in columns["appended_spans"][row].as_py()
                ),
            )
            check_rollout(rollout)
        except InvalidInputError as error:
            raise InvalidInputError(f"rollout {number}: {error}") from error
        yield rollout


def read_columns(batch: Any, fields: Iterable[Any]) -> dict[str, Any]:
    """Return the columns of a `pyarrow.RecordBatch` that `fields` names, with the types of the fields.

    A program that rewrites a file may store the same values with other types: pandas stores wider integers,
    and Polars large lists. Such columns are cast if every value stays the same.

    Raises:
        InvalidInputError: the batch lacks a column, or a column cannot be cast; the error names the column.
    """
    columns = {}
    for field in fields:
        if field.name not in batch.schema.names:
            raise InvalidInputError(f"{field.name}: got no such column, expected {field.type}")
        try:
            columns[field.name] = _cast(field, batch.column(field.name))
        except InvalidInputError as error:
            raise InvalidInputError(f"{field.name}: {error}") from None
    return columns


def _cast(field: Any, column: Any) -> Any:
    """Return a column with the type of `field`, or raise InvalidInputError if a value would change."""
    pa, kind = pyarrow(), field.type
    if not field.nullable and column.null_count:
        raise InvalidInputError(f"got null, expected {kind}")
    if column.type == kind:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    if pa.types.is_dictionary(column.type):
        return _cast(field, column.dictionary_decode())
    refused = InvalidInputError(f"got {column.type}, expected {kind}")
    if pa.types.is_list(kind) and hasattr(column.type, "value_field"):
        lengths = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy()
        values = _cast(kind.value_field, pa.compute.list_flatten(column))
        return _cut(pa, lengths, values, column.is_null() if column.null_count else None)
    if pa.types.is_struct(kind) and pa.types.is_struct(column.type):
        if missing := {one.name for one in kind} - {one.name for one in column.type}:
            raise InvalidInputError(f"got no {min(missing)}, expected {kind}")
        values = [_cast(one, pa.compute.struct_field(column, one.name)) for one in kind]
        return pa.StructArray.from_arrays(values, fields=list(kind))
    if (family := _family(kind)) is None or family != _family(column.type):
        raise refused
    try:
        cast = column.cast(kind)
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"{refused}: {error}") from None
    # Arrow checks casts of integers and text, but rounds a double silently.
    if family == "number" and not np.array_equal(
        cast.drop_null().to_numpy(), column.drop_null().to_numpy(), equal_nan=True
    ):
        raise InvalidInputError(f"{refused}: a value would change")
    return cast


def _family(kind: Any) -> str | None:
    """Return which other types can hold the values of an Arrow type."""
    types = pyarrow().types
    if types.is_integer(kind) or types.is_floating(kind):
        return "number"
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return "text" if is_text else None


class _Lists:
    """An Arrow column that holds one list in each row.

    `column[row]` returns a copy of the row's list, so that the list does not keep the whole column in memory.
    """

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
    """The three columns of candidate sets: token ids, log-probs, and sampled ids."""

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
        """Concatenate the lists in the rows `rows` of the column `lists`.

        Return a new array with the elements of all these lists, and the offset of each list in this array.
        """
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
    """Return an Arrow column with a list of lists in each row.

    One row is one rollout. The row's outer list has one inner list for each candidate set of the rollout.
    `values` has one flat array per rollout, with the token ids or the log-probs of all its sets. Each inner
    list is the part of this array that belongs to one set.
    """
    sizes = [None if one is None else one.sizes for one in sets]
    flat = np.concatenate([np.empty(0, dtype), *(row for row in values if row is not None)])
    inner_sizes = np.concatenate([np.empty(0, np.int64), *(row for row in sizes if row is not None)])
    return _with_offsets(pa, sizes, _cut(pa, inner_sizes, pa.array(flat)))


def _with_offsets(pa: Any, rows: Sequence[NDArray[Any] | None], values: Any) -> Any:
    lengths = np.array([0 if row is None else len(row) for row in rows], np.int64)
    is_null = np.array([row is None for row in rows], bool)
    return _cut(pa, lengths, values, pa.array(is_null) if is_null.any() else None)


def _cut(pa: Any, lengths: NDArray[np.int64], values: Any, mask: Any = None) -> Any:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    kind = pa.list_(pa.field("element", values.type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind, mask=mask)


def _other_sampled_ids(rollout: Rollout) -> NDArray[np.int32] | None:
    sets = rollout.candidates
    if sets is None or np.array_equal(sets.sampled_ids, rollout.output_ids):
        return None
    return sets.sampled_ids


def _spans(objects: Sequence[dict[str, Any]]) -> WeightSpans:
    return tuple((one["version"], one["end"] - one["start"]) for one in objects)


def _params_to_json(rollout: Rollout) -> str | None:
    if rollout.sampling_params is None:
        return None
    try:
        text = json.dumps(rollout.sampling_params, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"sampling_params: cannot be written as JSON: {error}") from None
    _check_text("sampling_params", text)
    return text


def _params_from_json(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"sampling_params: got invalid JSON: {error}") from None
    if not isinstance(params, dict):
        raise InvalidInputError(f"sampling_params: got {type(params).__name__}, expected an object")
    return params


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not is_text(value):
        raise InvalidInputError(f"{name}: got {describe(value)}, expected text")


@dataclass(frozen=True, eq=False)
class TrainerScores:
    """The log-probs and the reward that a trainer computed for one rollout of T output tokens.

    Attributes:
        logprobs: float32 [T], the trainer's log-prob of each token over the whole vocabulary; or None.
        masked_logprobs: float32 [T], the trainer's log-prob of each token over its candidate set; or None.
        reward: the reward that the trainer gave to the rollout; or None.
    """

    logprobs: NDArray[np.float32] | None = None
    masked_logprobs: NDArray[np.float32] | None = None
    reward: float | None = None


def trainer_fields() -> dict[str, Any]:
    """Return the `pyarrow.Field` of each column that a trainer adds, by column name."""
    pa = pyarrow()
    floats = pa.list_(pa.field("element", pa.float32(), nullable=False))
    kinds = {"trainer_logprobs": floats, "trainer_masked_logprobs": floats, "reward": pa.float64()}
    return {name: pa.field(name, kind) for name, kind in kinds.items()}


def trainer_scores(values: Mapping[str, Any], num_tokens: int, row: int) -> TrainerScores:
    """Return the trainer's values of one row, given as Arrow scalars."""

    def floats(name: str) -> NDArray[np.float32] | None:
        if name not in values or not values[name].is_valid:
            return None
        found: NDArray[np.float32] = values[name].values.to_numpy(zero_copy_only=False).copy()
        if len(found) != num_tokens:
            raise InvalidInputError(f"rollout {row}: {name}: got {len(found)} for {num_tokens} output_ids")
        return found

    reward = values["reward"].as_py() if "reward" in values else None
    return TrainerScores(floats("trainer_logprobs"), floats("trainer_masked_logprobs"), reward)
