"""CandidateSets: which tokens could have been drawn at each generated position, and how likely each was.

Shape legend: T positions, n candidates in all, K candidates of one position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp._checks import NO_TOKEN, as_float32, as_integers, check_sets, without_mass
from sglang_topp._csr import (
    Int32Array,
    Int64Array,
    blocks_of,
    first_true,
    log_sum_exp,
    offsets_of,
    row_keys,
    rows_of,
    sorted_by_id,
)
from sglang_topp.answers import sampling_mask, top_k, top_p
from sglang_topp.answers.fields import Decoded, naming
from sglang_topp.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

    from sglang_topp.tensors import CandidateTensors

__all__ = ["NO_TOKEN", "CandidateSets"]

Float32Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False, init=False)
class CandidateSets:
    """The candidate set of every generated position of one sequence, as one CSR value.

    Position `t` owns the span `offsets[t]:offsets[t + 1]` of `token_ids` and `logprobs`. A span is
    ordered by log-prob, highest first, then by token id; its ids are distinct and hold
    `sampled_ids[t]`. An empty span marks a position that the policy did not sample (a tool's or the
    environment's token): there is no replay there, and the loss mask is 0 there.

    A value that was decoded from a mask may have no log-probs: `has_logprobs` is False, `logprobs` and
    what is computed from them are errors, and spans are ordered by token id. All else works.

    Args:
        token_ids: int32 [n], the candidates' ids, position after position.
        logprobs: float32 [n], natural log-probs under the full vocabulary; `-inf` (or float32's
            lowest value, which SGLang writes for it) only for a sampled token of zero probability.
            None where they are not known; that is of no meaning where n is 0.
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
    _logprobs: Float32Array | None
    offsets: Int64Array
    sampled_ids: Int32Array

    def __init__(
        self, token_ids: ArrayLike, logprobs: ArrayLike | None, offsets: ArrayLike, sampled_ids: ArrayLike
    ) -> None:
        self._assign(
            as_integers("token_ids", token_ids, np.int32),
            None if logprobs is None else as_float32("logprobs", logprobs),
            as_integers("offsets", offsets, np.int64),
            as_integers("sampled_ids", sampled_ids, np.int32),
        )
        check_sets(*self._arrays())

    def _assign(self, token_ids: Any, logprobs: Any, offsets: Any, sampled_ids: Any) -> None:
        if logprobs is None and not len(token_ids):
            logprobs = np.empty(0, np.float32)  # nothing is unknown
        for name, array in (
            ("token_ids", token_ids),
            ("_logprobs", logprobs),
            ("offsets", offsets),
            ("sampled_ids", sampled_ids),
        ):
            object.__setattr__(self, name, None if array is None else _read_only(array.view()))

    @classmethod
    def _trusted(cls, token_ids: Any, logprobs: Any, offsets: Any, sampled_ids: Any) -> CandidateSets:
        """Build from arrays that are valid by construction (parts of a checked value)."""
        self = object.__new__(cls)
        self._assign(token_ids, logprobs, offsets, sampled_ids)
        return self

    @classmethod
    def _from_answer(cls, decoded: Decoded) -> CandidateSets:
        """Build from what an answer holds; its fields are named where they are at fault."""
        with naming(decoded.fields):
            return cls(decoded.token_ids, decoded.logprobs, decoded.offsets, decoded.sampled_ids)

    # -- reading -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of positions T."""
        return len(self.sampled_ids)

    @property
    def has_logprobs(self) -> bool:
        """Whether the candidates' log-probs are known; always, where there is no candidate."""
        return self._logprobs is not None

    @property
    def logprobs(self) -> Float32Array:
        """float32 [n]: natural log-probs under the full vocabulary.

        Raises:
            InvalidInputError: there are none (`has_logprobs` is False). The same holds for
                `logprob_sum` and `sampled_logprobs`.
        """
        if self._logprobs is None:
            raise InvalidInputError(
                "logprobs: these candidate sets have none, a sampling mask came without; a request for"
                " top_logprobs_p gives them, or one with return_logprob and sampling_logprobs_mode 'support'"
            )
        return self._logprobs

    @overload
    def __getitem__(self, index: int) -> tuple[Int32Array, Float32Array | None]: ...
    @overload
    def __getitem__(self, index: slice) -> CandidateSets: ...
    def __getitem__(self, index: int | slice) -> tuple[Int32Array, Float32Array | None] | CandidateSets:
        """`sets[t]` is `(token_ids int32 [K], logprobs float32 [K])`; `sets[a:b]` is a CandidateSets.

        Where the log-probs are not known, the pair holds None in their place.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidInputError(f"slice step: got {step}, expected 1 (positions are contiguous)")
            stop = max(start, stop)
            low, high = self.offsets[start], self.offsets[stop]
            return CandidateSets._trusted(
                self.token_ids[low:high],
                None if self._logprobs is None else self._logprobs[low:high],
                self.offsets[start : stop + 1] - low,
                self.sampled_ids[start:stop],
            )
        t = range(len(self))[index]
        span = slice(self.offsets[t], self.offsets[t + 1])
        return self.token_ids[span], None if self._logprobs is None else self._logprobs[span]

    def __iter__(self) -> Iterator[tuple[Int32Array, Float32Array | None]]:
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
        return _read_only(log_sum_exp(self.logprobs, self.offsets).astype(np.float32))

    @cached_property
    def sampled_logprobs(self) -> Float32Array:
        """float32 [T]: the sampled token's log-prob under the full vocabulary; 0 where the span is empty.

        `sampled_logprobs - logprob_sum` is the rollout's log-prob under the replayed distribution.
        """
        logprobs = self.logprobs
        out = np.zeros(len(self), np.float32)
        for block in blocks_of(self.offsets):
            offsets = self.offsets[block.start : block.stop + 1]
            span = slice(offsets[0], offsets[-1])
            sampled = self.sampled_ids[block].take(rows_of(offsets - offsets[0]))
            out[block][self.sizes[block] > 0] = logprobs[span][self.token_ids[span] == sampled]
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
        """The positions of all `parts`, one after the other.

        Raises:
            InvalidInputError: some of them have log-probs and others none (`without_logprobs` makes them
                alike); parts without a candidate go with either.
        """
        if not parts:
            return cls.empty(0)
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([part.sizes for part in parts])
        return cls._trusted(
            np.concatenate([part.token_ids for part in parts]),
            cls._concat_logprobs("parts", parts),
            offsets_of(sizes),
            np.concatenate([part.sampled_ids for part in parts]),
        )

    @staticmethod
    def _concat_logprobs(name: str, parts: Sequence[CandidateSets]) -> Float32Array | None:
        known = [part._logprobs for part in parts if part._logprobs is not None]
        if len(known) == len(parts):
            return np.concatenate(known)
        lacking = next(i for i, part in enumerate(parts) if part._logprobs is None)
        if any(len(logprobs) for logprobs in known):
            other = next(i for i, part in enumerate(parts) if part.has_logprobs and len(part.token_ids))
            raise InvalidInputError(
                f"{name}[{lacking}]: has no log-probs, and {name}[{other}] has; expected all to have them,"
                " or none (`without_logprobs()`)"
            )
        return None

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
        return cls._from_answer(top_p.decode_output(meta_info, output_ids, vocab_size))

    @classmethod
    def from_top_k(
        cls, meta_info: Mapping[str, Any], output_ids: ArrayLike, k: int, *, vocab_size: int | None = None
    ) -> CandidateSets:
        """Fixed-k sets from a request with `top_logprobs_num` of `k` or more, of any SGLang, patched or not.

        ::

            C_t = { i : fewer than k tokens j have q[j] > q[i] }  ∪  { the sampled token }

        So ties at the k-th place are all kept, as far as the answer lists them: with `top_logprobs_num`
        equal to `k`, SGLang has cut them already; ask for a few more to have them. Tokens of zero
        probability are left out. The sampled token's log-prob is that of `output_token_logprobs`.

        Args:
            meta_info: the response's `meta_info`: SGLang's lists (`output_top_logprobs`), its flat arrays
                (`return_flat_raw_output_top_logprobs`), as JSON or base64, or those of the patch set
                (`return_logprobs_in_base64`).
            output_ids: integers [T], the response's `output_ids`.
            k: 1 or more.
            vocab_size: when given, ids at or above it are errors.

        Raises:
            InvalidInputError: `k` is not an integer of 1 or more.
            MissingCandidateSetsError: the response holds no such log-probs, or none for some position.
            WireError: anything else is malformed, or fewer than `k` are listed; the message names the field.
        """
        return cls._from_answer(top_k.decode_output(meta_info, output_ids, k, vocab_size))

    @classmethod
    def from_sampling_mask(
        cls, meta_info: Mapping[str, Any], output_ids: ArrayLike, *, vocab_size: int | None = None
    ) -> CandidateSets:
        """The tokens that the engine's own sampler could have drawn, from a native sampling mask.

        SGLang's mask (`return_sampling_mask`) comes with log-probs `r` of the sampling distribution, which
        are renormalised over the mask. In mode `"support"`, and with `return_logprob`, the log-probs
        under the full vocabulary follow from the sampled token's, `s`, which is reported in both::

            logprob[i] = r[i] + (logprob[s] - r[s])         logprob_sum = logprob[s] - r[s]

        In any other case (mode `"selected"`, no `return_logprob`, vLLM) they are not known, and the
        value has none. What importance ratios divide by, one number per token, is then
        `output_token_sampling_logprobs` itself, in mode `"selected"`.

        Args:
            meta_info: SGLang's `meta_info`, or one of vLLM's `choices`.
            output_ids: integers [T], the generated tokens.
            vocab_size: when given, ids at or above it are errors.

        Raises:
            MissingCandidateSetsError: there is no mask, or none for some position.
            SampledTokenMissingError: a mask lacks its sampled token.
            WireError: anything else is malformed; the message names the field. Also where the two
                log-probs of a token cannot be of one distribution, as happens with
                `SGLANG_RETURN_ORIGINAL_LOGPROB=1` at a temperature other than 1.
        """
        return cls._from_answer(sampling_mask.decode(meta_info, output_ids, vocab_size))

    def without_logprobs(self) -> CandidateSets:
        """The same candidates in the order of their ids, without log-probs."""
        token_ids = sorted_by_id(rows_of(self.offsets), self.token_ids)
        return CandidateSets._trusted(token_ids, None, self.offsets, self.sampled_ids)

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
        if (r := first_true((index < 0) | (index >= len(self)))) is not None:
            raise InvalidInputError(f"positions: got {index[r]}, expected 0 or more, below {len(self)}")
        index = index.astype(np.int64)
        sizes = self.sizes[index]
        offsets = offsets_of(sizes)
        entries = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], sizes)
        return self._of_entries(entries, offsets, self.sampled_ids[index])

    def intersect(self, other: CandidateSets) -> CandidateSets:
        """The candidates that are in both, with this value's log-probs, if it has them.

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
            if (t := first_true(mine != theirs)) is not None:
                raise InvalidInputError(f"other: {what} differ at position {t}: {theirs[t]} and {mine[t]}")
        rows = rows_of(self.offsets)
        keys = row_keys(rows, self.token_ids)
        kept = np.isin(keys, row_keys(rows_of(other.offsets), other.token_ids), assume_unique=True)
        sizes = np.bincount(rows[kept], minlength=len(self))
        both = self._of_entries(kept, offsets_of(sizes), self.sampled_ids)
        if both._logprobs is not None and (t := without_mass(both._logprobs, both.offsets)) is not None:
            raise InvalidInputError(
                f"other: shares nothing but a sampled token of zero probability at position {t}"
            )
        return both

    def _of_entries(self, entries: NDArray[Any], offsets: Int64Array, sampled: Int32Array) -> CandidateSets:
        logprobs = None if self._logprobs is None else self._logprobs[entries]
        return CandidateSets._trusted(self.token_ids[entries], logprobs, offsets, sampled)

    def to_lists(self) -> tuple[list[list[int]], list[list[float]] | None]:
        """`(token_ids, logprobs)` as plain nested lists, one inner list per position.

        None in place of the log-probs where they are not known.
        """
        ids, bounds = self.token_ids.tolist(), self.offsets.tolist()
        spans = [slice(low, high) for low, high in pairwise(bounds)]
        known = None if self._logprobs is None else self._logprobs.tolist()
        return [ids[span] for span in spans], None if known is None else [known[span] for span in spans]

    def to_torch(self, device: torch.device | str | int | None = None) -> CandidateTensors:
        """The same arrays as tensors, in one copy: `token_ids`, `logprobs`, `offsets`, `sampled_ids`.

        On a GPU the copy is one transfer from pinned memory, which nobody waits for: the tensors can be used
        on the current stream at once. Dtypes are those of the arrays; `logprobs` is None where they are not
        known. Needs torch.

        Args:
            device: where the tensors are to be; torch's default device where None.
        """
        from sglang_topp.tensors import to_torch

        return to_torch(self, device)

    # -- a value among values ----------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Equal in every entry of all four arrays; with log-probs never equals without."""
        if not isinstance(other, CandidateSets):
            return NotImplemented
        return (
            self.has_logprobs == other.has_logprobs
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.token_ids, other.token_ids)
            and (self._logprobs is None or np.array_equal(self.logprobs, other.logprobs))
            and np.array_equal(self.sampled_ids, other.sampled_ids)
        )

    __hash__ = None  # type: ignore[assignment]  # equal by content of large arrays: not a dict key

    def __repr__(self) -> str:
        mean = len(self.token_ids) / len(self) if len(self) else 0.0
        unknown = "" if self.has_logprobs else ", no log-probs"
        return (
            f"CandidateSets(positions={len(self)}, candidates={len(self.token_ids)},"
            f" mean_size={mean:.1f}{unknown})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Through plain arrays, so that pickle protocol 5 (Ray, multiprocessing) moves them out of band.
        return CandidateSets._trusted, self._arrays()

    def _arrays(self) -> tuple[Int32Array, Float32Array | None, Int64Array, Int32Array]:
        return self.token_ids, self._logprobs, self.offsets, self.sampled_ids


_Array = TypeVar("_Array", bound=NDArray[Any])


def _read_only(array: _Array) -> _Array:
    array.flags.writeable = False
    return array
