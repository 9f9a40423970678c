"""Limit the number of candidates in this process, per sample and for all requests in flight.

With `top_logprobs_p` = 1, a candidate set is the whole vocabulary, about a megabyte per token. Sets are never
truncated. Instead, requests end with an error that names the exceeded limit, and their sets are freed:

- If a sample has more candidates than one sample may have, the sample's request ends.
- If all requests in flight together have too many candidates, the request with the most candidates ends.

Each of SGLang's processes counts the candidates that it holds. A sample's candidates stay in the scheduler's
count until the scheduler has sent the candidates to the HTTP process. The candidates of an HTTP call stay in
the HTTP process's count until the HTTP process has sent the call's answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from weakref import WeakSet

from sglang_topp.errors import InvalidInputError
from sglang_topp.malloc_trim import LARGE_BYTES, HeapTrimmer

__all__ = [
    "LIST_FORM_COST",
    "Account",
    "Budget",
    "InFlight",
    "budget",
    "budget_problem",
    "per_sample_refusal",
    "prompt_refusal",
]

LIST_FORM_COST = 16
"""The limits count a candidate in JSON lists as this many candidates.

A candidate in packed arrays counts as one candidate.

Python objects and text take `LIST_FORM_COST` times the memory of packed arrays."""

_PER_SAMPLE = "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE"
_IN_FLIGHT = "SGLANG_TOPP_MAX_CANDIDATES_IN_FLIGHT"
_STAGED = "SGLANG_TOPP_STAGED_CANDIDATES_PER_ROW"
_DEFAULT_PER_SAMPLE = 1 << 25
_DEFAULT_STAGED = 256
# At the peak, four copies of a candidate exist at once: raw, joined, in base64, and in an answer's body. The
# four copies of a candidate take about 40 bytes together. The default limit allows one candidate per 256
# bytes of memory, so the candidates of all requests in flight take at most a sixth of the memory.
_BYTES_PER_CANDIDATE = 256


@dataclass(frozen=True)
class Budget:
    """One process's limits, counted in candidates.

    A candidate is one token of one position's set. A candidate takes 8 bytes, or `LIST_FORM_COST` times as
    much in JSON lists.

    Attributes:
        max_candidates_per_sample: the largest number of candidates that one sample may have, including the
            candidates of its prompt. The default is the smaller of `max_candidates_in_flight` and 2^25. In
            base64, 2^25 candidates take 358 MB.
        max_candidates_in_flight: the largest number of candidates that the process may hold at a time, summed
            over all samples. The default is one candidate per 256 bytes of the machine's or container's
            memory.
        staged_candidates_per_row: the capacity of the staging area, a GPU buffer for the sets of a forward
            pass, in candidates per row. A row is one token position. If the sets of some rows do not fit,
            their requests do not fail: the scheduler extracts these sets again and waits for the device
            (`scheduler.gpu_staging`).
    """

    max_candidates_per_sample: int
    max_candidates_in_flight: int
    staged_candidates_per_row: int = _DEFAULT_STAGED

    @classmethod
    def of(cls, environment: Mapping[str, str], memory_bytes: int) -> Budget:
        """Read the limits from environment variables.

        Raises:
            InvalidInputError: a limit is not a positive integer.
        """
        in_flight = _count(environment, _IN_FLIGHT, memory_bytes // _BYTES_PER_CANDIDATE)
        return cls(
            _count(environment, _PER_SAMPLE, min(_DEFAULT_PER_SAMPLE, in_flight)),
            in_flight,
            _count(environment, _STAGED, _DEFAULT_STAGED),
        )

    def to_dict(self) -> dict[str, int]:
        """Return the limits by name, as `GET /server_info` shows the limits."""
        return asdict(self)


@cache
def budget() -> Budget:
    """Return this process's limits. If an environment variable holds an invalid limit, all limits are 0."""
    try:
        return Budget.of(os.environ, _memory_bytes())
    except InvalidInputError:
        return Budget(0, 0, 0)


def budget_problem() -> str:
    """Return why a limit from an environment variable is invalid, or an empty string if none is invalid."""
    try:
        Budget.of(os.environ, 0)
    except InvalidInputError as error:
        return str(error)
    return ""


class InFlight:
    """The counter of all candidates that this process holds.

    If the process holds more candidates than `limit`, the request or HTTP call with the most candidates ends
    with an error.

    Args:
        limit: the largest number of candidates that all requests and HTTP calls together may hold.
        trimmer: the object that returns memory to the OS after a request or an HTTP call has freed large
            sets.
    """

    def __init__(self, limit: int, trimmer: HeapTrimmer | None = None) -> None:
        self.limit = limit
        self.trimmer = trimmer or HeapTrimmer()
        self.total = 0
        self._accounts: WeakSet[Account] = WeakSet()

    def open(self, end: Callable[[str], None] | None) -> Account:
        """Return a new counter for the candidates of one request or HTTP call, or for other memory.

        Args:
            end: a function that ends the request or HTTP call. The new counter calls `end` at most once, with
                the reason as its argument. None means that the new counter counts other memory, such as the
                log-probs that `scheduler.gpu_staging` keeps for a forward pass.
        """
        account = Account(self, end)
        self._accounts.add(account)
        return account

    def end_largest(self) -> None:
        """End the request or HTTP call that holds the most candidates."""
        largest = max(
            (account for account in self._accounts if account.has_owner and not account.is_closed),
            key=lambda account: account.candidates,
            default=None,
        )
        if largest is not None:
            largest.end(
                f"the requests in flight hold {self.total} candidates, more than the {self.limit} that fit"
                f" ({_IN_FLIGHT}), and this one the most of them: {largest.candidates} at"
                f" {largest.positions} positions; send it again later, with fewer tokens or smaller sets"
            )


class Account:
    """The counter of the candidates of one request or HTTP call.

    If an `Account` is garbage-collected, its candidates no longer count against the limits.
    """

    def __init__(self, in_flight: InFlight, end: Callable[[str], None] | None) -> None:
        self._in_flight, self._end = in_flight, end
        self.candidates = self.positions = 0
        self.is_closed = False

    @property
    def has_owner(self) -> bool:
        """Whether the candidates belong to a request or to an HTTP call."""
        return self._end is not None

    def add(self, candidates: int, positions: int = 1) -> None:
        """Count more candidates.

        If the process now holds more candidates than the limit, end the request or HTTP call that holds the
        most candidates. This `Account` may belong to the request or HTTP call that is ended.
        """
        if self.is_closed:
            return
        self.candidates += candidates
        self.positions += positions
        self._in_flight.total += candidates
        if self._in_flight.total > self._in_flight.limit:
            self._in_flight.end_largest()

    def end(self, reason: str) -> None:
        """Close this `Account`, and end the request or HTTP call whose candidates the `Account` counts.

        Do nothing if this `Account` is closed.
        """
        if not self.is_closed:
            self.close()
            if self._end is not None:
                self._end(reason)

    def close(self) -> None:
        """Subtract this `Account`'s candidates from the process's total. Do nothing on later calls."""
        if not self.is_closed:
            self.is_closed = True
            self._in_flight.total -= self.candidates
            if self.candidates * 8 >= LARGE_BYTES:
                self._in_flight.trimmer.trim_soon()

    def __del__(self) -> None:
        self.close()


def per_sample_refusal(limits: Budget, candidates: int, positions: int) -> str:
    """Return an error message if one sample holds too many candidates, and an empty string otherwise."""
    limit = limits.max_candidates_per_sample
    if candidates <= limit:
        return ""
    fitting = limit * positions // candidates
    return (
        f"got {candidates} candidates at {positions} positions, expected at most {limit} for one sample"
        f" ({_PER_SAMPLE}; a candidate in JSON lists counts {LIST_FORM_COST}); at this size {fitting}"
        " positions fit: ask for fewer tokens, smaller sets or return_logprobs_in_base64"
    )


def prompt_refusal(limits: Budget, *, is_busy: bool) -> str:
    """Return the error message for a prompt whose candidate sets exceed a limit.

    Args:
        limits: the limits of this process.
        is_busy: True if all requests together exceed the limit on candidates in flight, and False if the
            prompt's sets alone exceed the limit for one sample.
    """
    limit, name = (
        (limits.max_candidates_in_flight, _IN_FLIGHT)
        if is_busy
        else (limits.max_candidates_per_sample, _PER_SAMPLE)
    )
    return (
        f"the sets of the prompt's positions, with all that is held beside them, are beyond {limit}"
        f" candidates ({name}); ask for fewer positions (logprob_start_len) or smaller sets"
    )


def _count(environment: Mapping[str, str], name: str, default: int) -> int:
    given = environment.get(name)
    if given is None:
        return default
    if not (
        given.strip().isascii() and given.strip().isdigit() and 0 < len(given.strip()) < 19 and int(given)
    ):
        raise InvalidInputError(f"{name}: got {given[:60]!r}, expected a positive integer, of candidates")
    return int(given)


def _memory_bytes() -> int:
    """Return this machine's memory in bytes, or its container's limit if that is smaller."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return min(physical, int(Path(path).read_text()))
        except (OSError, ValueError):  # the cgroup file does not exist, or contains "max"
            continue
    return physical
