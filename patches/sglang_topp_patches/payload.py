"""What the scheduler hands to the HTTP process through `customized_info`.

One `Entry` per generated token, and one span per scored prompt row. Sets are bytes there: they pickle
fast and hold on to no batch. Both ends are one version of this package: not a wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AT_END",
    "BASE64",
    "FIELDS",
    "KEY",
    "PROMPT_KEY",
    "SETS",
    "THRESHOLD",
    "Entry",
    "Positions",
    "Span",
    "custom_params",
    "join",
    "span",
]

THRESHOLD = "top_logprobs_p"
BASE64 = "return_logprobs_in_base64"
FIELDS = (THRESHOLD, BASE64)
"""The request's fields, also inside `custom_params`."""


def custom_params(req: Any) -> dict[str, Any]:
    """What a request of the scheduler's holds for extensions; SGLang takes anything there."""
    custom = req.sampling_params.custom_params
    return custom if isinstance(custom, dict) else {}


KEY = "sglang_topp"
"""The key of the generated tokens' entries, one per token."""

PROMPT_KEY = "sglang_topp_prompt"
"""The key of the prompt's rows, one per row that SGLang scored; it goes out once per request."""

AT_END = "sglang_topp_at_end"
"""An attribute of a request in the HTTP process: its sets are written once, when it has ended."""

SETS = "sglang_topp_sets"
"""Where they are then in `meta_info`, with their tokens; None for a sample that none were asked for."""

Span: TypeAlias = tuple[bytes, bytes]
"""One position's int32 token ids and float32 log-probs."""


@dataclass(frozen=True)
class Entry:
    """What became of one generated token's set.

    Attributes:
        candidates: its set; None where there is none, and then `problem` says why.
    """

    candidates: Span | None
    problem: str = ""

    def __reduce__(self) -> tuple[object, ...]:
        return Entry, (self.candidates, self.problem)


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
