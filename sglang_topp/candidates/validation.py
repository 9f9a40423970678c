"""Validate the arrays of candidate sets, and name the first position that breaks a rule.

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import csr_operations as csr
from sglang_topp.candidates.csr_operations import Int32Array, Int64Array
from sglang_topp.errors import InvalidCandidateSetsError

NO_TOKEN = -1
"""The `sampled_ids` value of a position without a sampled token. The position must have an empty set."""

MAX_LOGPROB = 2.0**-10
"""The largest valid log-prob. Rounding in a float32 softmax may make a log-prob slightly larger than 0.

Every floating dtype has this number, so that a comparison in any dtype gives the same result.
"""

MASS_ERROR = 2e-3
"""The largest valid difference between 1 and the vocabulary's total probability, for a float32 softmax.

The difference comes mostly from rounding in the sum that the softmax divides by. On a CPU, each of 8 SIMD
lanes adds V / 8 numbers, where V is the vocabulary size. The sum's relative error is at most V / 8 * 2^-24.
For V = 151,936, the bound is 1.1e-3, and the error at some positions is as large as the bound. For
V = 262,144, the bound is 2e-3.
"""

BFLOAT16_MASS_ERROR = 1 / 30
"""The largest valid difference between 1 and the vocabulary's total probability, for bfloat16 log-probs.

Rounding to bfloat16 changes log-probs between -16 and -8 by up to 1/32. Rounding may change log-probs below
-16 by more than 1/32. In a vocabulary of 262,144 tokens, however, tokens with such log-probs hold at most 3 %
of the total probability.
"""

LOWEST = np.finfo(np.float32).min
"""A log-prob at or below this value stands for probability 0. SGLang writes `LOWEST` instead of `-inf`."""


def check_arrays(
    ids: Int32Array, logprobs: NDArray[np.float32] | None, offsets: Int64Array, sampled: Int32Array
) -> None:
    """Raise InvalidCandidateSetsError unless the arrays follow every rule in `CandidateSets`.

    A rule may assume that those before it hold.
    """
    if logprobs is not None and len(ids) != len(logprobs):
        raise InvalidCandidateSetsError("logprobs", f"got {len(logprobs)} entries for {len(ids)} token_ids")
    if len(offsets) != len(sampled) + 1:
        expected = f"{len(sampled)} sampled_ids, expected one more"
        raise InvalidCandidateSetsError("offsets", f"got {len(offsets)} entries for {expected}")
    if offsets[0] != 0 or offsets[-1] != len(ids):
        expected = f"expected from 0 to {len(ids)}, the number of token_ids"
        raise InvalidCandidateSetsError("offsets", f"run from {offsets[0]} to {offsets[-1]}, {expected}")
    # Do not compute the differences of offsets here, because an int64 difference can wrap around.
    if (t := csr.first_true(offsets[1:] < offsets[:-1])) is not None:
        raise InvalidCandidateSetsError("offsets", f"decrease after position {t}")
    for block in csr.blocks_of(offsets):
        span = slice(offsets[block.start], offsets[block.stop])
        inside = offsets[block.start : block.stop + 1] - span.start
        known = None if logprobs is None else logprobs[span]
        _check_block(ids[span], known, inside, sampled[block], block.start)


def _check_block(
    ids: Int32Array,
    logprobs: NDArray[np.float32] | None,
    offsets: Int64Array,
    sampled: Int32Array,
    first: int,
) -> None:
    """Check the candidates of consecutive positions, of which `first` is the first."""
    rows, sizes = csr.rows_of(offsets), np.diff(offsets)
    if (e := csr.first_true(ids < 0)) is not None:
        problem = f"got {ids[e]} at position {first + rows[e]}, expected 0 or more"
        raise InvalidCandidateSetsError("token_ids", problem)
    ordered = ids[1:] > ids[:-1]
    if logprobs is not None:
        if (e := csr.first_true(~(logprobs <= MAX_LOGPROB))) is not None:
            where = f"at position {first + rows[e]}"
            raise InvalidCandidateSetsError(
                "logprobs", f"got {logprobs[e]} {where}, expected at most 0 and no NaN"
            )
        ordered &= logprobs[1:] == logprobs[:-1]
        ordered |= logprobs[1:] < logprobs[:-1]
    starts = offsets[(offsets > 0) & (offsets < offsets[-1])]
    ordered[starts - 1] = True  # these two candidates are of two positions
    if (e := csr.first_true(~ordered)) is not None:
        pair, expected = "", "without log-probs, expected ids lowest first"
        if logprobs is not None:
            pair = f" (log-probs {logprobs[e]}, {logprobs[e + 1]})"
            expected = "expected log-probs highest first, then ids lowest first"
        got = f"{ids[e]} then {ids[e + 1]}{pair} at position {first + rows[e]}"
        raise InvalidCandidateSetsError("token_ids", f"{got}; {expected}, without duplicates")
    if logprobs is not None:
        keys = np.sort(csr.row_keys(rows, ids))
        if (e := csr.first_true(keys[1:] == keys[:-1])) is not None:
            problem = f"{keys[e] & 0xFFFFFFFF} occurs twice at position {first + (keys[e] >> 32)}"
            raise InvalidCandidateSetsError("token_ids", problem)
    # The ids of a set are distinct, so a set contains its sampled token at most once.
    is_sampled = ids == sampled.take(rows)
    if np.count_nonzero(is_sampled) != np.count_nonzero(sizes):
        lacking = sizes > 0
        lacking[rows[is_sampled]] = False
        at = int(lacking.argmax())
        where = f"the {sizes[at]} candidates at position {first + at}"
        raise InvalidCandidateSetsError("sampled_ids", f"{sampled[at]} is not among {where}")
    if (t := csr.first_true((sampled < NO_TOKEN) & (sizes == 0))) is not None:
        problem = f"got {sampled[t]} at position {first + t}, expected a token id"
        raise InvalidCandidateSetsError("sampled_ids", problem)
    if logprobs is None or not len(logprobs) or logprobs.min() > LOWEST:
        return
    if (e := csr.first_true((logprobs <= LOWEST) & ~is_sampled)) is not None:
        got = f"got {logprobs[e]} at position {first + rows[e]} for a token that was not sampled"
        raise InvalidCandidateSetsError("logprobs", f"{got}; it has no place in the set")
    if (t := without_mass(logprobs, offsets)) is not None:
        problem = f"nothing but a token of zero probability at position {first + t}"
        raise InvalidCandidateSetsError("logprobs", problem)


def without_mass(logprobs: NDArray[np.float32], offsets: Int64Array) -> int | None:
    """Return the first position whose set is not empty and has a kept mass of 0, or None."""
    filled = np.flatnonzero(np.diff(offsets))
    # Log-probs descend in a set, so the set's mass is 0 if the first log-prob stands for probability 0.
    t = csr.first_true(logprobs[offsets[filled]] <= LOWEST)
    return None if t is None else int(filled[t])


def as_array(name: str, values: ArrayLike, dtype: type[np.int32 | np.int64 | np.float32]) -> NDArray[Any]:
    """Return `values` as a 1-D array of `dtype`, without a copy if possible.

    Raise InvalidCandidateSetsError if a value does not fit `dtype`. Infinite values fit float32.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        # `values` holds lists of different lengths, or is a tensor that NumPy cannot read.
        raise InvalidCandidateSetsError(name, f"cannot be read as one number per entry: {error}") from None
    if array.ndim != 1:
        raise InvalidCandidateSetsError(name, f"got {array.ndim} dimensions, expected 1")
    kinds, expected = ("f", "floats") if dtype is np.float32 else ("iu", "integers")
    if len(array) and array.dtype.kind not in kinds:
        raise InvalidCandidateSetsError(name, f"got dtype {array.dtype}, expected {expected}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype, copy=False)
    if converted is not array:
        is_wrong = np.isinf(converted) & np.isfinite(array) if kinds == "f" else converted != array
        if (e := csr.first_true(is_wrong)) is not None:
            problem = f"got {array[e]}, expected values that {converted.dtype} can hold"
            raise InvalidCandidateSetsError(name, problem)
    return converted
