"""How many candidates may be held: for one sample, and for all that are in flight in one process.

A set at p = 1 is the vocabulary: a megabyte a token. Nothing is ever cut to fit. What goes beyond a limit
ends as an error that names the limit and says what would fit, and lets go of what it held.

Every process counts what passes through it. The scheduler counts what a sample has generated until it
ends; the HTTP process what has arrived for a call until its answer has been sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.heap import LARGE_BYTES, trim_soon
from sglang_topp_patches.payload import KEY, PROMPT_KEY, Entry, custom_params
from sglang_topp_patches.releases import internals

__all__ = [
    "LIST_FORM_COST",
    "Account",
    "Budget",
    "InFlight",
    "budget",
    "budget_problem",
    "charge",
    "in_flight",
    "is_refused",
    "refuse",
    "refuse_prompt",
]

LIST_FORM_COST = 16
"""A candidate in JSON lists counts as this many: as Python objects and as text it takes that much more."""

_PER_SAMPLE = "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE"
_IN_FLIGHT = "SGLANG_TOPP_MAX_CANDIDATES_IN_FLIGHT"
_STAGED = "SGLANG_TOPP_STAGED_CANDIDATES_PER_ROW"
_DEFAULT_PER_SAMPLE = 1 << 25
_DEFAULT_STAGED = 256
# Raw, joined, in base64 and as the body of an answer a candidate takes some 40 bytes at the worst moment:
# all that is in flight then takes a sixth of the memory.
_BYTES_PER_CANDIDATE = 256


@dataclass(frozen=True)
class Budget:
    """Limits, in candidates (one token at one position, 8 bytes as such; `LIST_FORM_COST` in JSON lists).

    Attributes:
        max_candidates_per_sample: of one sample, its prompt's included. By default 2^25, 358 MB of base64.
        max_candidates_in_flight: of all samples in flight in one process. By default one for every 256
            bytes of the machine's (or the container's) memory.
        staged_candidates_per_row: on a GPU, the room for the sets of a pass, by the row. No limit: what is
            beyond it costs a wait (`staging`).
    """

    max_candidates_per_sample: int
    max_candidates_in_flight: int
    staged_candidates_per_row: int = _DEFAULT_STAGED

    @classmethod
    def of(cls, environment: Mapping[str, str], memory_bytes: int) -> Budget:
        """The limits that an environment sets.

        Raises:
            InvalidInputError: one of them is no positive integer.
        """
        in_flight = _count(environment, _IN_FLIGHT, memory_bytes // _BYTES_PER_CANDIDATE)
        return cls(
            _count(environment, _PER_SAMPLE, min(_DEFAULT_PER_SAMPLE, in_flight)),
            in_flight,
            _count(environment, _STAGED, _DEFAULT_STAGED),
        )

    def to_dict(self) -> dict[str, int]:
        """What `GET /server_info` shows."""
        return asdict(self)


@cache
def budget() -> Budget:
    """This process's limits; where the environment's cannot be read, none at all fits."""
    try:
        return Budget.of(os.environ, _memory_bytes())
    except InvalidInputError:
        return Budget(0, 0, 0)


def budget_problem() -> str:
    """Why the environment's limits cannot be read, or nothing."""
    try:
        Budget.of(os.environ, 0)
    except InvalidInputError as error:
        return str(error)
    return ""


class InFlight:
    """What all accounts of a process hold together; where that is too much, the largest one ends."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._accounts: WeakSet[Account] = WeakSet()

    def open(self, end: Callable[[str], None]) -> Account:
        """An account.

        Args:
            end: ends whose account it is, with the reason; called at most once.
        """
        account = Account(self, end)
        self._accounts.add(account)
        return account

    def end_largest(self) -> None:
        """End one account: that with the most candidates among those that have not ended."""
        largest = max(
            (account for account in self._accounts if not account.is_closed),
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
    """What one holds. Closed when it is let go of, however that happens."""

    def __init__(self, flight: InFlight, end: Callable[[str], None]) -> None:
        self._flight, self._end = flight, end
        self.candidates = self.positions = 0
        self.is_closed = False

    def add(self, candidates: int, positions: int = 1) -> None:
        """Count more; may end this account or another."""
        if self.is_closed:
            return
        self.candidates += candidates
        self.positions += positions
        self._flight.total += candidates
        if self._flight.total > self._flight.limit:
            self._flight.end_largest()

    def end(self, reason: str) -> None:
        """Close it, and end whose account it is."""
        if not self.is_closed:
            self.close()
            self._end(reason)

    def close(self) -> None:
        """Count nothing of it any more."""
        if not self.is_closed:
            self.is_closed = True
            self._flight.total -= self.candidates
            if self.candidates * 8 >= LARGE_BYTES:
                trim_soon()

    def __del__(self) -> None:
        self.close()


@cache
def in_flight() -> InFlight:
    """All that this process holds."""
    return InFlight(budget().max_candidates_in_flight)


def _per_sample_refusal(candidates: int, positions: int) -> str:
    """Why a sample cannot go on that holds so much, or nothing."""
    limit = budget().max_candidates_per_sample
    if candidates <= limit:
        return ""
    fitting = limit * positions // candidates
    return (
        f"got {candidates} candidates at {positions} positions, expected at most {limit} for one sample"
        f" ({_PER_SAMPLE}; a candidate in JSON lists counts {LIST_FORM_COST}); at this size {fitting}"
        " positions fit: ask for fewer tokens, smaller sets or return_logprobs_in_base64"
    )


# -- in the scheduler --------------------------------------------------------------------------------


def charge(req: Any, candidates: int, positions: int = 1) -> None:
    """Count what a request of the scheduler's got; it ends where that is too much.

    Args:
        req: SGLang's `Req`. One that has finished holds nothing any more: what it got is on its way.
        candidates, positions: what is new.
    """
    account: Account | None = getattr(req, "sglang_topp_account", None)
    if account is None:
        held_by = ref(req)
        account = req.sglang_topp_account = in_flight().open(
            lambda reason: refuse(held_by(), reason, HTTPStatus.TOO_MANY_REQUESTS)
        )
    account.add(candidates * custom_params(req).get(KEY, 1), positions)
    if problem := _per_sample_refusal(account.candidates, account.positions):
        refuse(req, problem, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    if req.finished():
        account.close()


def refuse_prompt(req: Any, *, is_busy: bool) -> None:
    """End a request whose prompt's sets were not all taken, since they are beyond a limit."""
    limits = budget()
    limit, name = (
        (limits.max_candidates_in_flight, _IN_FLIGHT)
        if is_busy
        else (limits.max_candidates_per_sample, _PER_SAMPLE)
    )
    refuse(
        req,
        f"the sets of the prompt's positions, with all that is held beside them, are beyond {limit}"
        f" candidates ({name}); ask for fewer positions (logprob_start_len) or smaller sets",
        HTTPStatus.TOO_MANY_REQUESTS if is_busy else HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    )


def is_refused(req: Any) -> bool:
    """Whether a request of the scheduler's gets no more sets, and is about to be ended."""
    return getattr(req, "sglang_topp_refused", False)


def refuse(req: Any, reason: str, status: HTTPStatus) -> None:
    """Take no more sets for a request, let go of those it has, and leave word for the HTTP process to end it.

    Not here: this is known to one rank alone, and a request has to end on all of them at the same step.

    Args:
        req: SGLang's `Req`, or None where it is gone.
        reason: why, as a sentence.
        status: of the error; not 500.
    """
    if req is None:
        return
    account: Account | None = getattr(req, "sglang_topp_account", None)
    if account is not None:
        account.close()
    word = Entry(None, reason, status)
    req.sglang_topp_refused = True
    info = req.customized_info = req.customized_info or {}
    # SGLang sends entries from `send_token_offset` on, so one stands where the next token's will be; the
    # prompt's go out with the first token, if they have not.
    info[KEY] = [word] * (max(len(info.get(KEY, ())), req.send_token_offset) + 1)
    rows = internals().prompt_rows()
    rows += [word] * max(1, len(info.get(PROMPT_KEY, ())))
    info[PROMPT_KEY] = rows


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
    """What this machine has, or the container that this runs in may use."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return min(physical, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return physical
