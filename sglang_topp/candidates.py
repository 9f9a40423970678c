"""CandidateSets: which tokens could have been drawn at each generated position, and how likely each was.

Shape legend: T positions, n candidates in all, K candidates of one position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp._distinct import all_distinct
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError

__all__ = ["NO_TOKEN", "CandidateSets"]

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
Float32Array: TypeAlias = NDArray[np.float32]

NO_TOKEN = -1
"""`sampled_ids` of a position where nothing was sampled; allowed only where the span is empty."""

# Log-probs come out of float32 softmaxes and may round to just above 0.
_MAX_LOGPROB = 1e-3
# At or below it, a log-prob stands for probability 0.
_LOWEST = np.finfo(np.float32).min
# Candidates that are looked at together.
_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class CandidateSets:
    """The candidate set of every generated position of one sequence, as one CSR value.

    Position `t` owns the span `offsets[t]:offsets[t + 1]` of `token_ids` and `logprobs`. A span is
    ordered by log-prob, highest first, then by token id; its ids are distinct and hold
    `sampled_ids[t]`. An empty span marks a position that the policy did not sample (a tool's or the
    environment's token): there is no replay there, and the loss mask is 0 there.

    Args:
        token_ids: int32 [n], the candidates' ids, position after position.
        logprobs: float32 [n], natural log-probs under the full vocabulary; `-inf` (or float32's
            lowest value, which SGLang writes for it) only for a sampled token of zero probability.
        offsets: int64 [T + 1], `offsets[0] == 0`, never decreasing, `offsets[T] == n`.
        sampled_ids: int32 [T], the sampled token of each position; `NO_TOKEN` is allowed where the
            span is empty.

    The arrays are kept without a copy where their dtype fits, as read-only views: whoever passes an
    array must not write to it afterwards.

    Raises:
        InvalidCandidateSetsError: the arrays break one of the rules above; the message names the
            array and the first position at fault.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    offsets: Int64Array
    sampled_ids: Int32Array

    def __init__(
        self, token_ids: ArrayLike, logprobs: ArrayLike, offsets: ArrayLike, sampled_ids: ArrayLike
    ) -> None:
        self._assign(
            _as_integers("token_ids", token_ids, np.int32),
            _as_float32("logprobs", logprobs),
            _as_integers("offsets", offsets, np.int64),
            _as_integers("sampled_ids", sampled_ids, np.int32),
        )
        _check(self)

    def _assign(self, token_ids: Any, logprobs: Any, offsets: Any, sampled_ids: Any) -> None:
        for name, array in (
            ("token_ids", token_ids),
            ("logprobs", logprobs),
            ("offsets", offsets),
            ("sampled_ids", sampled_ids),
        ):
            view = array.view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    @classmethod
    def _trusted(cls, token_ids: Any, logprobs: Any, offsets: Any, sampled_ids: Any) -> CandidateSets:
        """Build from arrays that are valid by construction (parts of a checked value)."""
        self = object.__new__(cls)
        self._assign(token_ids, logprobs, offsets, sampled_ids)
        return self

    # -- reading -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of positions T."""
        return len(self.sampled_ids)

    @overload
    def __getitem__(self, index: int) -> tuple[Int32Array, Float32Array]: ...
    @overload
    def __getitem__(self, index: slice) -> CandidateSets: ...
    def __getitem__(self, index: int | slice) -> tuple[Int32Array, Float32Array] | CandidateSets:
        """`sets[t]` is `(token_ids int32 [K], logprobs float32 [K])`; `sets[a:b]` is a CandidateSets."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidInputError(f"slice step: got {step}, expected 1 (positions are contiguous)")
            stop = max(start, stop)
            low, high = self.offsets[start], self.offsets[stop]
            return CandidateSets._trusted(
                self.token_ids[low:high],
                self.logprobs[low:high],
                self.offsets[start : stop + 1] - low,
                self.sampled_ids[start:stop],
            )
        t = range(len(self))[index]
        span = slice(self.offsets[t], self.offsets[t + 1])
        return self.token_ids[span], self.logprobs[span]

    def __iter__(self) -> Iterator[tuple[Int32Array, Float32Array]]:
        """The pairs `sets[0]`, `sets[1]`, …"""
        return (self[t] for t in range(len(self)))

    @cached_property
    def sizes(self) -> Int64Array:
        """int64 [T]: the number of candidates at each position; 0 where there is no replay."""
        return _read_only(np.diff(self.offsets))

    @cached_property
    def logprob_sum(self) -> Float32Array:
        """float32 [T]: the natural log of the kept mass, `log Σ_{i in C_t} q[i]`, accumulated in float64.

        0 where the span is empty: nothing is masked there, so `logprob - logprob_sum` is the
        log-prob itself. A set of one has exactly its own log-prob as its sum.
        """
        out = np.zeros(len(self), np.float64)
        for block in _blocks(self.offsets):
            sets = self[block]
            rows = np.flatnonzero(sets.sizes)
            if len(rows):
                starts = sets.offsets[rows]
                # The first of a span is its highest.
                peak = sets.logprobs[starts].astype(np.float64)
                shifted = np.exp(sets.logprobs - np.repeat(peak, sets.sizes[rows]))
                out[block][rows] = peak + np.log(np.add.reduceat(shifted, starts))
        return _read_only(out.astype(np.float32))

    @cached_property
    def sampled_logprobs(self) -> Float32Array:
        """float32 [T]: the sampled token's log-prob under the full vocabulary; 0 where the span is empty.

        `sampled_logprobs - logprob_sum` is the rollout's log-prob under the replayed distribution.
        """
        out = np.zeros(len(self), np.float32)
        for block in _blocks(self.offsets):
            sets = self[block]
            is_sampled = sets.token_ids == sets.sampled_ids.take(_rows(sets))
            out[block][sets.sizes > 0] = sets.logprobs[is_sampled]
        return _read_only(out)

    # -- making ------------------------------------------------------------------------------------

    @classmethod
    def empty(cls, num_positions: int) -> CandidateSets:
        """`num_positions` positions without replay: empty spans, `sampled_ids` all `NO_TOKEN`."""
        if num_positions < 0:
            raise InvalidInputError(f"num_positions: got {num_positions}, expected 0 or more")
        return cls._trusted(
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.zeros(num_positions + 1, np.int64),
            np.full(num_positions, NO_TOKEN, np.int32),
        )

    @classmethod
    def concat(cls, parts: Sequence[CandidateSets]) -> CandidateSets:
        """The positions of all `parts`, one after the other."""
        if not parts:
            return cls.empty(0)
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([part.sizes for part in parts])
        return cls._trusted(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            _offsets(sizes),
            np.concatenate([part.sampled_ids for part in parts]),
        )

    @classmethod
    def from_meta_info(
        cls, meta_info: Mapping[str, Any], output_ids: ArrayLike, *, vocab_size: int | None = None
    ) -> CandidateSets:
        """Decode the sets of a `/generate` response's generated tokens (base64 or list form).

        Args:
            meta_info: the response's `meta_info`.
            output_ids: integers [T], the response's `output_ids`.
            vocab_size: when given, ids at or above it are errors.

        Raises:
            MissingCandidateSetsError: the response holds no sets, or none for some position.
            SampledTokenMissingError: a set lacks its sampled token.
            WireError: anything else is malformed; the message names the field.
        """
        from sglang_topp import wire

        return wire.decode_output_sets(meta_info, output_ids, vocab_size=vocab_size)

    def take(self, positions: ArrayLike) -> CandidateSets:
        """The sets of these positions, in this order; a position may come more than once.

        Args:
            positions: integers [R], from 0 to T - 1.

        Raises:
            InvalidInputError: not integers, or out of range.
        """
        index = np.asarray(positions)
        if index.ndim != 1 or (index.dtype.kind not in "iu" and index.size):
            raise InvalidInputError(
                f"positions: got {index.dtype} of shape {index.shape}, expected integers [R]"
            )
        if (r := _first((index < 0) | (index >= len(self)))) is not None:
            raise InvalidInputError(f"positions: got {index[r]}, expected 0 or more, below {len(self)}")
        index = index.astype(np.int64)
        sizes = self.sizes[index]
        offsets = _offsets(sizes)
        entries = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], sizes)
        return CandidateSets._trusted(
            self.token_ids[entries], self.logprobs[entries], offsets, self.sampled_ids[index]
        )

    def intersect(self, other: CandidateSets) -> CandidateSets:
        """The candidates that are in both, with this value's log-probs.

        Both must cover the same sampled tokens, so a sampled token is always kept; `logprob_sum` of
        the result is that of the smaller sets.

        Raises:
            InvalidInputError: the two differ in positions, sampled tokens, or in which spans are empty;
                or all they share somewhere is a sampled token of zero probability.
        """
        if len(self) != len(other):
            raise InvalidInputError(f"other: got {len(other)} positions, expected {len(self)}")
        for what, mine, theirs in (
            ("sampled_ids", self.sampled_ids, other.sampled_ids),
            ("empty spans", self.sizes == 0, other.sizes == 0),
        ):
            if (t := _first(mine != theirs)) is not None:
                raise InvalidInputError(f"other: {what} differ at position {t}: {theirs[t]} and {mine[t]}")
        kept = np.isin(_row_keys(self), _row_keys(other), assume_unique=True)
        sizes = np.bincount(_rows(self)[kept], minlength=len(self))
        both = CandidateSets._trusted(
            self.token_ids[kept], self.logprobs[kept], _offsets(sizes), self.sampled_ids
        )
        if (t := _impossible(both)) is not None:
            raise InvalidInputError(
                f"other: shares nothing but a sampled token of zero probability at position {t}"
            )
        return both

    def to_lists(self) -> tuple[list[list[int]], list[list[float]]]:
        """`(token_ids, logprobs)` as plain nested lists, one inner list per position."""
        ids, logprobs, bounds = self.token_ids.tolist(), self.logprobs.tolist(), self.offsets.tolist()
        spans = [slice(low, high) for low, high in pairwise(bounds)]
        return [ids[span] for span in spans], [logprobs[span] for span in spans]

    # -- a value among values ----------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Equal in every entry of all four arrays."""
        if not isinstance(other, CandidateSets):
            return NotImplemented
        return (
            np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.logprobs, other.logprobs)
            and np.array_equal(self.sampled_ids, other.sampled_ids)
        )

    __hash__ = None  # type: ignore[assignment]  # equal by content of large arrays: not a dict key

    def __repr__(self) -> str:
        mean = len(self.token_ids) / len(self) if len(self) else 0.0
        return f"CandidateSets(positions={len(self)}, candidates={len(self.token_ids)}, mean_size={mean:.1f})"

    def __reduce__(self) -> tuple[object, ...]:
        # Through plain arrays, so that pickle protocol 5 (Ray, multiprocessing) moves them out of band.
        return CandidateSets._trusted, self._arrays()

    def _arrays(self) -> tuple[Int32Array, Float32Array, Int64Array, Int32Array]:
        return self.token_ids, self.logprobs, self.offsets, self.sampled_ids


def _check(sets: CandidateSets) -> None:
    """Raise InvalidCandidateSetsError unless every rule of the class docstring holds."""
    ids, logprobs, offsets, sampled = sets._arrays()
    if len(ids) != len(logprobs):
        raise InvalidCandidateSetsError("logprobs", f"got {len(logprobs)} entries for {len(ids)} token_ids")
    if len(offsets) != len(sampled) + 1:
        raise InvalidCandidateSetsError(
            "offsets", f"got {len(offsets)} entries for {len(sampled)} sampled_ids, expected one more"
        )
    if offsets[0] != 0 or offsets[-1] != len(ids):
        raise InvalidCandidateSetsError(
            "offsets",
            f"run from {offsets[0]} to {offsets[-1]}, expected from 0 to {len(ids)}, the number of token_ids",
        )
    # Not by `sizes`: a difference of int64 can wrap around.
    if (t := _first(offsets[1:] < offsets[:-1])) is not None:
        raise InvalidCandidateSetsError("offsets", f"decrease after position {t}")

    for block in _blocks(offsets):
        _check_spans(sets[block], block.start)


def _blocks(offsets: Int64Array) -> Iterator[slice]:
    """All positions, some at a time: temporaries that fit a core's cache, and that the next ones can reuse.
    Memory that is touched for the first time costs more than what is computed on it."""
    start = 0
    while start < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[start] + _AT_ONCE, side="right")) - 1
        stop = max(stop, start + 1)
        yield slice(start, stop)
        start = stop


def _check_spans(sets: CandidateSets, first: int) -> None:
    """Raise unless every span keeps the rules; `first` is the first position's number in messages."""
    ids, logprobs, offsets, sampled = sets._arrays()
    # Masks are made only once something is known to be wrong, to say where.
    rows = _rows(sets)
    if len(ids) and ids.min() < 0:
        e = int((ids < 0).argmax())
        raise InvalidCandidateSetsError(
            "token_ids", f"got {ids[e]} at position {first + rows[e]}, expected 0 or more"
        )
    if len(ids) and not logprobs.max() <= _MAX_LOGPROB:
        e = int((~(logprobs <= _MAX_LOGPROB)).argmax())
        raise InvalidCandidateSetsError(
            "logprobs", f"got {logprobs[e]} at position {first + rows[e]}, expected at most 0 and no NaN"
        )

    # Neighbours inside a span: log-probs fall, ids rise within a tie.
    if len(ids) > 1:
        ordered = logprobs[1:] == logprobs[:-1]
        ordered &= ids[1:] > ids[:-1]
        ordered |= logprobs[1:] < logprobs[:-1]
        starts = offsets[(offsets > 0) & (offsets < len(ids))]
        ordered[starts - 1] = True
        if not ordered.all():
            e = int(ordered.argmin())
            raise InvalidCandidateSetsError(
                "token_ids",
                f"{ids[e]} then {ids[e + 1]} (log-probs {logprobs[e]}, {logprobs[e + 1]})"
                f" at position {first + rows[e]}; expected log-probs highest first, then ids lowest first,"
                " without duplicates",
            )
    if not all_distinct(ids, rows):
        keys = np.sort(_row_keys(sets), kind="stable")
        twice = int(keys[1:][keys[1:] == keys[:-1]][0])
        raise InvalidCandidateSetsError(
            "token_ids", f"{twice & 0xFFFFFFFF} stands twice at position {first + (twice >> 32)}"
        )

    # Ids are distinct by now, so a span holds its sampled token at most once.
    is_sampled = ids == sampled.take(rows)
    if np.count_nonzero(is_sampled) != np.count_nonzero(sets.sizes):
        lacking = sets.sizes > 0
        lacking[rows[is_sampled]] = False
        lacks = int(lacking.argmax())
        raise InvalidCandidateSetsError(
            "sampled_ids",
            f"{sampled[lacks]} is not among the {sets.sizes[lacks]} candidates at position {first + lacks}",
        )
    if (t := _first((sampled < NO_TOKEN) & (sets.sizes == 0))) is not None:
        raise InvalidCandidateSetsError(
            "sampled_ids", f"got {sampled[t]} at position {first + t}, expected a token id"
        )

    if len(ids) and logprobs.min() <= _LOWEST:
        if (stray := _first((logprobs <= _LOWEST) & ~is_sampled)) is not None:
            raise InvalidCandidateSetsError(
                "logprobs",
                f"got {logprobs[stray]} at position {first + rows[stray]} for a token that was not"
                " sampled; it has no place in the set",
            )
        if (impossible := _impossible(sets)) is not None:
            raise InvalidCandidateSetsError(
                "logprobs", f"nothing but a token of zero probability at position {first + impossible}"
            )


def _impossible(sets: CandidateSets) -> int | None:
    """The first position whose set has no mass, or None."""
    filled = np.flatnonzero(sets.sizes)
    # The first of a span is its highest.
    t = _first(sets.logprobs[sets.offsets[filled]] <= _LOWEST)
    return None if t is None else int(filled[t])


def _rows(sets: CandidateSets) -> Int32Array:
    """int32 [n]: the position of every entry. `np.repeat` says the same, at more than twice the time."""
    rows = np.zeros(len(sets.token_ids), np.int32)
    filled = np.flatnonzero(sets.sizes)
    rows[sets.offsets[filled]] = np.diff(filled, prepend=0)
    return np.cumsum(rows, dtype=np.int32, out=rows)


def _row_keys(sets: CandidateSets) -> Int64Array:
    """int64 [n]: position and token id of every entry in one number."""
    return _rows(sets).astype(np.int64) << 32 | sets.token_ids


def _offsets(sizes: NDArray[np.integer[Any]]) -> Int64Array:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _first(mask: NDArray[np.bool_]) -> int | None:
    """Index of the first True, or None."""
    if not len(mask):
        return None
    index = int(mask.argmax())
    return index if mask[index] else None


_Array = TypeVar("_Array", bound=NDArray[Any])


def _read_only(array: _Array) -> _Array:
    array.flags.writeable = False
    return array


def _as_integers(name: str, values: ArrayLike, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    array = _as_array(name, values)
    if array.dtype == dtype:
        return array
    if not len(array):
        return array.astype(dtype)
    if array.dtype.kind not in "iu":
        raise InvalidCandidateSetsError(name, f"got dtype {array.dtype}, expected integers")
    bounds = np.iinfo(dtype)
    if array.min() < bounds.min or array.max() > bounds.max:
        raise InvalidCandidateSetsError(name, f"got values outside {bounds.dtype}")
    return array.astype(dtype)


def _as_float32(name: str, values: ArrayLike) -> Float32Array:
    array = _as_array(name, values)
    if array.dtype == np.float32:
        return array
    if len(array) and array.dtype.kind != "f":
        raise InvalidCandidateSetsError(name, f"got dtype {array.dtype}, expected floats")
    with np.errstate(over="ignore"):
        rounded = array.astype(np.float32)
    if (e := _first(np.isinf(rounded) & np.isfinite(array))) is not None:
        raise InvalidCandidateSetsError(name, f"got {array[e]}, expected values that float32 can hold")
    return rounded


def _as_array(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor that NumPy cannot read
        raise InvalidCandidateSetsError(name, f"cannot be read as one number per entry: {error}") from None
    if array.ndim != 1:
        raise InvalidCandidateSetsError(name, f"got {array.ndim} dimensions, expected 1")
    return array
