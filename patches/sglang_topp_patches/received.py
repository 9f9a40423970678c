"""What has arrived in the HTTP process for one sample: its tokens' sets, and whether none is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

from sglang_topp_patches.handover import First
from sglang_topp_patches.payload import Entry, Span
from sglang_topp_patches.routes import Call
from sglang_topp_patches.versions import Versions

__all__ = ["EndedError", "Received"]


class EndedError(ValueError):
    """The call was ended: SGLang answers with the status, or, in a stream, with an event that holds it."""

    def __init__(self, problem: str, status_code: int = HTTPStatus.TOO_MANY_REQUESTS) -> None:
        super().__init__(problem)
        self.status_code = status_code


class Received:
    """All that has arrived for one sample so far, and is not sent for good.

    Attributes:
        num_tokens: how many tokens are visible.
        first_token_id: the first of them; None before.
        generated: the set of each; None where there is none, or it was sent for good.
        prompt: the set of each scored prompt position, None at the first.
        versions: the weights that each token, and the prompt's positions, came from.
        problem: why a token has no set; empty while all have one.
        refusal: the scheduler's word that it takes no more sets, and the request is to be ended.
        lacks_first: the first token is visible, and its set still on the server that drew it.
    """

    def __init__(self, cost: int) -> None:
        """`cost` is what one candidate counts for (`budget`)."""
        self.num_tokens = 0
        self.first_token_id: int | None = None
        self.generated: list[Span | None] = []
        self.prompt: list[Span | None] = []
        self.versions = Versions()
        self.problem = ""
        self.refusal: Entry | None = None
        self.lacks_first = False
        self._cost = cost
        self._candidates = self._positions = 0
        self._call: Call | None = None

    def add(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entry | None],
        prompt_rows: Sequence[Span | Entry | None],
    ) -> None:
        """Take new tokens, with an entry for each of them and the prompt's rows where they come."""
        if self.first_token_id is None and token_ids:
            self.first_token_id = token_ids[0]
        self.num_tokens += len(token_ids)
        words = [each for each in (*entries, *prompt_rows) if isinstance(each, Entry) and each.is_refusal]
        if words:
            self.refusal = words[0]
            self._let_go()
        if self.refusal is not None:
            return
        for entry in entries:
            if entry is not None and entry.handed_over:
                self.lacks_first = True
            elif entry is None or entry.candidates is None:
                cause = entry.problem if entry else "the scheduler sent none"
                self.problem = self.problem or f"no candidate set at position {len(self.generated)}: {cause}"
            self.generated.append(entry.candidates if entry else None)
            self.versions.add(entry.weight_version if entry else "")
        rows = []
        for row in prompt_rows:
            if isinstance(row, Entry):
                self.versions.prompt = row.weight_version
            else:
                rows.append(row)
        if rows:
            # A row is the distribution of the next token: the first position has none, and from the
            # last row the first generated token was drawn.
            self.prompt = [None, *rows[:-1]]
        new = [*(entry.candidates for entry in entries if entry), *rows]
        self._count(sum(len(span[0]) // 4 for span in new if span), len(entries) + len(rows))

    def hand_over(self, first: First) -> None:
        """Take what belongs to the first token, and the prompt's positions, from the server that drew it."""
        self.lacks_first = False
        if first.entry.is_refusal:
            self.refusal = first.entry
            self._let_go()
        elif first.entry.candidates is None:
            self.problem = f"no candidate set at position 0: {first.entry.problem}"
        else:
            self.generated[0] = first.entry.candidates
            self.prompt = list(first.prompt)
            self.versions.name_first(first.entry.weight_version)
            self._count(first.num_candidates, len(first.prompt))

    def belongs_to(self, call: Call | None, abort: Callable[[], None]) -> None:
        """Say whose it is; `abort` stops the sample in the scheduler."""
        if call is not None and self._call is None:
            self._call = call
            call.at_end(self._let_go)
            call.at_end(abort)
            candidates, positions = self._candidates, self._positions
            self._candidates = self._positions = 0
            self._count(candidates, positions)

    def check_call(self) -> None:
        """Raise where the call was ended: what was held is gone."""
        if self._call is not None and self._call.problem:
            raise EndedError(f"candidate sets: {self._call.problem}")

    def forget(self, start: int, stop: int) -> None:
        """Let go of these positions, which have been written for the last time."""
        gone = [span for span in self.generated[start:stop] if span]
        self.generated[start:stop] = [None] * (stop - start)
        self._count(-sum(len(span[0]) // 4 for span in gone), -len(gone))

    def _count(self, candidates: int, positions: int) -> None:
        self._candidates += candidates
        self._positions += positions
        if self._call is not None:
            if self._call.problem:
                self._let_go()
            else:
                self._call.account.add(candidates * self._cost, positions)

    def _let_go(self) -> None:
        self.generated = [None] * len(self.generated)
        self.prompt = [None] * len(self.prompt)

    @property
    def status(self) -> int:
        """Of the error that comes of a problem."""
        return self.refusal.status if self.refusal else HTTPStatus.INTERNAL_SERVER_ERROR

    def check(self, num_prompt: int | None) -> str:
        """Why there is not one set for each visible token, or nothing; `num_prompt` is None where the
        prompt's were checked by who scored it."""
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
