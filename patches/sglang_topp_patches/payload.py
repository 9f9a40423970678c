"""What the scheduler hands to the HTTP process through `customized_info`.

One `Entry` per generated token, and one span per scored prompt row. Sets are bytes there: they pickle
fast and hold on to no batch. Both ends are one version of this package: not a wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AT_END",
    "BASE64",
    "DISTRIBUTION",
    "FIELDS",
    "KEY",
    "PROMPT_KEY",
    "SAMPLER",
    "SETS",
    "SOURCE",
    "THRESHOLD",
    "Entry",
    "Positions",
    "Span",
    "asking_field",
    "custom_params",
    "from_sampler",
    "join",
    "span",
]

THRESHOLD = "top_logprobs_p"
SOURCE = "top_logprobs_source"
BASE64 = "return_logprobs_in_base64"
FIELDS = (THRESHOLD, SOURCE, BASE64)
"""The request's fields, also inside `custom_params`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""What `SOURCE` may be; the first where it is not given."""


def asking_field(get: Callable[[str], Any]) -> str:
    """The field that asks for sets (threshold, or source), or nothing; `get` looks one up, None where it is
    not there."""
    if get(THRESHOLD):
        return THRESHOLD
    return SOURCE if get(SOURCE) not in (None, DISTRIBUTION) else ""


def from_sampler(get: Callable[[str], Any]) -> bool:
    """Whether a request that was checked asks for what the sampler could draw."""
    return bool(get(SOURCE) == SAMPLER)


def custom_params(req: Any) -> dict[str, Any]:
    """What a request of the scheduler's holds for extensions; SGLang takes anything there."""
    custom = req.sampling_params.custom_params
    return custom if isinstance(custom, dict) else {}


KEY = "sglang_topp"
"""The key of the generated tokens' entries, one per token."""

PROMPT_KEY = "sglang_topp_prompt"
"""The key of the prompt's rows, one per row that SGLang scored, behind an `Entry` that names the weights that
all of them came from; or of one `Entry` that says why there are none. It goes out once per request."""

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
        candidates: its set; None where there is none, and then `problem` says why. (None before a prompt's
            rows too.)
        status: of the error that comes of it. Other than 500, the scheduler takes no more sets for the
            request, and leaves it to the HTTP process to end it.
        weight_version: the weights that it came from.
        handed_over: the token was drawn on another server, and its set is there (`disaggregation`).
    """

    candidates: Span | None
    problem: str = ""
    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    weight_version: str = ""
    handed_over: bool = False

    @property
    def is_refusal(self) -> bool:
        """Whether the request is to be ended."""
        return self.status != HTTPStatus.INTERNAL_SERVER_ERROR

    def __reduce__(self) -> tuple[object, ...]:
        return Entry, (
            self.candidates,
            self.problem,
            int(self.status),
            self.weight_version,
            self.handed_over,
        )


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
