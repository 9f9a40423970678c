"""LoadBalancer: choose the least busy ready endpoint for each call, and back off from failed endpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_topp.errors import SglangToppError
from sglang_topp_client.dispatch.retry_policy import delay_s, is_retryable
from sglang_topp_client.transport.fd_limit import FileLimitError

__all__ = ["LoadBalancer"]

_T = TypeVar("_T")

# An endpoint counts as busier than another one if it has over so many samples more in flight. One endpoint
# made all samples of a prompt, so calls that prefer the same endpoint often follow each other.
_MAX_AHEAD = 8


@dataclass(eq=False)
class _State(Generic[_T]):
    """The load and the recent failures of one endpoint."""

    endpoint: _T
    num_in_flight: int = 0  # samples
    last_call: int = 0
    num_failures: int = 0  # consecutive
    retry_at: float = 0.0
    error: SglangToppError | None = None


class LoadBalancer(Generic[_T]):
    """The load balancer of one client, within one event loop.

    After a failure (no complete answer, 429, or 5xx), an endpoint is not ready until a delay has passed.
    Endpoints that are not ready get no calls while at least one endpoint is ready. Each further consecutive
    failure roughly doubles the delay (`delay_s`). After the delay, the endpoint gets a single call as a test.
    If the test call succeeds, the endpoint gets calls as before.

    Args:
        endpoints: one endpoint or several.
        clock: returns the time in seconds on the event loop's clock.
    """

    def __init__(self, endpoints: Sequence[_T], clock: Callable[[], float]) -> None:
        self._states = [_State(endpoint) for endpoint in endpoints]
        self._clock = clock
        self._num_calls = 0

    @property
    def num_in_flight(self) -> int:
        """The total number of samples that the running calls asked for."""
        return sum(state.num_in_flight for state in self._states)

    @property
    def failures(self) -> dict[_T, SglangToppError]:
        """The last retryable error of each failing endpoint. A successful call removes the error."""
        return {state.endpoint: state.error for state in self._states if state.error is not None}

    def has_ready(self, *, without: Collection[_T]) -> bool:
        """Return whether any endpoint outside of `without` is ready."""
        return any(self._is_ready(state) and state.endpoint not in without for state in self._states)

    @contextmanager
    def pick(
        self, num_samples: int, preferred: _T | None = None, *, without: Collection[_T] = ()
    ) -> Generator[_T, None, None]:
        """Choose the endpoint for one call, and yield the endpoint.

        The caller must call the endpoint inside the `with` block. A retryable error in the block counts as a
        failure of the endpoint. After a failure, the endpoint is not ready until a delay has passed. If no
        endpoint is ready, the balancer chooses the endpoint whose delay ends first.

        Args:
            num_samples: how many samples the call requests.
            preferred: the endpoint whose prefix cache probably holds the prompt. The balancer chooses this
                endpoint if it is ready, not in `without`, and not busier than the others.
            without: endpoints on which this call failed. The balancer chooses one of these endpoints only if
                this call has failed on all endpoints.
        """
        state = self._choose(preferred, without)
        self._num_calls += 1
        state.last_call = self._num_calls
        state.num_in_flight += num_samples
        try:
            yield state.endpoint
        except SglangToppError as error:
            # A lack of file descriptors in this process is no failure of the endpoint.
            if is_retryable(error) and not isinstance(error, FileLimitError):
                self._note_failure(state, error)
            raise
        else:
            state.num_failures, state.retry_at, state.error = 0, 0.0, None
        finally:
            state.num_in_flight -= num_samples

    def _choose(self, preferred: _T | None, without: Collection[_T]) -> _State[_T]:
        fresh = [state for state in self._states if state.endpoint not in without] or self._states
        ready = [state for state in fresh if self._is_ready(state)]
        if not ready:
            return min(fresh, key=lambda state: (state.retry_at, state.num_in_flight))
        least_busy = min(ready, key=lambda state: (state.num_in_flight, state.last_call))
        for state in ready:
            if preferred is not None and state.endpoint == preferred:
                return state if state.num_in_flight <= least_busy.num_in_flight + _MAX_AHEAD else least_busy
        return least_busy

    def _is_ready(self, state: _State[_T]) -> bool:
        if not state.num_failures:
            return True
        return self._clock() >= state.retry_at and not state.num_in_flight

    def _note_failure(self, state: _State[_T], error: SglangToppError) -> None:
        state.error = error
        now = self._clock()
        if now < state.retry_at:
            return  # do not count another failure before the delay ends
        state.num_failures += 1
        state.retry_at = now + delay_s(state.num_failures, error)
