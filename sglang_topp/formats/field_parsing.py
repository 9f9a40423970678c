"""Parse and check single fields of an inference engine's answer. Each WireError names the invalid field.

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import numpy as np
import pybase64
from numpy.typing import ArrayLike, NDArray

from sglang_topp.errors import (
    InvalidCandidateSetsError,
    MissingCandidateSetsError,
    SampledTokenMissingError,
    WireError,
    describe,
)

FLOAT32 = np.dtype("<f4")
INT32 = np.dtype("<i4")


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


@dataclass(frozen=True)
class CandidateRows:
    """The candidates of each position as an answer has them. `CandidateSets` checks their values."""

    token_ids: NDArray[np.int32]
    """int32 [n], position after position."""
    logprobs: NDArray[np.floating[Any]]
    """floats [n]."""
    lengths: NDArray[np.integer[Any]]
    """integers [T]: how many candidates each position has, or -1 if it has no distribution."""
    fields: Mapping[str, str]
    """The answer's field with each array of `CandidateSets`, for `renaming_errors`."""

    @classmethod
    def of_lists(cls, name: str, rows: Any) -> CandidateRows:
        """Parse each position's list of `[logprob, token_id, text]` entries, or null."""
        if not isinstance(rows, list) or not all(row is None or isinstance(row, list) for row in rows):
            raise WireError(
                name, "expected a list with one list of [logprob, token_id, text] (or null) per position"
            )
        lengths = np.fromiter((-1 if row is None else len(row) for row in rows), np.int32, len(rows))
        entries = list(chain.from_iterable(row for row in rows if row is not None))
        # Check only the distinct types and lengths of the entries, because a loop that checks each entry
        # takes ten times as long.
        if not set(map(type, entries)) <= {list, tuple} or not set(map(len, entries)) <= {2, 3}:
            raise WireError(name, "expected every candidate as [logprob, token_id, text or null]")
        logprobs = numbers(name, [entry[0] for entry in entries])
        token_ids = integers(name, [entry[1] for entry in entries])
        return cls(token_ids, logprobs, lengths, fields_of(name, name, name))

    def check(self, num_tokens: int, vocab_size: int | None, required: str = "") -> None:
        """Check that the rows are those of an answer of `num_tokens` tokens.

        Args:
            vocab_size: if not None, ids of `vocab_size` or more are errors.
            required: if not empty, every position must have candidates, and `required` is what error messages
                call them.

        Raises:
            MissingCandidateSetsError: a position lacks its `required` candidates.
            WireError: the number of positions is wrong, or an id is beyond the vocabulary.
        """
        check_count(self.fields["offsets"], len(self.lengths), num_tokens)
        ids = self.token_ids
        if vocab_size is not None and len(ids) and (highest := int(ids.max())) >= vocab_size:
            raise WireError(
                self.fields["token_ids"], f"got id {highest}, expected less than vocab_size {vocab_size}"
            )
        if required and len(missing := np.flatnonzero(self.lengths <= 0)):
            raise MissingCandidateSetsError(
                self.fields["offsets"],
                f"no {required} at {len(missing)} of {num_tokens} positions, the first at {missing[0]};"
                " every generated token needs one",
            )


def fields_of(ids: str, logprobs: str, counts: str) -> dict[str, str]:
    """Return the `fields` of `renaming_errors`, from the names of three fields of an answer."""
    return {"token_ids": ids, "logprobs": logprobs, "offsets": counts, "sampled_ids": ids}


def check_together(answer: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise WireError if the answer has some of these fields, but lacks others."""
    present = [name for name in names if name in answer]
    for name in names:
        if name not in present:
            raise WireError(name, f"missing beside {present[0]}")


def numbers(field: str, values: Any) -> NDArray[np.float64]:
    """Parse a JSON list of log-probs."""
    if not isinstance(values, list):
        raise WireError(field, f"got {type(values).__name__}, expected a list of numbers")
    if not set(map(type, values)) <= {int, float}:
        wrong = next(value for value in values if type(value) not in (int, float))
        raise WireError(field, f"got {describe(wrong)} as a log-prob")
    try:
        return np.fromiter(values, np.float64, len(values))
    except OverflowError as error:
        raise WireError(field, f"got a number that is too large: {error}") from None


def integers(field: str, values: Any) -> NDArray[np.int32]:
    """Parse a JSON list of 32-bit integers.

    `struct` converts the values, and raises an error for any value other than an integer or a boolean.
    `struct` converts integers twice as fast as NumPy.
    """
    if not isinstance(values, list):
        raise WireError(field, f"got {type(values).__name__}, expected a list of integers")
    try:
        array = np.frombuffer(struct.pack(f"<{len(values)}i", *values), INT32)
    except struct.error:
        wrong = next(v for v in values if not isinstance(v, int) or not -(1 << 31) <= v < 1 << 31)
        raise WireError(field, f"got {describe(wrong)}, expected integers of 32 bits") from None
    # `struct` packs a boolean as 0 or 1, so the code checks the types only of values that became 0 or 1.
    if bool in set(map(type, compress(values, ((array | 1) == 1).tobytes()))):
        raise WireError(field, "got a boolean, expected integers of 32 bits")
    return array


def token_ids_of(field: str, values: ArrayLike) -> NDArray[np.integer[Any]]:
    """Check the sampled token ids (a list or an array of T integers), and return them as an array."""
    if isinstance(values, list | tuple):
        ids: NDArray[np.integer[Any]] = integers(field, list(values))
    else:
        ids = np.asarray(values)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise WireError(field, f"got {ids.ndim}-D {ids.dtype}, expected 1-D integers")
    check_range(field, ids, 0, "token ids from 0 on")
    return ids


def check_range(field: str, values: NDArray[np.integer[Any]], lowest: int, expected: str) -> None:
    """Raise WireError unless all values fit int32 and are at least `lowest`."""
    if len(values):
        for value in (int(values.min()), int(values.max())):
            if not lowest <= value <= np.iinfo(np.int32).max:
                raise WireError(field, f"got {value}, expected {expected}")


def check_count(field: str, count: int, num_tokens: int) -> None:
    """Raise WireError unless the field has as many positions as the answer has tokens."""
    if count != num_tokens:
        raise WireError(field, f"got {count} positions for {num_tokens} tokens")


def b64text(array: NDArray[Any], dtype: np.dtype[Any]) -> str:
    """Convert `array` to `dtype`, and return the converted array as base64 text."""
    return pybase64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode("ascii")


def b64bytes(field: str, text: Any) -> bytes:
    """Decode base64 text to bytes."""
    if not isinstance(text, str):
        raise WireError(field, f"got {type(text).__name__}, expected base64 text")
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(field, f"not base64: {error}") from None


def b64array(field: str, text: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Decode base64 text into a 1-D array of `dtype`."""
    raw = b64bytes(field, text)
    if len(raw) % dtype.itemsize:
        raise WireError(
            field, f"got {len(raw)} bytes, expected a multiple of {dtype.itemsize} ({dtype.name})"
        )
    return np.frombuffer(raw, dtype)
