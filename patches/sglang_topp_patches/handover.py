"""What a prefill server keeps for the decode server that goes on with a request.

The prefill server draws a request's first token and scores its prompt; SGLang sends the token and the KV
cache on, in buffers of fixed size. The sets have no fixed size: they wait in the prefill server's HTTP
process, by the request's bootstrap room, until the decode server's has asked for them (`disaggregation`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import numpy as np

from sglang_topp.errors import WireError
from sglang_topp_patches.budget import Account, in_flight
from sglang_topp_patches.payload import Entry, Span, join

__all__ = ["KEPT_S", "First", "Kept"]

KEPT_S = 120.0
"""How long sets wait that nobody asks for: their request has ended on the decode server."""

_FIELD = "the first token's set"
_LINE_END = b"\n"


@dataclass(frozen=True)
class First:
    """What belongs to a request's first token.

    Attributes:
        token_id: the token.
        asked: what was asked for there, by name, in words to compare (`disaggregation.asked_for`).
        entry: its set, or why there is none.
        prompt: the set of each scored prompt position, None where there is no distribution.
    """

    token_id: int
    asked: Mapping[str, str]
    entry: Entry
    prompt: tuple[Span | None, ...] = ()

    @property
    def num_candidates(self) -> int:
        """In all sets together."""
        return sum(len(span[0]) // 4 for span in (self.entry.candidates, *self.prompt) if span)

    def to_bytes(self) -> bytes:
        """A line of JSON, then all token ids (int32), then all log-probs (float32), little-endian; for
        `from_bytes` of the same version."""
        positions = join((self.entry.candidates, *self.prompt))
        head = {
            "version": version("sglang-topp"),
            "token_id": self.token_id,
            "asked": dict(self.asked),
            "problem": self.entry.problem,
            "status": int(self.entry.status),
            "weight_version": self.entry.weight_version,
            "lengths": positions.lengths,
        }
        parts = (
            json.dumps(head).encode(),
            _LINE_END,
            _little(positions.token_ids),
            _little(positions.logprobs),
        )
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, body: bytes) -> First:
        """What `to_bytes` wrote.

        Raises:
            WireError: another version wrote it, or it is not whole.
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
        spans = [
            (ids[end - length : end].tobytes(), logprobs[end - length : end].tobytes())
            if length >= 0
            else None
            for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
        ]
        entry = Entry(spans[0], head["problem"], head["status"], head["weight_version"])
        return cls(head["token_id"], head["asked"], entry, tuple(spans[1:]))


def _little(values: np.ndarray[Any, Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


@dataclass(eq=False)
class _Question:
    asked: Mapping[str, str]
    answer: asyncio.Future[First | tuple[str, ...]]


def _differing(left: Mapping[str, str], right: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in sorted({*left, *right}) if left.get(name) != right.get(name))


class Kept:
    """What waits in a prefill server's HTTP process, and who waits for it; used in one event loop.

    Each is handed out once, to who asked for the same: nobody else knows what that was. What nobody asks for
    within `kept_s` goes, and what waits counts against the process's budget: where that is too much, what is
    handed out says so.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._firsts: dict[int, tuple[First, Account]] = {}
        self._questions: dict[int, list[_Question]] = {}

    def __len__(self) -> int:
        return len(self._firsts)

    def put(self, room: int, first: First) -> None:
        """Hand `first` to who asks for it, now or later; it takes the place of what the room had."""
        is_taken = False
        # The last one first: the connections of those before it may be cut.
        for question in reversed(self._questions.pop(room, [])):
            names = _differing(question.asked, first.asked)
            if question.answer.done() or (is_taken and not names):
                continue
            question.answer.set_result(names or first)
            is_taken = is_taken or not names
        self._drop(room)
        if is_taken:
            return
        account = in_flight().open(lambda reason: self._refuse(room, reason))
        self._firsts[room] = first, account
        account.add(first.num_candidates)
        asyncio.get_running_loop().call_later(self._kept_s, self._drop, room, account)

    async def take(
        self, room: int, asked: Mapping[str, str], wait_s: float
    ) -> First | tuple[str, ...] | None:
        """What the room has, waited for.

        Returns:
            None where it has nothing within `wait_s`; and where something else was asked for there than
            `asked`, the names of what differs: then it stays.
        """
        if room in self._firsts:
            first, account = self._firsts[room]
            if names := _differing(asked, first.asked):
                return names
            del self._firsts[room]
            account.close()
            return first
        question = _Question(asked, asyncio.get_running_loop().create_future())
        self._questions.setdefault(room, []).append(question)
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
        """Let go of what the room has; of one's own alone, where an account says which that is."""
        kept = self._firsts.get(room)
        if kept is not None and account in (None, kept[1]):
            del self._firsts[room]
            kept[1].close()

    def _refuse(self, room: int, reason: str) -> None:
        first, account = self._firsts[room]
        word = Entry(None, reason, HTTPStatus.TOO_MANY_REQUESTS)
        self._firsts[room] = replace(first, entry=word, prompt=()), account
