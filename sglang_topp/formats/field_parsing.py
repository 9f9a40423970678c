"""Parse and check single fields of an inference engine's answer. Each WireError names the invalid field.

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

import binascii
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pybase64
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sglang_topp.errors import (
    InvalidCandidateSetsError,
    MissingCandidateSetsError,
    SampledTokenMissingError,
    WireError,
    describe,
)

FLOAT32 = np.dtype("<f4")
INT32 = np.dtype("<i4")
# The code of `array`, the types of the JSON values, and what they are called in error messages.
_NUMBERS: Mapping[type[np.generic], tuple[str, set[type], str]] = {
    np.float64: ("d", {int, float}, "log-probs"),
    np.int32: ("i", {int}, "integers of 32 bits"),
}


@contextmanager
def renaming_errors(fields: Mapping[str, str]) -> Iterator[None]:
    """Convert an InvalidCandidateSetsError to a WireError that names the answer's field.

    `fields` maps the name of each `CandidateSets` array to the name of the answer's field with this array.
    """
    try:
        yield
    except InvalidCandidateSetsError as error:
        kind = SampledTokenMissingError if error.field == "sampled_ids" else WireError
        raise kind(fields[error.field], error.problem) from None


def read_lists(name: str, rows: Any) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int32]]:
    """Parse each position's list of `[logprob, token_id, text]` entries, or null.

    Returns:
        int32 [n], the token ids; float64 [n], the log-probs; and int32 [T], how many candidates each position
        has, or -1 if it has no distribution.
    """
    if not isinstance(rows, list) or not all(row is None or isinstance(row, list) for row in rows):
        raise WireError(
            name, "expected a list with one list of [logprob, token_id, text] (or null) per position"
        )
    lengths = np.fromiter((-1 if row is None else len(row) for row in rows), np.int32, len(rows))
    entries = list(chain.from_iterable(row for row in rows if row is not None))
    # Check only the distinct types and lengths of the entries, because a loop that checks each entry takes
    # ten times as long.
    if not set(map(type, entries)) <= {list, tuple} or not set(map(len, entries)) <= {2, 3}:
        raise WireError(name, "expected every candidate as [logprob, token_id, text or null]")
    logprobs = numbers(name, [entry[0] for entry in entries])
    return numbers(name, [entry[1] for entry in entries], np.int32), logprobs, lengths


def check_rows(
    fields: Mapping[str, str],
    token_ids: NDArray[np.int32],
    lengths: NDArray[np.integer[Any]],
    num_tokens: int,
    vocab_size: int | None,
    required: str = "",
) -> None:
    """Check that candidates are those of an answer of `num_tokens` tokens. `CandidateSets` checks the values.

    Args:
        fields: as in `renaming_errors`.
        lengths: integers [T]: how many candidates each position has, or -1 if it has no distribution.
        vocab_size: if not None, ids of `vocab_size` or more are errors.
        required: if not empty, every position must have candidates, and `required` is what error messages
            call them.

    Raises:
        MissingCandidateSetsError: a position lacks its `required` candidates.
        WireError: the number of positions is wrong, or an id is beyond the vocabulary.
    """
    if len(lengths) != num_tokens:
        raise WireError(fields["offsets"], f"got {len(lengths)} positions for {num_tokens} tokens")
    if vocab_size is not None and len(token_ids) and (highest := int(token_ids.max())) >= vocab_size:
        raise WireError(fields["token_ids"], f"got id {highest}, expected less than vocab_size {vocab_size}")
    if required and len(missing := np.flatnonzero(lengths <= 0)):
        raise MissingCandidateSetsError(
            fields["offsets"],
            f"no {required} at {len(missing)} of {num_tokens} positions, the first at {missing[0]};"
            " every generated token needs one",
        )


def numbers(field: str, values: Any, dtype: type[np.int32 | np.float64] = np.float64) -> NDArray[Any]:
    """Parse a JSON list of log-probs, or of 32-bit integers."""
    code, kinds, expected = _NUMBERS[dtype]
    if not isinstance(values, list):
        raise WireError(field, f"got {type(values).__name__}, expected a list of {expected}")
    if not set(map(type, values)) <= kinds:
        wrong = next(value for value in values if type(value) not in kinds)
        raise WireError(field, f"got {describe(wrong)}, expected {expected}")
    try:
        return np.frombuffer(array(code, values), dtype)
    except OverflowError:
        raise WireError(field, f"got {describe(max(values, key=abs))}, expected {expected}") from None


def token_ids_of(field: str, values: ArrayLike) -> NDArray[np.int32]:
    """Return token ids (a list or an array of T integers) as int32 [T], all at least 0."""
    if isinstance(values, list | tuple):
        ids: NDArray[np.integer[Any]] = numbers(field, list(values), np.int32)
    else:
        ids = np.asarray(values)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise WireError(field, f"got {ids.ndim}-D {ids.dtype}, expected 1-D integers")
    if len(ids):
        for value in (int(ids.min()), int(ids.max())):
            if not 0 <= value <= np.iinfo(np.int32).max:
                raise WireError(field, f"got {value}, expected token ids from 0 to {np.iinfo(np.int32).max}")
    return ids.astype(np.int32, copy=False)


def b64text(array: NDArray[Any], dtype: DTypeLike) -> str:
    """Convert `array` to `dtype`, and return the converted array as base64 text."""
    return pybase64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode("ascii")


def b64array(field: str, text: Any, dtype: DTypeLike) -> NDArray[Any]:
    """Decode base64 text into a 1-D array of `dtype`."""
    if not isinstance(text, str):
        raise WireError(field, f"got {type(text).__name__}, expected base64 text")
    try:
        raw = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(field, f"not base64: {error}") from None
    if len(raw) % (size := np.dtype(dtype).itemsize):
        raise WireError(
            field, f"got {len(raw)} bytes, expected a multiple of {size} ({np.dtype(dtype).name})"
        )
    return np.frombuffer(raw, dtype)
