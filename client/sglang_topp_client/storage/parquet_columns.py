"""Convert rollouts to the columns of an Arrow table and back, with every field restored bit for bit.

One row of the table is one rollout. Each field that `Rollout` declares is a column of its name, or as
`_COLUMNS` says of its type: the candidate sets are three columns, and `weight_spans` are SGLang's
`weight_versions`. T is the number of the rollout's output tokens::

    candidate_ids                   list<list<int32>>, T; null without sets
    candidate_logprobs              list<list<float>>, the same lengths; null if the sets have no log-probs
    candidate_sampled_ids           list<int32>, T, of the sets; null without sets, or if equal to output_ids
    weight_versions                 list<struct<version: string, start: int32, end: int32>>, or null
    sampling_params                 string, a JSON object, or null
    appended_spans                  list<struct<start: int32, end: int32>>
    token_fields                    list<struct<name: string, data: binary, shape: list<int32>, start: int32,
                                    dtype: string>>; `data` is little-endian and in C order

The sampled ids can differ from `output_ids`, because an empty set may have the sampled id `NO_TOKEN`.

A trainer adds the columns that `TrainerScores` declares. Each is optional, and may be null in any row::

    trainer_logprobs                list<float>, T; natural log-probs over the whole vocabulary
    trainer_masked_logprobs         list<float>, T; natural log-probs over the candidate sets
    reward                          double
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client.rollout import (
    FIELDS,
    Count,
    Field,
    Logprobs,
    Probability,
    Rollout,
    Seconds,
    Source,
    TokenField,
    TokenFieldLayout,
    TokenFields,
    TokenIds,
    TokenRanges,
    WeightSpans,
    find_problems,
    layout_of,
    read_array,
    write_spans,
)
from sglang_topp_client.value_checks import convert, decode_json, find_json_problem, import_optional

_MAX_ENTRIES = (1 << 31) - 1


def pyarrow() -> Any:
    """Import and return `pyarrow`, an optional dependency; see `import_optional`."""
    for name in ("pyarrow.compute", "pyarrow.parquet", "pyarrow"):
        module = import_optional(name, extra="data", use="saving and loading rollouts needs it")
    return module


def _list_of(kind: Any) -> Any:
    return pyarrow().list_(_whole("element", kind))


def _whole(name: str, kind: Any) -> Any:
    return pyarrow().field(name, kind, nullable=False)


def _struct(**kinds: Any) -> Any:
    return pyarrow().struct([_whole(name, kind) for name, kind in kinds.items()])


def _write_fields(fields: TokenFields) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "data": one.to_bytes(),
            **layout_of(one),
        }
        for name, one in fields.items()
    ]


def _read_fields(stored: Any) -> TokenFields:
    fields = {}
    for one in stored.as_py():
        name, data = one.pop("name"), one.pop("data")
        layout = convert(one, TokenFieldLayout, field=f"token_fields.{name}")
        fields[name] = TokenField(read_array(data, layout.shape, layout.dtype), layout.start)
    return fields


class _Column(NamedTuple):
    """How a type of field is stored.

    Attributes:
        kind: returns the column's Arrow type.
        write: the conversion of a value to the Python value that Arrow stores.
        read: the conversion of an Arrow scalar, which is not null. Arrays are copies, which do not keep the
            column in memory.
        name: the column's name, or "" if it is the attribute's name.
    """

    kind: Callable[[], Any]
    write: Callable[[Any], Any] = lambda value: value
    read: Callable[[Any], Any] = lambda stored: stored.as_py()
    name: str = ""


def _read_array(stored: Any) -> NDArray[Any]:
    numbers: NDArray[Any] = stored.values.to_numpy()
    return numbers.copy()


_TEXT, _NUMBER = _Column(lambda: pyarrow().string()), _Column(lambda: pyarrow().float64())
_ARRAYS: dict[Any, type[np.number[Any]]] = {TokenIds: np.int32, Logprobs: np.float32}
_COLUMNS: dict[Any, _Column] = {
    Count: _Column(lambda: pyarrow().int64()),
    str: _TEXT,
    Source: _TEXT,
    Seconds: _NUMBER,
    Probability: _NUMBER,
    TokenIds: _Column(lambda: _list_of(pyarrow().int32()), read=_read_array),
    Logprobs: _Column(lambda: _list_of(pyarrow().float32()), read=_read_array),
    CandidateSets: _Column(lambda: _list_of(_list_of(pyarrow().int32())), name="candidate_ids"),
    WeightSpans: _Column(
        lambda: _list_of(_struct(version=pyarrow().string(), start=pyarrow().int32(), end=pyarrow().int32())),
        write_spans,
        lambda spans: tuple((one["version"], one["end"] - one["start"]) for one in spans.as_py()),
        "weight_versions",
    ),
    TokenRanges: _Column(
        lambda: _list_of(_struct(start=pyarrow().int32(), end=pyarrow().int32())),
        lambda ranges: [{"start": start, "end": end} for start, end in ranges],
        lambda ranges: tuple((one["start"], one["end"]) for one in ranges.as_py()),
    ),
    TokenFields: _Column(
        lambda: _list_of(
            _struct(
                name=pyarrow().string(),
                data=pyarrow().binary(),
                shape=_list_of(pyarrow().int32()),
                start=pyarrow().int32(),
                dtype=pyarrow().string(),
            )
        ),
        _write_fields,
        _read_fields,
    ),
    Mapping[str, Any]: _Column(
        lambda: pyarrow().string(),
        lambda params: json.dumps(params, ensure_ascii=False),
        lambda text: decode_json(text.as_py().encode(), dict[str, Any], field="sampling_params"),
    ),
}
_ROLLOUT = tuple((field, _COLUMNS[field.type]) for field in FIELDS[Rollout])
_PLAIN = tuple(field for field in FIELDS[Rollout] if field.type not in (*_ARRAYS, CandidateSets, TokenFields))
_PLAIN_TYPES = msgspec.defstruct(
    "Rollout", [(one.name, one.type | None if one.is_optional else one.type) for one in _PLAIN]
)


def schema() -> Any:
    """Return the `pyarrow.Schema` of the table."""
    pa = pyarrow()
    columns = []
    for field, column in _ROLLOUT:
        columns.append(pa.field(column.name or field.name, column.kind(), nullable=field.is_optional))
        if field.type == CandidateSets:
            columns.append(pa.field("candidate_logprobs", _list_of(_list_of(pa.float32()))))
            columns.append(pa.field("candidate_sampled_ids", _list_of(pa.int32())))
    return pa.schema(columns)


def check_rollout(rollout: Rollout) -> None:
    """Raise InvalidInputError if a field of `rollout` cannot be stored. The error names the field."""
    if not isinstance(rollout, Rollout):
        raise InvalidInputError(f"got {type(rollout).__name__}, expected a Rollout")
    plain = {field.name: getattr(rollout, field.name) for field in _PLAIN}
    plain = {name: one.item() if isinstance(one, np.generic) else one for name, one in plain.items()}
    try:
        convert(plain, _PLAIN_TYPES, field="rollout")
    except WireError as error:
        raise InvalidInputError(str(error)) from None
    for name, value in plain.items():
        if (unstorable := find_json_problem(value)) is not None:
            raise InvalidInputError(f"{name}: {unstorable}")
    for field in FIELDS[Rollout]:
        if field.type in _ARRAYS:
            _check_array(field.name, getattr(rollout, field.name), _ARRAYS[field.type])
    for name, one in rollout.token_fields.items():
        if one.values.dtype.name not in ("uint8", "uint16", "uint32") or one.start < 0:
            got = f"{one.values.dtype} from position {one.start} on"
            raise InvalidInputError(f"token_fields: {name}: got {got}, expected unsigned integers")
    for name, problem in find_problems(rollout):
        raise InvalidInputError(f"{name}: {problem}")
    if (sets := rollout.candidates) is not None and len(sets.token_ids) > _MAX_ENTRIES:
        raise InvalidInputError(
            f"candidates: got {len(sets.token_ids)}, expected at most {_MAX_ENTRIES} per rollout"
        )


def _check_array(name: str, value: Any, dtype: type[np.number[Any]]) -> None:
    is_array = isinstance(value, np.ndarray)
    if not is_array or value.dtype != dtype or value.ndim != 1:
        kind = f"{value.dtype} {list(value.shape)}" if is_array else type(value).__name__
        raise InvalidInputError(f"{name}: got {kind}, expected {dtype.__name__} with one dimension")


def num_bytes_of(rollout: Rollout) -> int:
    """Return the approximate uncompressed size of a rollout's columns, in bytes."""
    sets = rollout.candidates
    num_tokens = len(rollout.prompt_ids) + 2 * len(rollout.output_ids)
    num_candidates = 0 if sets is None else len(sets) + len(sets.token_ids) * (2 if sets.has_logprobs else 1)
    in_fields = sum(one.values.nbytes for one in rollout.token_fields.values())
    return 4 * (num_tokens + num_candidates) + len(rollout.text) + in_fields


def to_batch(rollouts: Sequence[Rollout]) -> Any:
    """Convert rollouts to a `pyarrow.RecordBatch`.

    `check_rollout` must accept each rollout. The rollouts must have fewer than 2^31 candidates in total.
    """
    pa = pyarrow()
    columns = []
    for field, column in _ROLLOUT:
        values = [getattr(rollout, field.name) for rollout in rollouts]
        if field.type == CandidateSets:
            columns += _set_columns(values, [rollout.output_ids for rollout in rollouts])
        else:
            stored = [None if value is None else column.write(value) for value in values]
            columns.append(pa.array(stored, column.kind()))
    return pa.record_batch(columns, schema=schema())


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
    for row, number in enumerate(rows):
        try:
            values = {field.name: _read(columns, field, column, row) for field, column in _ROLLOUT}
            rollout = Rollout(**values)
            check_rollout(rollout)
        except (InvalidInputError, WireError) as error:
            raise InvalidInputError(f"rollout {number}: {error}") from error
        yield rollout


def _read(columns: Mapping[str, Any], field: Field, column: _Column, row: int) -> Any:
    if field.type is CandidateSets:
        return _read_sets(columns, row)
    stored = columns[column.name or field.name][row]
    return column.read(stored) if stored.is_valid else None


def _read_sets(columns: Mapping[str, Any], row: int) -> CandidateSets | None:
    ids, logprobs, sampled_ids, output_ids = (
        columns[name][row]
        for name in ("candidate_ids", "candidate_logprobs", "candidate_sampled_ids", "output_ids")
    )
    if not ids.is_valid:
        return None
    token_ids, offsets = _read_flat(ids)
    known = _read_flat(logprobs)[0] if logprobs.is_valid else None
    drawn = _read_array(sampled_ids if sampled_ids.is_valid else output_ids)
    return CandidateSets(token_ids, known, offsets - offsets[0], drawn)


def _read_flat(stored: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return a copy of all numbers in a list of lists, and the offsets of its lists, in the column's."""
    offsets = stored.values.offsets.to_numpy().astype(np.int64)
    return stored.values.values.to_numpy()[offsets[0] : offsets[-1]].copy(), offsets


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
        return _cut(lengths, values, column.is_null() if column.null_count else None)
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
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return "text" if is_text else None


def _set_columns(sets: Sequence[CandidateSets | None], output_ids: Sequence[TokenIds]) -> list[Any]:
    """Return the three columns of candidate sets."""
    others = [
        None if one is None or np.array_equal(one.sampled_ids, ids) else one.sampled_ids
        for one, ids in zip(sets, output_ids, strict=True)
    ]
    with_logprobs = [one if one is not None and one.has_logprobs else None for one in sets]
    return [
        _nested(sets, [np.empty(0, np.int32), *(one.token_ids for one in sets if one is not None)]),
        _nested(
            with_logprobs,
            [np.empty(0, np.float32), *(one.logprobs for one in with_logprobs if one is not None)],
        ),
        pyarrow().array(others, _list_of(pyarrow().int32())),
    ]


def _nested(sets: Sequence[CandidateSets | None], values: Sequence[NDArray[Any]]) -> Any:
    """Return an Arrow column with a list for each rollout, which holds a list for each of its sets.

    `values` has the token ids or the log-probs of all sets, in their order.
    """
    sizes = [np.empty(0, np.int64) if one is None else one.sizes for one in sets]
    inner = _cut(np.concatenate([np.empty(0, np.int64), *sizes]), pyarrow().array(np.concatenate(values)))
    is_null = [one is None for one in sets]
    lengths = np.array([len(one) for one in sizes], np.int64)
    return _cut(lengths, inner, pyarrow().array(is_null) if any(is_null) else None)


def _cut(lengths: NDArray[np.int64], values: Any, mask: Any = None) -> Any:
    pa = pyarrow()
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    kind = pa.list_(pa.field("element", values.type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind, mask=mask)


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
    floats = _list_of(pa.float32())
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
