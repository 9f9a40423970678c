"""What the scheduler hands to the HTTP process: one entry per generated token.

An entry is a tuple of bytes, which pickles fast and holds on to no batch. The scheduler writes it, the
tokenizer manager reads it, and it stays within one SGLang of one version: not a wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["KEY", "Entry", "Positions", "Span", "join", "span"]

KEY = "sglang_topp"
"""The key in SGLang's `customized_info`."""

Span: TypeAlias = tuple[bytes, bytes]
"""One position's int32 token ids and float32 log-probs."""


@dataclass(frozen=True)
class Entry:
    """What became of one generated token's set.

    Attributes:
        candidates: its set; None where there is none, and then `problem` says why.
        prompt: with the first generated token, the sets of the prompt positions, where the request
            asked for prompt log-probs; None stands for a position without a distribution.
    """

    candidates: Span | None
    problem: str = ""
    prompt: tuple[Span | None, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        return Entry, (self.candidates, self.problem, self.prompt)


@dataclass(frozen=True)
class Positions:
    """Some positions' sets, flat.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        lengths: one set size per position, -1 where there is no distribution.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: list[int]


def span(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Span:
    """The bytes of one position's set."""
    return token_ids.tobytes(), logprobs.tobytes()


def join(spans: Iterable[Span | None]) -> Positions:
    """The positions of `spans`, one after the other."""
    spans = list(spans)
    present = [each for each in spans if each is not None]
    return Positions(
        np.frombuffer(b"".join(ids for ids, _ in present), np.int32),
        np.frombuffer(b"".join(logprobs for _, logprobs in present), np.float32),
        [-1 if each is None else len(each[0]) // 4 for each in spans],
    )
