"""Limit the memory that candidate sets take in SGLang's processes, and return freed memory to the OS.

The number of candidates is limited, per sample and for all requests that a process has in flight.
With `top_logprobs_p` = 1, a candidate set is the whole vocabulary, about a megabyte per token. Sets are never
truncated. Instead, there are two limits, and an error names the one that was exceeded:

- A sample with more candidates than one sample may have ends with a 413.
- While a process holds more candidates than fit, it answers new requests for sets with a 429. Requests that
  it has accepted are not ended.

Only candidates in host memory count. The HTTP process holds those of a call until it has sent the answer; the
scheduler holds those that it has not sent to the HTTP process yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sglang_topp.errors import InvalidInputError
from sglang_topp.malloc_trim import HeapTrimmer

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
            (`scheduler.sets`).
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


@dataclass
class InFlight:
    """The number of candidates that this process holds in host memory.

    Attributes:
        limit: the number of candidates above which the process refuses new requests for sets.
        total: the number of candidates now.
    """

    limit: int
    total: int = 0


def busy_refusal(in_flight: int, limit: int) -> str:
    """Return the error message for a request for sets that does not fit now, or "" if it fits."""
    if in_flight <= limit:
        return ""
    return (
        f"the requests in flight hold {in_flight} candidates, more than the {limit} that fit ({_IN_FLIGHT});"
        " send the request again later"
    )


def sample_refusal(limits: Budget, candidates: int, positions: int) -> str:
    """Return the error message for a sample that has too many candidates."""
    limit = limits.max_candidates_per_sample
    fitting = limit * positions // candidates
    return (
        f"got {candidates} candidates at {positions} positions, expected at most {limit} for one sample"
        f" ({_PER_SAMPLE}; a candidate in JSON lists counts {LIST_FORM_COST}); at this size {fitting}"
        " positions fit: ask for fewer tokens, smaller sets or return_logprobs_in_base64"
    )


def prompt_refusal(limits: Budget) -> str:
    """Return the error message for a prompt that has too many candidates for one sample."""
    return (
        f"the sets of the prompt's positions have more than {limits.max_candidates_per_sample} candidates"
        f" ({_PER_SAMPLE}); ask for fewer positions (logprob_start_len) or smaller sets"
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


trimmer = HeapTrimmer()
"""The trimmer of this process."""
