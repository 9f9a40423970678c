"""Accumulate one sample's candidate sets in the HTTP process, and check that every token has a set."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from sglang_topp_patches.disaggregation.first_token import FirstToken
from sglang_topp_patches.http.route_policy import Call
from sglang_topp_patches.http.weight_spans import WeightSpans
from sglang_topp_patches.memory.budget import InFlight
from sglang_topp_patches.scheduler_messages import Entry, PackedSet

__all__ = ["ResponseAccumulator"]


class ResponseAccumulator:
    """The sets that the HTTP process received for one sample and may still send to the client.

    Attributes:
        num_tokens: the number of generated tokens that the HTTP process has received.
        first_token_id: the id of the first generated token, or None until a token has arrived.
        generated: the candidate set of each generated token, or None if the set is missing or was freed.
        prompt: the candidate set of each prompt position with a log-prob. `prompt[0]` is None.
        weight_spans: the versions of the weights that generated the tokens and scored the prompt.
        problem: why a token has no set; empty if no set is missing.
        refusal: the `Entry` in which the scheduler says why it refuses the request, or None. A refused
            request ends with an error.
        lacks_first: whether the first token has arrived, but its candidate set is still on the prefill
            server.
        question: fetches the first token's set from the prefill server, while `lacks_first`.
        is_aborted: whether the HTTP process aborted the sample because a position has no set.
    """

    def __init__(self, cost: int) -> None:
        """Create an empty accumulator.

        Args:
            cost: each candidate of the sample counts `cost` times. `cost` is above 1 for JSON lists, which
                take more memory than packed arrays.
        """
        self.num_tokens = 0
        self.first_token_id: int | None = None
        self.generated: list[PackedSet | None] = []
        self.prompt: list[PackedSet | None] = []
        self.weight_spans = WeightSpans()
        self.problem = ""
        self.refusal: Entry | None = None
        self.lacks_first = False
        self.question: asyncio.Task[FirstToken] | None = None
        self.is_aborted = False
        self._cost = cost
        self._candidates = 0
        self._call: Call | None = None

    def add(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entry | None],
        prompt_rows: Sequence[PackedSet | Entry | None],
    ) -> None:
        """Add new tokens, the `Entry` of each token, and the prompt's sets in `prompt_rows`.

        The `Entry` of a token holds the token's set, or the reason why the set is missing. An `Entry` in
        `prompt_rows` holds the weight version of the prompt's sets, a refusal, or the reason why a position
        has no set.
        """
        if self.first_token_id is None and token_ids:
            self.first_token_id = token_ids[0]
        self.num_tokens += len(token_ids)
        refusals = [each for each in (*entries, *prompt_rows) if isinstance(each, Entry) and each.is_refusal]
        if refusals:
            self.refusal = refusals[0]
            self._free()
        if self.refusal is not None:
            return
        for entry in entries:
            if entry is not None and entry.handed_over:
                self.lacks_first = True
            elif entry is None or entry.candidates is None:
                cause = entry.problem if entry else "the scheduler sent none"
                self.problem = self.problem or f"no candidate set at position {len(self.generated)}: {cause}"
            self.generated.append(entry.candidates if entry else None)
            self.weight_spans.add(entry.weight_version if entry else "")
        rows: list[PackedSet | None] = []
        for row in prompt_rows:
            if not isinstance(row, Entry):
                rows.append(row)
            elif row.problem:
                rows.append(None)
                self.problem = (
                    self.problem or f"no candidate set at prompt position {len(rows)}: {row.problem}"
                )
            else:
                self.weight_spans.prompt = row.weight_version
        if rows:
            # The row of a prompt position holds the candidates for the token at the next position. No row
            # has candidates for the prompt's first token, so the list begins with None. The last row has the
            # candidates for the first generated token, so `prompt` omits the last row.
            self.prompt = [None, *rows[:-1]]
        new = [*(entry.candidates for entry in entries if entry), *rows]
        self._count(sum(len(each[0]) // 4 for each in new if each))

    def add_first_token(self, first: FirstToken) -> None:
        """Store the candidate sets from the prefill server: the sets of the first token and of the prompt."""
        self.lacks_first = False
        if first.entry.is_refusal:
            self.refusal = first.entry
            self._free()
        elif first.entry.candidates is None:
            self.problem = f"no candidate set at position 0: {first.entry.problem}"
        else:
            self.generated[0] = first.entry.candidates
            self.prompt = list(first.prompt)
            self.weight_spans.name_first(first.entry.weight_version)
            self._count(first.num_candidates)

    def first_entry(self, problem: str) -> tuple[Entry, tuple[PackedSet | None, ...]]:
        """Return the first token's `Entry` and the prompt's sets, for the request's decode server.

        Args:
            problem: why a token or prompt position has no set; empty if no set is missing.
        """
        if self.refusal is not None:
            return self.refusal, ()
        if problem:
            return Entry(None, problem), ()
        version = self.weight_spans.meta_info(1)["weight_version"]
        return Entry(self.generated[0], weight_version=version), tuple(self.prompt)

    def attach(self, call: Call | None, in_flight: InFlight) -> None:
        """Count the sample's candidates as the HTTP call's, including those that already arrived."""
        if call is not None and self._call is None:
            call.count_in(in_flight)
            call.add(self._candidates * self._cost)
            self._call = call

    def forget(self, start: int, stop: int) -> None:
        """Free the sets of the tokens from index `start` to `stop - 1`. No later chunk needs these sets."""
        gone = [each for each in self.generated[start:stop] if each]
        self.generated[start:stop] = [None] * (stop - start)
        self._count(-sum(len(each[0]) // 4 for each in gone))

    def _count(self, candidates: int) -> None:
        self._candidates += candidates
        if self._call is not None:
            self._call.add(candidates * self._cost)

    def _free(self) -> None:
        self.generated = [None] * len(self.generated)
        self.prompt = [None] * len(self.prompt)
        self._count(-self._candidates)

    @property
    def has_failed(self) -> bool:
        """Whether the sample ends with an error: a set is missing, or the scheduler refused the request."""
        return self.refusal is not None or bool(self.problem) or None in self.prompt[1:]

    @property
    def status(self) -> int:
        """The HTTP status of the error that ends a failed sample."""
        return self.refusal.status if self.refusal else HTTPStatus.INTERNAL_SERVER_ERROR

    def check(self, num_prompt: int | None) -> str:
        """Return the problem if a token or a prompt position lacks its set, and otherwise an empty string.

        Args:
            num_prompt: the number of prompt positions that need a set. If `num_prompt` is None, the number of
                the prompt's sets is not checked, because the server that scores the prompt checks the number.
        """
        if self.refusal is not None:
            return self.refusal.problem
        if self.problem:
            return self.problem
        if len(self.generated) != self.num_tokens:
            return f"{len(self.generated)} candidate sets for {self.num_tokens} generated tokens"
        if num_prompt is not None and len(self.prompt) != num_prompt:
            return f"{len(self.prompt)} candidate sets for {num_prompt} prompt tokens"
        if None in self.prompt[1:]:
            return f"no candidate set at prompt position {self.prompt.index(None, 1)}"
        return ""
