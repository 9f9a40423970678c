"""Fleet: which of several servers takes the next call: of those that answer, the least busy one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_topp.errors import SglangToppError
from sglang_topp_client.retry import delay_s, is_retryable

__all__ = ["Fleet", "Member"]

_T = TypeVar("_T")


@dataclass(eq=False)
class Member(Generic[_T]):
    """One server, as one event loop sees it.

    Attributes:
        server: what a call needs of it.
        in_flight: samples that it has been asked for and that have not come.
    """

    server: _T
    in_flight: int = 0
    _failures: int = 0  # in a row
    _asked_again: float = 0.0  # when
    _turn: int = 0


class Fleet(Generic[_T]):
    """All servers of one client, within one event loop.

    A server that failed (no whole answer, 429, 5xx) is left alone for as long as a retry waits, twice as long
    the next time; then one call tries it, and the others follow when that succeeds. Where none is left,
    whichever is next to be asked again is asked.

    Args:
        servers: at least one.
        clock: seconds; the event loop's.
    """

    def __init__(self, servers: Sequence[_T], clock: Callable[[], float]) -> None:
        self.members = [Member(server) for server in servers]
        self._clock = clock
        self._turns = 0

    @property
    def has_another(self) -> bool:
        """Whether there are several, and one that can be asked now is not known to fail."""
        return len(self.members) > 1 and any(map(self._is_ready, self.members))

    @contextmanager
    def member(self, samples: int, preferred: _T | None = None) -> Generator[_T, None, None]:
        """The server for a call; how the call ends, tells about the server.

        Args:
            samples: how many the call asks for.
            preferred: taken where it is ready: its cache knows the prompt.
        """
        chosen = self._choose(preferred)
        self._turns += 1
        chosen._turn = self._turns
        chosen.in_flight += samples
        try:
            yield chosen.server
        except SglangToppError as error:
            if is_retryable(error):
                self._note_failure(chosen, error)
            raise
        else:
            chosen._failures, chosen._asked_again = 0, 0.0
        finally:
            chosen.in_flight -= samples

    def _choose(self, preferred: _T | None) -> Member[_T]:
        ready = [member for member in self.members if self._is_ready(member)]
        if not ready:
            return min(self.members, key=lambda member: (member._asked_again, member.in_flight))
        for member in ready:
            if preferred is not None and member.server == preferred:
                return member
        # Of equals, the one whose turn is the longest ago.
        return min(ready, key=lambda member: (member.in_flight, member._turn))

    def _is_ready(self, member: Member[_T]) -> bool:
        if not member._failures:
            return True
        return self._clock() >= member._asked_again and not member.in_flight

    def _note_failure(self, member: Member[_T], error: SglangToppError) -> None:
        now = self._clock()
        if now < member._asked_again:
            return  # one of many calls that failed together
        member._failures += 1
        member._asked_again = now + delay_s(member._failures, error)
