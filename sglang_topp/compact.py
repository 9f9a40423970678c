"""Compact: candidate sets in few bytes, beside the tokens that were sampled from them.

Sizes take as few bytes as the largest needs, ids 16 bits and as many more as the highest needs; log-probs are
as they were. (Half of their bits are noise. An entropy coder would take another quarter off the bytes, at
three times the time to encode: `benchmarks/compact.py`.) Numbers are little-endian, part follows part::

    offset  bytes      content
    0       4          b"TPCC"
    4       1          version: 1
    5       1          s, bytes of a set size: 1, 2 or 4
    6       1          u, upper bits of an id: 0, 1, 2, 4, 8 or 16
    7       1          l, bytes of a log-prob: 4; 2 for rounded ones; 0 for sets without
    8       4          int32 e: rounded log-probs are counted in steps of 2^e; else 0
    12      8          uint64 T, the number of positions
    20      8          uint64 n, the number of candidates
    28      s T        set sizes
    …       2 n        the lower 16 bits of the token ids
    …       m          their upper bits: m = ceil(n u / 8) bytes, or where u is 16, 2 n
    …       l n        log-probs: float32; or uint16, in steps below 0, and 65,535 for probability 0

Byte j of the upper bits holds those of the candidates j, m + j, 2 m + j, …, the first in the lowest bits.

The sampled tokens are not in it: whoever has the sets has them already, as the output's ids.

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp._checks import LOWEST
from sglang_topp._csr import Int64Array, offsets_of, sorted_by_id
from sglang_topp.answers.fields import FLOAT32, naming
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError, WireError

__all__ = ["MAX_ERROR", "Packed", "logprob_step", "pack", "unpack"]

MAX_ERROR = 2.0**-10
"""No rounded log-prob is further than this from what it was. Most are much nearer: see `Packed`."""

_MAGIC, _VERSION = b"TPCC", 1
_HEADER = struct.Struct("<4sBBBBiQQ")
_UINT16: np.dtype[Any] = np.dtype("<u2")
_SIZES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: _UINT16, 4: np.dtype("<u4")}
_UPPER_BITS = (0, 1, 2, 4, 8, 16)
_NO_MASS = 65_535
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -24, -9
# Candidates that are encoded together: at most 64 KiB of them.
_AT_ONCE = 1 << 14


class Packed:
    """The bytes of one value, made as they are asked for; their number is known before.

    Args:
        sets: T positions.
        logprob_bits: 32 for the log-probs as they are; 16 for rounded ones, each off by at most half a
            step, where a step is the smallest power of two, from 2^-24 on, that reaches the lowest log-prob
            in 65,534 steps: at most 2^-13 (0.00012) where all are above -15.99, and never more than
            `MAX_ERROR`. Values that this cannot hold for (a log-prob below -127.99, or above half a step)
            keep their 32 bits. Candidates that become equally likely by it are in the order of their ids.

    Raises:
        InvalidInputError: `logprob_bits` is neither.
    """

    def __init__(self, sets: CandidateSets, *, logprob_bits: int = 32) -> None:
        if logprob_bits not in (16, 32):
            raise InvalidInputError(f"logprob_bits: got {logprob_bits!r}, expected 32 or 16")
        self._sets = sets
        ids, largest = sets.token_ids, int(sets.sizes.max(initial=0))
        self._size_bytes = next(n for n in _SIZES if largest < 1 << 8 * n)
        needed = (int(ids.max(initial=0)) >> 16).bit_length()
        self._upper_bits = next(bits for bits in _UPPER_BITS if needed <= bits)
        exponent = _exponent(sets.logprobs) if sets.has_logprobs and logprob_bits == 16 else None
        self._step = None if exponent is None else 2.0**exponent
        self._logprob_bytes = 0 if not sets.has_logprobs else 4 if exponent is None else 2
        self._head = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._size_bytes,
            self._upper_bits,
            self._logprob_bytes,
            exponent or 0,
            len(sets),
            len(ids),
        )

    def __len__(self) -> int:
        """Bytes of the whole."""
        upper = _num_upper_bytes(len(self._sets.token_ids), self._upper_bits)
        per_candidate = 2 + self._logprob_bytes
        num_sizes, num_candidates = len(self._sets), len(self._sets.token_ids)
        return _HEADER.size + self._size_bytes * num_sizes + per_candidate * num_candidates + upper

    def __iter__(self) -> Iterator[bytes]:
        """The bytes, in order, in parts of at most 64 KiB."""
        yield self._head
        sizes, ids = self._sets.sizes, self._sets.token_ids
        for some in _slices(len(sizes)):
            yield sizes[some].astype(_SIZES[self._size_bytes]).tobytes()
        for some in _slices(len(ids)):
            yield ids[some].astype(_UINT16).tobytes()
        if self._upper_bits == 16:
            for some in _slices(len(ids)):
                yield (ids[some] >> 16).astype(_UINT16).tobytes()
        elif self._upper_bits:
            yield from _upper_bytes(ids, self._upper_bits)
        if self._logprob_bytes:
            logprobs = self._sets.logprobs
            for some in _slices(len(ids)):
                part = logprobs[some]
                coded = part.astype(FLOAT32, copy=False) if self._step is None else _codes(part, self._step)
                yield coded.tobytes()


def pack(sets: CandidateSets, *, logprob_bits: int = 32) -> bytes:
    """`Packed`, as one buffer."""
    return b"".join(Packed(sets, logprob_bits=logprob_bits))


def unpack(
    buffer: bytes | bytearray | memoryview, sampled_ids: ArrayLike, *, field: str = "candidates"
) -> CandidateSets:
    """The value that `pack` wrote, to the last bit unless its log-probs are rounded; its arrays are its own.

    Args:
        buffer: exactly what `pack` returned.
        sampled_ids: integers [T], the sampled tokens.
        field: the name that error messages give the payload.

    Raises:
        WireError: not such a value, another version, the wrong number of bytes, or invalid sets.
        SampledTokenMissingError: a set does not hold its sampled token.
    """
    size_bytes, upper_bits, logprob_bytes, exponent, num_positions, n = _header(buffer, field)
    at = _HEADER.size

    def part(dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        nonlocal at
        start, at = at, at + dtype.itemsize * count
        return np.frombuffer(buffer, dtype, count, start)

    sizes = part(_SIZES[size_bytes], num_positions)
    # Summed in 64 bits: there are fewer than 2^32 of less than 2^32, unless the buffer is of gigabytes.
    if (total := int(sizes.sum(dtype=np.uint64))) != n:
        raise WireError(field, f"got set sizes that sum to {total}, expected {n}, the number of candidates")
    token_ids = part(_UINT16, n).astype(np.int32)
    if upper_bits == 16:
        token_ids |= part(_UINT16, n).astype(np.int32) << 16
    elif upper_bits:
        _add_upper(token_ids, part(np.dtype("u1"), _num_upper_bytes(n, upper_bits)), upper_bits)
    offsets = offsets_of(sizes)
    logprobs: NDArray[np.float32] | None = None
    if logprob_bytes == 4:
        logprobs = part(FLOAT32, n).astype(np.float32)
    elif logprob_bytes:
        logprobs = _decoded(part(_UINT16, n), 2.0**exponent)
        _order_ties(token_ids, logprobs, offsets)
    names = ("token_ids", "logprobs", "offsets", "sampled_ids")
    with naming({name: f"{field}.{name}" for name in names}):
        return CandidateSets(token_ids, logprobs, offsets, sampled_ids)


def logprob_step(buffer: bytes | bytearray | memoryview, *, field: str = "candidates") -> float | None:
    """The step that the log-probs in a buffer of `pack` are rounded to; None where they are as they were.

    Raises:
        WireError: as for `unpack`, as far as the header and the number of bytes tell.
    """
    _, _, logprob_bytes, exponent, _, _ = _header(buffer, field)
    return 2.0**exponent if logprob_bytes == 2 else None


def _header(buffer: bytes | bytearray | memoryview, field: str) -> tuple[int, int, int, int, int, int]:
    """`(s, u, l, e, T, n)`, where the buffer has as many bytes as they say: nothing is allocated before."""
    size = memoryview(buffer).nbytes
    if size < _HEADER.size:
        raise WireError(field, f"got {size} bytes, expected at least the {_HEADER.size} of the header")
    magic, version, *numbers = _HEADER.unpack_from(buffer)
    if (magic, version) != (_MAGIC, _VERSION):
        raise WireError(field, f"got {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}")
    size_bytes, upper_bits, logprob_bytes, exponent, num_positions, n = numbers
    if size_bytes not in _SIZES or upper_bits not in _UPPER_BITS or logprob_bytes not in (0, 2, 4):
        raise WireError(
            field,
            f"got {size_bytes} bytes of a size, {upper_bits} upper bits of an id, {logprob_bytes} bytes of a"
            " log-prob, which this version does not have",
        )
    lowest, highest = (_LOWEST_EXPONENT, _HIGHEST_EXPONENT) if logprob_bytes == 2 else (0, 0)
    if not lowest <= exponent <= highest:
        raise WireError(field, f"got a step of 2^{exponent}, expected 2^{lowest} to 2^{highest}")
    per_candidate = 2 + logprob_bytes
    expected = _HEADER.size + size_bytes * num_positions + per_candidate * n + _num_upper_bytes(n, upper_bits)
    if size != expected:
        raise WireError(
            field, f"got {size} bytes, expected {expected} for {num_positions} positions, {n} candidates"
        )
    return size_bytes, upper_bits, logprob_bytes, exponent, num_positions, n


def _slices(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE))


# -- the upper bits of ids ---------------------------------------------------------------------------


def _num_upper_bytes(n: int, bits: int) -> int:
    return -(-n * bits // 8)


def _upper_bytes(ids: NDArray[np.int32], bits: int) -> Iterator[bytes]:
    """Whole stretches of candidates are laid over each other, so nothing is shuffled bit by bit."""
    num_bytes = _num_upper_bytes(len(ids), bits)
    for some in _slices(num_bytes):
        # In 32 bits to the end: narrowing each stretch takes longer than all of it.
        coded = ids[some] >> 16
        for i in range(1, 8 // bits):
            upper = ids[i * num_bytes : (i + 1) * num_bytes][some] >> 16
            upper <<= i * bits
            coded[: len(upper)] |= upper
        yield coded.astype(np.uint8).tobytes()


def _add_upper(ids: NDArray[np.int32], coded: NDArray[np.uint8], bits: int) -> None:
    num_bytes = len(coded)
    for i in range(8 // bits):
        stretch = ids[i * num_bytes : (i + 1) * num_bytes]
        upper = (coded[: len(stretch)] & _mask(bits, i)).astype(np.int32)
        stretch |= upper << (16 - i * bits)


def _mask(bits: int, i: int) -> np.uint8:
    """Where the i-th of those that share a byte has its bits."""
    return np.uint8(((1 << bits) - 1) << i * bits)


# -- rounded log-probs -------------------------------------------------------------------------------


def _exponent(logprobs: NDArray[np.float32]) -> int | None:
    """The exponent of the step; None where rounding would cost more than is promised."""
    lowest = float(logprobs.min(initial=0, where=logprobs > LOWEST))
    fraction, exponent = math.frexp(-lowest / (_NO_MASS - 1))
    exponent -= fraction == 0.5
    exponent = max(exponent, _LOWEST_EXPONENT) if lowest else _LOWEST_EXPONENT
    above = float(logprobs.max(initial=0)) > 2.0**exponent / 2
    return None if exponent > _HIGHEST_EXPONENT or above else exponent


def _codes(logprobs: NDArray[np.float32], step: float) -> NDArray[np.uint16]:
    # Exact but for the rounding itself: the step is a power of two.
    with np.errstate(over="ignore"):
        steps = np.rint(logprobs * np.float32(-1 / step))
    codes: NDArray[np.uint16] = np.minimum(steps, np.float32(_NO_MASS)).astype(_UINT16)
    return codes


def _decoded(codes: NDArray[np.uint16], step: float) -> NDArray[np.float32]:
    logprobs = 0 - codes.astype(np.float32) * np.float32(step)
    logprobs[codes == _NO_MASS] = -np.inf
    return logprobs


def _order_ties(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], offsets: Int64Array) -> None:
    """Candidates that became equally likely are in the order of what they were before: now by their ids."""
    is_tie = np.zeros(len(token_ids) + 1, np.bool_)  # with the one before, in the same row
    np.equal(logprobs[1:], logprobs[:-1], out=is_tie[1:-1])
    is_tie[offsets] = False
    tied = np.flatnonzero(is_tie[:-1] | is_tie[1:])
    if len(tied):
        runs = np.cumsum(~is_tie[tied], dtype=np.int32)
        token_ids[tied] = sorted_by_id(runs, token_ids[tied])
