"""`CandidateSets`: the candidate tokens of every generated position, with their log-probs.

Shape legend: T positions, n candidates in all, K candidates of one position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import csr_operations as csr
from sglang_topp.candidates.csr_operations import Int32Array, Int64Array
from sglang_topp.candidates.validation import (
    BFLOAT16_MASS_ERROR,
    MASS_ERROR,
    NO_TOKEN,
    as_array,
    check_arrays,
    without_mass,
)
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError

if TYPE_CHECKING:
    import torch

    from sglang_topp.candidates.torch_tensors import CandidateTensors

Float32Array: TypeAlias = NDArray[np.float32]

# Two float64 sums of the same numbers may differ if the sums add the numbers in different orders. This value
# is a generous bound on the relative difference.
_SUM_ERROR = 1e-6


@dataclass(frozen=True, eq=False, repr=False, init=False)
class CandidateSets:
    """The candidate sets of generated positions, stored as CSR arrays.

    The candidates of position `t` are at `offsets[t]:offsets[t + 1]` in `token_ids` and `logprobs`. The
    candidates of a position are ordered by log-prob, highest first. Candidates with equal log-probs are
    ordered by token id, lowest first. The ids in a set are distinct. A set that is not empty contains the
    sampled token `sampled_ids[t]`. An empty set marks a position that the policy did not sample, such as a
    tool's token. Scoring functions ignore a position with an empty set, and the position's loss mask is 0.

    A sampling mask is an engine's list of the tokens that its sampler could draw at a position. Sets that
    were decoded from sampling masks may have no log-probs. For sets without log-probs, `has_logprobs` is
    False, and the candidates of a position are ordered by token id. `logprobs`, and every other property or
    method that needs log-probs, then raises InvalidInputError.

    Args:
        token_ids: int32 [n], the candidates' ids, position after position.
        logprobs: float32 [n], natural log-probs under the full vocabulary, or None if they are unknown. If
            there are no candidates, `CandidateSets` replaces None with an empty array, so `has_logprobs` is
            True. The log-prob `-inf` (or float32's lowest value, which SGLang writes instead) is allowed only
            for a sampled token.
        offsets: int64 [T + 1], `offsets[0] == 0`, never decreasing, `offsets[T] == n`.
        sampled_ids: int32 [T], the sampled token of each position. `NO_TOKEN` is allowed if the position's
            set is empty.

    If an array already has the dtype that its argument requires, `CandidateSets` does not copy the array, but
    keeps a read-only view. The caller must not modify such an array.

    Raises:
        InvalidCandidateSetsError: the arrays break a rule of this docstring. The message names the array and
            the first invalid position.

    Example:
        Two positions: token 3 was drawn from {5, 3}, and token 7 was the only candidate.

        >>> sets = CandidateSets([5, 3, 7], np.log([0.5, 0.3, 0.9]).astype(np.float32), [0, 2, 3], [3, 7])
        >>> sets
        CandidateSets(positions=2, candidates=3, mean_size=1.5)
        >>> token_ids, logprobs = sets[0]
        >>> token_ids, np.exp(logprobs).round(2)
        (array([5, 3], dtype=int32), array([0.5, 0.3], dtype=float32))
        >>> np.exp(sets.log_kept_mass).round(2)  # the kept mass
        array([0.8, 0.9], dtype=float32)
    """

    token_ids: Int32Array
    _logprobs: Float32Array | None
    offsets: Int64Array
    sampled_ids: Int32Array

    def __init__(
        self, token_ids: ArrayLike, logprobs: ArrayLike | None, offsets: ArrayLike, sampled_ids: ArrayLike
    ) -> None:
        arrays = (
            as_array("token_ids", token_ids, np.int32),
            None if logprobs is None else as_array("logprobs", logprobs, np.float32),
            as_array("offsets", offsets, np.int64),
            as_array("sampled_ids", sampled_ids, np.int32),
        )
        check_arrays(*arrays)
        self._assign(*arrays)

    def _assign(self, token_ids: Any, logprobs: Any, offsets: Any, sampled_ids: Any) -> None:
        if logprobs is None and not len(token_ids):
            logprobs = np.empty(0, np.float32)  # without candidates, `has_logprobs` is True
        names = "token_ids", "_logprobs", "offsets", "sampled_ids"
        for name, array in zip(names, (token_ids, logprobs, offsets, sampled_ids), strict=True):
            object.__setattr__(self, name, None if array is None else _read_only(array.view()))

    @classmethod
    def unchecked(cls, token_ids: Any, logprobs: Any, offsets: Any, sampled_ids: Any) -> CandidateSets:
        """Build candidate sets from arrays that are known to be valid, such as slices of other sets."""
        self = object.__new__(cls)
        self._assign(token_ids, logprobs, offsets, sampled_ids)
        return self

    # -- reading -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of positions T."""
        return len(self.sampled_ids)

    @property
    def has_logprobs(self) -> bool:
        """Whether the candidates' log-probs are known. If there are no candidates, `has_logprobs` is True."""
        return self._logprobs is not None

    @property
    def logprobs(self) -> Float32Array:
        """float32 [n]: natural log-probs under the full vocabulary.

        Raises:
            InvalidInputError: the sets have no log-probs (`has_logprobs` is False). For such sets,
                `log_kept_mass` and `sampled_logprobs` raise InvalidInputError too.
        """
        if self._logprobs is None:
            raise InvalidInputError(
                "logprobs: these candidate sets have none, because their sampling mask came without; request"
                " top_logprobs_p, or return_logprob with sampling_logprobs_mode 'support'"
            )
        return self._logprobs

    @overload
    def __getitem__(self, index: int) -> tuple[Int32Array, Float32Array | None]: ...
    @overload
    def __getitem__(self, index: slice) -> CandidateSets: ...
    def __getitem__(self, index: int | slice) -> tuple[Int32Array, Float32Array | None] | CandidateSets:
        """Return `(token_ids int32 [K], logprobs float32 [K])` for an index, or CandidateSets for a slice.

        `logprobs` in the returned pair is None if the log-probs are unknown.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidInputError(f"slice step: got {step}, expected 1 (positions are contiguous)")
            stop = max(start, stop)
            low, high = self.offsets[start], self.offsets[stop]
            return CandidateSets.unchecked(
                self.token_ids[low:high],
                None if self._logprobs is None else self._logprobs[low:high],
                self.offsets[start : stop + 1] - low,
                self.sampled_ids[start:stop],
            )
        t = range(len(self))[index]
        span = slice(self.offsets[t], self.offsets[t + 1])
        return self.token_ids[span], None if self._logprobs is None else self._logprobs[span]

    def __iter__(self) -> Iterator[tuple[Int32Array, Float32Array | None]]:
        """Yield the pairs `sets[0]`, `sets[1]`, …"""
        return (self[t] for t in range(len(self)))

    @cached_property
    def sizes(self) -> Int64Array:
        """int64 [T]: the number of candidates at each position, 0 for an empty set."""
        return _read_only(np.diff(self.offsets))

    @cached_property
    def log_kept_mass(self) -> Float32Array:
        """float32 [T]: the natural log of each set's total probability (its kept mass), summed in float64.

        For an empty set, `log_kept_mass` is 0, as if the whole vocabulary were kept. For a set with one
        candidate, `log_kept_mass` is exactly that candidate's log-prob.
        """
        return _read_only(self._log_mass.astype(np.float32))

    @cached_property
    def _log_mass(self) -> NDArray[np.float64]:
        """float64 [T]: `log_kept_mass` before it is rounded to float32."""
        return csr.log_sum_exp(self.logprobs, self.offsets)

    @cached_property
    def masked_logprobs(self) -> Float32Array:
        """float32 [T]: the sampled token's log-prob within its set, `sampled_logprobs - log_kept_mass`.

        If the trainer scores over the same sets, use `masked_logprobs` as the old log-probs of the importance
        ratio. At a position with one candidate or none, `masked_logprobs` is exactly 0.
        """
        masked = self.sampled_logprobs - self.log_kept_mass
        return _read_only(np.where(self.sizes > 1, masked, np.float32(0)))

    @cached_property
    def sampled_logprobs(self) -> Float32Array:
        """float32 [T]: the sampled token's log-prob under the full vocabulary, 0 for an empty set."""
        logprobs = self.logprobs
        out = np.zeros(len(self), np.float32)
        for block in csr.blocks_of(self.offsets):
            offsets = self.offsets[block.start : block.stop + 1]
            span = slice(offsets[0], offsets[-1])
            sampled = self.sampled_ids[block].take(csr.rows_of(offsets - offsets[0]))
            out[block][self.sizes[block] > 0] = logprobs[span][self.token_ids[span] == sampled]
        return _read_only(out)

    @cached_property
    def entropy(self) -> NDArray[np.float64]:
        """float64 [T]: the entropy of each set's distribution in nats, 0 for an empty set.

        The entropy is `-Σ r log r` with `r = q / kept mass`, where `q` is a candidate's probability under the
        full vocabulary.
        """
        # A sampled token may have log-prob -inf, and `0 * -inf` is NaN.
        logprobs = np.maximum(self.logprobs.astype(np.float64), -1e4)
        out, filled = np.zeros(len(self)), self.sizes > 0
        if filled.any():
            # -Σ r log r = log mass - Σ q log q / mass
            sums = np.add.reduceat(np.exp(logprobs) * logprobs, self.offsets[:-1][filled])
            log_mass = self._log_mass[filled]
            out[filled] = np.maximum(log_mass - sums / np.exp(log_mass), 0)
        return _read_only(out)

    def check_kept_mass(self, p: float) -> None:
        """Check that the total probability (the mass) of every set is possible under top-p sampling at `p`.

        Top-p sampling takes tokens, most likely first, until the mass of the taken tokens reaches `p`, or
        until all tokens are taken. Because of the engine's rounding errors, the mass of all tokens may
        differ from 1 by up to `error`. `error` is 2e-3 if the engine computes in float32. `error` is 1/30 if
        the engine computes in bfloat16 (with SGLang's option `--rl-on-policy-target`). The check assumes
        bfloat16 if bfloat16 can represent all log-probs of a set. The check rejects a set whose mass is below
        `min(p, 1 - error)` or above `1 + error`.

        The engine and this check sum the same probabilities in float64, but in different orders, so the two
        sums may differ slightly. The check therefore multiplies the lower bound by 1 - 1e-6.

        Args:
            p: the requested threshold, above 0 and at most 1.

        Raises:
            InvalidCandidateSetsError: a set's mass is below `p` or above 1, and rounding does not explain
                the difference. The message names the first position with such a set.
        """
        mass, errors = np.exp(self._log_mass), np.array([MASS_ERROR, BFLOAT16_MASS_ERROR])
        lowest, highest = np.minimum(p, 1 - errors) * (1 - _SUM_ERROR), 1 + errors
        for t in np.flatnonzero((mass < lowest[0]) | (mass > highest[0])).tolist():
            logprobs = self.logprobs[self.offsets[t] : self.offsets[t + 1]]
            is_bfloat16 = not (logprobs.view(np.uint32) & 0xFFFF).any()
            if not is_bfloat16 or not lowest[1] <= mass[t] <= highest[1]:
                expected = "at most 1" if mass[t] > 1 else f"at least {p:.9g}, the p that was asked for"
                raise InvalidCandidateSetsError(
                    "logprobs", f"add up to a mass of {mass[t]:.9g} at position {t}, expected {expected}"
                )

    # -- building and converting -------------------------------------------------------------------

    @classmethod
    def empty(cls, num_positions: int) -> CandidateSets:
        """Return `num_positions` empty sets, with `NO_TOKEN` as the sampled id of each position."""
        if num_positions < 0:
            raise InvalidInputError(f"num_positions: got {num_positions}, expected 0 or more")
        return cls.unchecked(
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.zeros(num_positions + 1, np.int64),
            np.full(num_positions, NO_TOKEN, np.int32),
        )

    @classmethod
    def concat(cls, parts: Sequence[CandidateSets], name: str = "parts") -> CandidateSets:
        """Return one `CandidateSets` with the positions of all `parts`, in order.

        Args:
            parts: any number of sets.
            name: what error messages call `parts`.

        Raises:
            InvalidInputError: some parts have log-probs, and others have none. Parts without candidates never
                cause this error. To concatenate parts with and without log-probs, first call
                `without_logprobs` on the parts with log-probs.
        """
        if len(parts) <= 1:
            return parts[0] if parts else cls.empty(0)
        lacking = [i for i, part in enumerate(parts) if not part.has_logprobs]
        known = [i for i, part in enumerate(parts) if part.has_logprobs and len(part.token_ids)]
        if lacking and known:
            raise InvalidInputError(
                f"{name}[{lacking[0]}]: has no log-probs, and {name}[{known[0]}] has; expected all to have"
                " them, or none (`without_logprobs()`)"
            )
        starts = csr.offsets_of([len(part.token_ids) for part in parts]).tolist()
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        return cls.unchecked(
            np.concatenate([part.token_ids for part in parts]),
            None if lacking else np.concatenate([part.logprobs for part in parts]),
            np.concatenate([np.zeros(1, np.int64), *offsets]),
            np.concatenate([part.sampled_ids for part in parts]),
        )

    def place(self, mask: NDArray[np.bool_]) -> CandidateSets:
        """Return one set per element of `mask`: these T sets, in order, where it is true, or else empty sets.

        The sets of a padded or packed batch thus line up with its other fields. Candidates are not copied.

        Args:
            mask: booleans of any shape, true at T elements. The sets follow its elements in row-major order.

        Raises:
            InvalidInputError: `mask` does not hold booleans, or is not true at exactly T elements.
        """
        if mask.dtype != np.bool_ or (num_true := np.count_nonzero(mask)) != len(self):
            got = mask.dtype if mask.dtype != np.bool_ else f"{num_true} true elements"
            raise InvalidInputError(f"mask: got {got}, expected booleans with {len(self)} true elements")
        flat, sampled = mask.reshape(-1), np.full(mask.size, NO_TOKEN, np.int32)
        sampled[flat] = self.sampled_ids
        offsets = self.offsets[csr.offsets_of(flat)]
        return CandidateSets.unchecked(self.token_ids, self._logprobs, offsets, sampled)

    def without_logprobs(self) -> CandidateSets:
        """Return the same candidates without log-probs, ordered by token id at each position."""
        token_ids = csr.sorted_by_id(csr.rows_of(self.offsets), self.token_ids)
        return CandidateSets.unchecked(token_ids, None, self.offsets, self.sampled_ids)

    def take(self, positions: ArrayLike) -> CandidateSets:
        """Return the sets at `positions`, in the order of `positions`. A position may occur more than once.

        Args:
            positions: a list or 1-D array of integers from 0 to T - 1.

        Raises:
            InvalidInputError: a position is not an integer, or is out of range.
        """
        index = csr.indices("positions", positions, len(self))
        sizes = self.sizes[index]
        offsets = csr.offsets_of(sizes)
        entries = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], sizes)
        return self._of_entries(entries, offsets, self.sampled_ids[index])

    def intersect(self, other: CandidateSets) -> CandidateSets:
        """Return the candidates that `self` and `other` share, with the log-probs of `self`, if any.

        `self` and `other` must have the same sampled tokens, so the result contains all sampled tokens. The
        result's `log_kept_mass` is the log of the total probability of the shared candidates.

        Raises:
            InvalidInputError: `self` and `other` differ in length, in sampled tokens, or in the positions of
                empty sets. The error is also raised if a position's only shared candidate is a sampled token
                of zero probability.
        """
        if len(self) != len(other):
            raise InvalidInputError(f"other: got {len(other)} positions, expected {len(self)}")
        for what, mine, theirs in (
            ("sampled_ids", self.sampled_ids, other.sampled_ids),
            ("empty spans", self.sizes == 0, other.sizes == 0),
        ):
            if (t := csr.first_true(mine != theirs)) is not None:
                raise InvalidInputError(f"other: {what} differ at position {t}: {theirs[t]} and {mine[t]}")
        rows = csr.rows_of(self.offsets)
        keys = csr.row_keys(rows, self.token_ids)
        kept = np.isin(keys, csr.row_keys(csr.rows_of(other.offsets), other.token_ids), assume_unique=True)
        sizes = np.bincount(rows[kept], minlength=len(self))
        both = self._of_entries(kept, csr.offsets_of(sizes), self.sampled_ids)
        if both._logprobs is not None and (t := without_mass(both._logprobs, both.offsets)) is not None:
            raise InvalidInputError(
                f"other: shares nothing but a sampled token of zero probability at position {t}"
            )
        return both

    def _of_entries(self, entries: NDArray[Any], offsets: Int64Array, sampled: Int32Array) -> CandidateSets:
        logprobs = None if self._logprobs is None else self._logprobs[entries]
        return CandidateSets.unchecked(self.token_ids[entries], logprobs, offsets, sampled)

    def to_lists(self) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return `(token_ids, logprobs)` as nested lists, one inner list per position.

        `logprobs` is None if the log-probs are unknown.
        """
        ids, bounds = self.token_ids.tolist(), self.offsets.tolist()
        spans = [slice(low, high) for low, high in pairwise(bounds)]
        known = None if self._logprobs is None else self._logprobs.tolist()
        return [ids[span] for span in spans], None if known is None else [known[span] for span in spans]

    def to_torch(self, device: torch.device | str | int | None = None) -> CandidateTensors:
        """Copy `token_ids`, `logprobs`, `offsets`, and `sampled_ids` to tensors. This method needs torch.

        If `device` is a GPU, one asynchronous transfer from pinned memory copies all arrays. Kernels on the
        current stream can use the tensors immediately. The tensors have the same dtypes as the arrays.
        `logprobs` is None if the log-probs are unknown. To score over the same sets several times, pass the
        returned tensors to `sglang_topp.replay` instead of the CandidateSets.

        Args:
            device: the tensors' device, or None for torch's default device.
        """
        from sglang_topp.candidates.torch_tensors import to_torch

        return to_torch(*self._arrays(), device=device)

    # -- comparing, printing, and pickling ---------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Return whether each of the four arrays equals that of `other`. Missing log-probs equal no array."""
        if not isinstance(other, CandidateSets):
            return NotImplemented
        pairs: Iterator[tuple[Any, Any]] = zip(self._arrays(), other._arrays(), strict=True)
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]  # hashing would have to read all of the large arrays

    def __repr__(self) -> str:
        mean = len(self.token_ids) / len(self) if len(self) else 0.0
        unknown = "" if self.has_logprobs else ", no log-probs"
        return (
            f"CandidateSets(positions={len(self)}, candidates={len(self.token_ids)},"
            f" mean_size={mean:.1f}{unknown})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle plain arrays, so that pickle protocol 5 (Ray, multiprocessing) transfers them out of band.
        return CandidateSets.unchecked, self._arrays()

    def _arrays(self) -> tuple[Int32Array, Float32Array | None, Int64Array, Int32Array]:
        return self.token_ids, self._logprobs, self.offsets, self.sampled_ids


_Array = TypeVar("_Array", bound=NDArray[Any])


def _read_only(array: _Array) -> _Array:
    array.flags.writeable = False
    return array
