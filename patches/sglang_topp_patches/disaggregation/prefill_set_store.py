"""Store a prefill server's candidate sets until a decode server fetches them.

The prefill server draws a request's first token and scores the request's prompt. SGLang sends the token and
the KV cache to the decode server, in buffers of fixed size. Candidate sets vary in size, so buffers of fixed
size cannot carry them. The prefill server's HTTP process therefore keeps the sets until it has sent them to
the decode server, for at most 120 s. A request has the same number, its bootstrap room, on both servers. The
store finds the request's sets by this number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeAlias

import numpy as np

from sglang_topp.errors import WireError
from sglang_topp_patches.disaggregation.input_comparison import differing_names
from sglang_topp_patches.memory.budget import Account, InFlight
from sglang_topp_patches.request import THRESHOLD
from sglang_topp_patches.scheduler_messages import Entry, PackedSet, join

__all__ = ["KEPT_S", "PATH", "FirstToken", "PrefillSets"]

PATH = "/sglang_topp/first"
"""The route from which a decode server fetches the sets.

SGLang's bootstrap server, which runs in the prefill server's HTTP process, serves the route."""

KEPT_S = 120.0
"""The number of seconds for which the store keeps sets that no decode server fetches.

This time is long enough, because a decode server that gets no sets ends its request sooner.
"""

_FIELD = "the first token's set"
_LINE_END = b"\n"


@dataclass(frozen=True)
class FirstToken:
    """A request's first token, the candidate set of the first token, and the candidate sets of the prompt.

    Attributes:
        token_id: the id of the first token.
        inputs: the inputs of the prefill server's request, as `input_comparison.first_token_inputs` returns
            them.
        entry: the first token's candidate set, or the reason why the set is missing.
        prompt: a tuple that begins with None, and then has one candidate set for each prompt position with a
            log-prob. The tuple is empty if there are no prompt sets.
    """

    token_id: int
    inputs: Mapping[str, str]
    entry: Entry
    prompt: tuple[PackedSet | None, ...] = ()

    @property
    def num_candidates(self) -> int:
        """The total number of candidates in the first generated token's set and the prompt's sets."""
        return sum(len(each[0]) // 4 for each in (self.entry.candidates, *self.prompt) if each)

    def to_bytes(self) -> bytes:
        """Return one JSON line, then all candidates' token ids (int32), then all log-probs (float32).

        The token ids and log-probs are little-endian. Only `from_bytes` of the same package version can read
        the result.
        """
        positions = join((self.entry.candidates, *self.prompt))
        head = {
            "version": version("sglang-topp"),
            "token_id": self.token_id,
            "inputs": dict(self.inputs),
            "problem": self.entry.problem,
            "status": int(self.entry.status),
            "weight_version": self.entry.weight_version,
            "lengths": positions.lengths,
        }
        parts = (
            json.dumps(head).encode(),
            _LINE_END,
            _little_endian(positions.token_ids),
            _little_endian(positions.logprobs),
        )
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, body: bytes) -> FirstToken:
        """Decode the bytes that `to_bytes` returned.

        Raises:
            WireError: another version of this package wrote the bytes, or the bytes are incomplete.
        """
        line, _, arrays = body.partition(_LINE_END)
        try:
            head: dict[str, Any] = json.loads(line)
            theirs, lengths = head["version"], np.array(head["lengths"], np.int64)
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(_FIELD, f"got {body[:60]!r}, expected a line of JSON") from error
        if theirs != version("sglang-topp"):
            ours = version("sglang-topp")
            raise WireError(
                _FIELD, f"the prefill server has sglang-topp {theirs}, this one {ours}; expected the same"
            )
        total = int(lengths.clip(min=0).sum())
        if len(arrays) != 8 * total:
            raise WireError(_FIELD, f"got {len(arrays)} bytes of arrays, expected {8 * total}")
        ids = np.frombuffer(arrays, "<i4", total).astype(np.int32, copy=False)
        logprobs = np.frombuffer(arrays, "<f4", total, 4 * total).astype(np.float32, copy=False)
        ends = lengths.clip(min=0).cumsum()
        packed = [
            (ids[end - length : end].tobytes(), logprobs[end - length : end].tobytes())
            if length >= 0
            else None
            for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
        ]
        entry = Entry(packed[0], head["problem"], head["status"], head["weight_version"])
        return cls(head["token_id"], head["inputs"], entry, tuple(packed[1:]))


def _little_endian(values: np.ndarray[Any, Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


Answer: TypeAlias = FirstToken | tuple[str, ...]
"""The answer to a decode server: a `FirstToken`, or the names of inputs that differ on the two servers."""


@dataclass(eq=False)
class _Question:
    """A decode server's pending request for the sets of one bootstrap room."""

    inputs: Mapping[str, str]
    answer: asyncio.Future[Answer]


class PrefillSets:
    """A prefill server's store of candidate sets that no decode server has fetched yet.

    The store also holds the decode servers' pending requests for sets. All methods must be called from one
    event loop. The store delivers a request's sets once, and only to a decode server whose request has the
    same inputs as the prefill server's request. All candidates in the store count against the memory budget
    of the HTTP process. If the process exceeds the budget, the store may replace a request's sets with an
    error message.
    """

    def __init__(self, in_flight: InFlight, kept_s: float = KEPT_S) -> None:
        self._in_flight, self._kept_s = in_flight, kept_s
        self._entries: dict[int, tuple[FirstToken, Account]] = {}
        self._questions: dict[int, list[_Question]] = {}
        self._expected: dict[int, list[asyncio.Future[None]]] = {}
        self._without_sets: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    async def wait_for_question(self, room: int, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for a decode server to ask for the sets of a bootstrap room.

        Return True as soon as a decode server has asked, or False if none asks in time.
        """
        self._without_sets.discard(room)
        if room in self._questions:
            return True
        comes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected.setdefault(room, []).append(comes)
        try:
            async with asyncio.timeout(wait_s):
                await comes
            return True
        except TimeoutError:
            return False
        finally:
            if comes in (others := self._expected.get(room, [])):
                others.remove(comes)
                if not others:
                    del self._expected[room]

    def put(self, room: int, first: FirstToken) -> None:
        """Send `first` to a decode server that waits for it. If none waits, store `first` under `room`.

        The store drops an earlier `FirstToken` of the same bootstrap room.
        """
        is_taken = False
        # Answer the decode server's newest request first, because older requests may come from closed
        # connections.
        for question in reversed(self._questions.pop(room, [])):
            names = differing_names(question.inputs, first.inputs)
            if question.answer.done() or (is_taken and not names):
                continue
            question.answer.set_result(names or first)
            is_taken = is_taken or not names
        self._drop(room)
        if is_taken:
            return
        account = self._in_flight.open(lambda reason: self._refuse(room, reason))
        self._entries[room] = first, account
        account.add(first.num_candidates)
        asyncio.get_running_loop().call_later(self._kept_s, self._drop, room, account)

    def note_request_without_sets(self, room: int) -> None:
        """Record that a bootstrap room's request asks for no sets on the prefill server.

        If a decode server asks for the sets of this bootstrap room, the store answers that the input
        `top_logprobs_p` differs on the two servers.
        """
        self._without_sets.add(room)
        asyncio.get_running_loop().call_later(self._kept_s, self._without_sets.discard, room)
        for question in self._questions.pop(room, []):
            if not question.answer.done():
                question.answer.set_result((THRESHOLD,))

    async def take(self, room: int, inputs: Mapping[str, str], wait_s: float) -> Answer | None:
        """Wait for the sets of a bootstrap room, and remove the sets from the store.

        Returns:
            A `FirstToken` if `inputs` equal the inputs of the prefill server's request. If some inputs
            differ, `take` instead returns the names of these inputs, and the sets stay in the store. If no
            sets arrive within `wait_s` seconds, `take` returns None.
        """
        if room in self._entries:
            first, account = self._entries[room]
            if names := differing_names(inputs, first.inputs):
                return names
            del self._entries[room]
            account.close()
            return first
        if room in self._without_sets:
            return (THRESHOLD,)
        question = _Question(inputs, asyncio.get_running_loop().create_future())
        self._questions.setdefault(room, []).append(question)
        for comes in self._expected.pop(room, ()):
            if not comes.done():
                comes.set_result(None)
        try:
            async with asyncio.timeout(wait_s):
                return await question.answer
        except TimeoutError:
            return None
        finally:
            if question in (others := self._questions.get(room, [])):
                others.remove(question)
                if not others:
                    del self._questions[room]

    def _drop(self, room: int, account: Account | None = None) -> None:
        """Free the sets of a bootstrap room.

        `put` stores sets with a new `Account`, which counts their candidates. `put` also starts a timer that
        calls `_drop` with this `Account`. If `account` is given, `_drop` frees only sets that `put` stored
        with `account`. The timer of one `put` call therefore never frees the sets of a later `put` call.
        """
        entry = self._entries.get(room)
        if entry is not None and account in (None, entry[1]):
            del self._entries[room]
            entry[1].close()

    def _refuse(self, room: int, reason: str) -> None:
        first, account = self._entries[room]
        refusal = Entry(None, reason, HTTPStatus.TOO_MANY_REQUESTS)
        self._entries[room] = replace(first, entry=refusal, prompt=()), account
