"""Accumulate one sample's candidate sets in the HTTP process, and check that every token has a set."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from sglang_topp_patches.disaggregation import FirstToken
from sglang_topp_patches.http.route_policy import Call
from sglang_topp_patches.memory import InFlight
from sglang_topp_patches.set_buffer import NO_SET, SetBuffer

__all__ = ["ResponseAccumulator"]


class ResponseAccumulator:
    """The sets that the HTTP process received for one sample and may still send to the client.

    Attributes:
        sets: the sets, or the problem with which the sample ends.
        num_tokens: the number of generated tokens that the HTTP process has received.
        first_token_id: the id of the first generated token, or None until a token has arrived.
        question: fetches the first token's set from the prefill server, while `lacks_first`.
        is_aborted: whether the HTTP process aborted the sample because a position has no set.
    """

    def __init__(self, cost: int) -> None:
        """Create an empty accumulator.

        Args:
            cost: each candidate of the sample counts `cost` times. `cost` is above 1 for JSON lists, which
                take more memory than packed arrays.
        """
        self.sets = SetBuffer()
        self.num_tokens = 0
        self.first_token_id: int | None = None
        self.question: asyncio.Task[FirstToken] | None = None
        self.is_aborted = False
        self._cost = cost
        self._counted = 0
        self._call: Call | None = None

    def add(self, token_ids: Sequence[int], part: SetBuffer | None) -> None:
        """Add new tokens, and what the scheduler sent with them."""
        if self.first_token_id is None and token_ids:
            self.first_token_id = token_ids[0]
        self.num_tokens += len(token_ids)
        if part is not None:
            self.sets.extend(part)
        self._count()

    @property
    def lacks_first(self) -> bool:
        """Whether the first token has arrived, but its candidate set is still on the prefill server."""
        return self.sets.first == 0 and self.sets.generated.sizes[:1].tolist() == [NO_SET]

    def add_first_token(self, first: FirstToken) -> None:
        """Store the candidate sets from the prefill server: the sets of the first token and of the prompt."""
        if first.sets.problem is not None:
            self.sets.fail(first.sets.problem)
        elif self.sets.problem is None:
            (packed,) = first.sets.generated.sets()
            self.sets.set_first(packed, first.sets.spans[0][0])
            self.sets.prompt, self.sets.prompt_version = first.sets.prompt, first.sets.prompt_version
        self._count()

    def attach(self, call: Call | None, in_flight: InFlight) -> None:
        """Count the sample's candidates as the HTTP call's, including those that already arrived."""
        if call is not None and self._call is None:
            call.count_in(in_flight)
            self._call = call
            self._count()

    def forget(self, stop: int) -> None:
        """Free the sets of the tokens before index `stop`. No later chunk needs them."""
        self.sets.first += len(self.sets.generated.take(stop - self.sets.first))
        self._count()

    def _count(self) -> None:
        if self._call is not None:
            held = self.sets.num_held
            self._call.add((held - self._counted) * self._cost)
            self._counted = held

    @property
    def has_failed(self) -> bool:
        """Whether the sample ends with an error: a set is missing, or the scheduler refused the request."""
        return self.sets.problem is not None

    @property
    def status(self) -> int:
        """The HTTP status of the error that ends a failed sample."""
        return self.sets.problem.status if self.sets.problem else HTTPStatus.INTERNAL_SERVER_ERROR

    def check(self, num_prompt: int | None) -> str:
        """Return the problem if a token or a prompt position lacks its set, and otherwise an empty string.

        Args:
            num_prompt: the number of prompt positions that need a set. If `num_prompt` is None, the number of
                the prompt's sets is not checked, because the server that scores the prompt checks the number.
        """
        if self.sets.problem is not None:
            return self.sets.problem.text
        if self.sets.end != self.num_tokens:
            return f"{self.sets.end} candidate sets for {self.num_tokens} generated tokens"
        if num_prompt is not None and len(self.sets.prompt) != num_prompt:
            return f"{len(self.sets.prompt)} candidate sets for {num_prompt} prompt tokens"
        return ""
