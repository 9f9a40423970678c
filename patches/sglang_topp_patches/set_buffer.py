"""`SetBuffer`: the candidate sets that one request has, from the scheduler's step to the answer.

The scheduler appends sets to the request's buffer, under `KEY` in SGLang's `customized_info`. When SGLang
sends tokens to the HTTP process, it slices each value of `customized_info` by the positions of the new
tokens. A slice of a `SetBuffer` is a list with one smaller `SetBuffer`: what is new, which leaves the buffer.
The HTTP process appends these parts to a buffer of its own, and encodes the answer from it.

Sets are bytes, so a part pickles in microseconds. The format may change in any version of this package,
because the scheduler and the HTTP process run the same version.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_topp.malloc_trim import LARGE_BYTES
from sglang_topp_patches.memory import trimmer

KEY = "sglang_topp"
"""The key of `customized_info` under which a request has its `SetBuffer`."""

_LARGE = LARGE_BYTES // 8
"""How many candidates take `LARGE_BYTES`."""

PackedSet: TypeAlias = tuple[bytes, bytes]
"""One position's set: the bytes of its token ids (int32), and the bytes of its log-probs (float32)."""

NO_SET = -1
"""The size of a position that has no set: no token is there, or its set is on the prefill server."""


@dataclass(frozen=True)
class Problem:
    """Why a request ends with an error instead of sets.

    Attributes:
        text: a sentence.
        status: the HTTP status of the error. Any other than 500 means that the scheduler refused the request.
    """

    text: str
    status: int = HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def is_refusal(self) -> bool:
        return self.status != HTTPStatus.INTERNAL_SERVER_ERROR


@dataclass(frozen=True)
class Positions:
    """The sets of several positions in flat arrays; n is the number of candidates in all sets.

    Attributes:
        token_ids: int32 [n], the candidates of the first position, then those of the next, and so on.
        logprobs: float32 [n], in the order of `token_ids`.
        lengths: the size of each position's set; -1 if the position has no set.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: list[int]


class PackedSets:
    """The sets of consecutive positions, in two growing byte arrays.

    Attributes:
        ids: the token ids of all sets, int32.
        logprobs: their log-probs, float32.
        sizes: the size of each position's set, or `NO_SET`.
    """

    __slots__ = ("ids", "logprobs", "sizes")

    def __init__(
        self, ids: bytes | bytearray = b"", logprobs: bytes | bytearray = b"", sizes: Sequence[int] = ()
    ) -> None:
        self.ids, self.logprobs, self.sizes = bytearray(ids), bytearray(logprobs), array("i", sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def append(self, packed: PackedSet | None) -> None:
        """Append one position's set, or a position without a set."""
        if packed is None:
            self.sizes.append(NO_SET)
            return
        ids, logprobs = packed
        self.ids += ids
        self.logprobs += logprobs
        self.sizes.append(len(ids) // 4)

    def extend(self, other: PackedSets) -> None:
        """Append all positions of `other`."""
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.sizes += other.sizes

    def take(self, count: int) -> PackedSets:
        """Remove the first `count` positions, and return them."""
        if count >= len(self.sizes):
            taken = PackedSets()
            taken.ids, taken.logprobs, taken.sizes = self.ids, self.logprobs, self.sizes
            self.ids, self.logprobs, self.sizes = bytearray(), bytearray(), array("i")
            return taken
        end = 4 * self._num_candidates(count)
        taken = PackedSets(self.ids[:end], self.logprobs[:end], self.sizes[:count])
        del self.ids[:end], self.logprobs[:end], self.sizes[:count]
        return taken

    def positions(self, start: int, stop: int) -> Positions:
        """Return the sets of the positions from `start` to `stop` - 1 in arrays of their own."""
        low, high = 4 * self._num_candidates(start), 4 * self._num_candidates(stop)
        return Positions(
            np.frombuffer(bytes(self.ids[low:high]), np.int32),
            np.frombuffer(bytes(self.logprobs[low:high]), np.float32),
            self.sizes[start:stop].tolist(),
        )

    def sets(self) -> list[PackedSet | None]:
        """Return each position's set; None for a position that has none."""
        ends = np.maximum(np.array(self.sizes, np.int64), 0).cumsum() * 4
        return [
            None
            if size == NO_SET
            else (bytes(self.ids[end - 4 * size : end]), bytes(self.logprobs[end - 4 * size : end]))
            for size, end in zip(self.sizes, ends.tolist(), strict=True)
        ]

    def _num_candidates(self, count: int) -> int:
        """Return how many candidates the first `count` positions have."""
        if count >= len(self.sizes):
            return len(self.ids) // 4
        return int(np.maximum(np.array(self.sizes[:count], np.int64), 0).sum())


@dataclass(slots=True, eq=False)
class SetBuffer:
    """The sets of one request.

    Attributes:
        first: the index of the first generated position that is here. Those before it were sent or encoded.
        generated: the sets of the generated positions from `first` on. The first position of a decode server
            has no set, because the prefill server has it.
        prompt: the sets of the prompt's positions. In the scheduler, a row scores the token after it; a part
            that was sent begins with a position without a set, and has one for each prompt token.
        spans: the weight version of each run of generated positions from 0 on, and the index of its end.
        prompt_version: the version of the weights that scored the prompt.
        problem: why the request ends with an error; None if it does not.
        num_sent: how many candidates were sent, at `num_positions_sent` positions.
    """

    first: int = 0
    generated: PackedSets = field(default_factory=PackedSets)
    prompt: PackedSets = field(default_factory=PackedSets)
    spans: list[tuple[str, int]] = field(default_factory=list)
    prompt_version: str = ""
    problem: Problem | None = None
    num_sent: int = 0
    num_positions_sent: int = 0

    @property
    def end(self) -> int:
        """The index of the next generated position."""
        return self.first + len(self.generated)

    @property
    def num_held(self) -> int:
        """The number of candidates that are here."""
        return (len(self.generated.ids) + len(self.prompt.ids)) // 4

    @property
    def num_candidates(self) -> int:
        """The number of candidates that are here or were sent."""
        return self.num_sent + self.num_held

    @property
    def num_positions(self) -> int:
        """The number of positions that are here or were sent."""
        return self.num_positions_sent + len(self.generated) + len(self.prompt)

    def append(self, packed: PackedSet | None, weight_version: str = "") -> None:
        """Append the set of the next generated token. None means that the prefill server has it."""
        self.generated.append(packed)
        self._add_span(weight_version, self.end)

    def fail(self, problem: Problem) -> None:
        """End the request with an error, and drop its sets. Only the first problem counts."""
        self.problem = self.problem or problem
        self.drop()

    def drop(self) -> None:
        """Drop all sets."""
        self.first = self.end
        self.generated, self.prompt = PackedSets(), PackedSets()

    def truncate(self, end: int) -> None:
        """Drop the generated positions from index `end` on."""
        kept = self.generated.take(max(0, end - self.first))
        self.first, self.generated = min(self.first, end), kept
        starts = [0, *(stop for _, stop in self.spans)]
        self.spans = [
            (version, min(stop, end))
            for start, (version, stop) in zip(starts, self.spans, strict=False)
            if start < end
        ]

    def __getitem__(self, part: slice) -> list[SetBuffer]:
        """Remove what SGLang sends with the generated positions of a slice, and return it in a list."""
        sent = SetBuffer(self.first)
        sent.problem = self.problem
        if len(self.prompt):
            prompt = self.prompt.take(len(self.prompt) - 1)  # the last row scores the first generated token
            sent.prompt.append(None)
            sent.prompt.extend(prompt)
            sent.prompt_version, self.prompt = self.prompt_version, PackedSets()
        sent.generated = self.generated.take(part.stop - self.first)
        self.first += len(sent.generated)
        if not (sent.problem or len(sent.generated) or len(sent.prompt)):
            return []
        sent.spans, self.spans = self.spans, self.spans[-1:]  # the next part begins in the last span
        # Freed memory goes back to the OS after each `LARGE_BYTES` of sets.
        if (self.num_sent + sent.num_held) // _LARGE > self.num_sent // _LARGE:
            trimmer.trim_soon()
        self.num_sent += sent.num_held
        self.num_positions_sent += sent.num_positions
        return [sent]

    def extend(self, part: SetBuffer) -> None:
        """Append a part that the scheduler sent."""
        if part.problem is not None:
            self.fail(part.problem)
        if self.problem is not None:
            return
        self.generated.extend(part.generated)
        for version, end in part.spans:
            self._add_span(version, end)
        if len(part.prompt):
            self.prompt, self.prompt_version = part.prompt, part.prompt_version

    def first_position(self) -> SetBuffer:
        """Return a copy with the first generated token and the prompt alone, for a decode server."""
        copied = SetBuffer()
        copied.problem, copied.prompt, copied.prompt_version = self.problem, self.prompt, self.prompt_version
        for packed in self.generated.sets()[:1]:
            copied.append(packed, self.spans[0][0])
        return copied

    def set_first(self, packed: PackedSet | None, weight_version: str) -> None:
        """Fill in the set of the first generated token, which was on the prefill server."""
        rest = self.generated
        self.generated = PackedSets()
        self.generated.append(packed)
        rest.take(1)
        self.generated.extend(rest)
        self.spans = self.spans[1:]
        if not self.spans or self.spans[0][0] != weight_version:
            self.spans.insert(0, (weight_version, 1))

    def weight_versions(self, num_tokens: int) -> dict[str, Any]:
        """Return the fields `weight_version` and `weight_versions` for the first `num_tokens` tokens.

        When weights are pushed, SGLang ends its own span after the last token that it has counted. With
        overlap scheduling, the old weights may have drawn one more, so the answer has these spans instead.
        `weight_version` is the version of the last token. Without tokens, it is the version that scored the
        prompt, and `weight_versions` has one span from 0 to 0.
        """
        spans: list[dict[str, Any]] = []
        if not num_tokens:
            spans.append({"version": self.prompt_version, "start": 0, "end": 0})
        start = 0
        for version, end in self.spans:
            if start >= num_tokens:
                break
            spans.append({"version": version, "start": start, "end": min(end, num_tokens)})
            start = end
        return {"weight_version": spans[-1]["version"], "weight_versions": spans}

    def _add_span(self, version: str, end: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans.pop()
        self.spans.append((version, end))
