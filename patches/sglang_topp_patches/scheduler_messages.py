"""Messages from the scheduler to the HTTP process, sent in SGLang's `customized_info`.

There is one `Entry` per generated token, and one span per scored prompt row. Sets are bytes: they pickle
fast, and hold no reference to a batch's memory. This is not the HTTP contract: both processes run the same
version of this package.
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
    "NUCLEUS",
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
NUCLEUS = "return_top_p_token_ids"
"""slime's field: the sets of p = `top_p`, in slime's form (`http.slime_fields`)."""

FIELDS = (THRESHOLD, SOURCE, BASE64, NUCLEUS)
"""The request's fields, also inside `custom_params`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""The values of `SOURCE`; the first is the default."""


def asking_field(get: Callable[[str], Any]) -> str:
    """Return the field that asks for sets, or an empty string.

    Args:
        get: returns a field's value, or None if the request lacks it.
    """
    if get(NUCLEUS):
        return NUCLEUS  # before the threshold that it stands for
    if get(THRESHOLD):
        return THRESHOLD
    return SOURCE if get(SOURCE) not in (None, DISTRIBUTION) else ""


def from_sampler(get: Callable[[str], Any]) -> bool:
    """Return whether a checked request asks for what the sampler could draw."""
    return bool(get(SOURCE) == SAMPLER)


def custom_params(req: Any) -> dict[str, Any]:
    """Return the custom parameters of a scheduler's request; empty if they are not a dictionary."""
    custom = req.sampling_params.custom_params
    return custom if isinstance(custom, dict) else {}


KEY = "sglang_topp"
"""The key of the generated tokens' entries, one per token."""

PROMPT_KEY = "sglang_topp_prompt"
"""The key of the prompt's rows, which SGLang sends once per request.

The first value is an `Entry` that names the weights of all rows. One span per scored row follows. A refused
request has only entries that tell why."""

AT_END = "sglang_topp_at_end"
"""An attribute of a request in the HTTP process whose sets are written once, when it has ended."""

SETS = "sglang_topp_sets"
"""The key of those sets and their tokens in `meta_info`; None for a sample that did not ask for sets."""

Span: TypeAlias = tuple[bytes, bytes]
"""One position's int32 token ids and float32 log-probs."""


@dataclass(frozen=True)
class Entry:
    """The set of one generated token, or the reason why it is missing.

    Attributes:
        candidates: the set. None if it is missing, and in the entry before a prompt's rows.
        problem: why the set is missing.
        status: the HTTP status of the error that follows. Any but 500 refuses the request: the scheduler
            takes no more sets for it.
        weight_version: the weights that drew the token.
        handed_over: whether another server drew the token and has its set (`disaggregation`).
    """

    candidates: Span | None
    problem: str = ""
    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    weight_version: str = ""
    handed_over: bool = False

    @property
    def is_refusal(self) -> bool:
        """Return whether the scheduler refused the request."""
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
    """The sets of some positions, flat.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        lengths: each position's set size, -1 for a position without a distribution.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: list[int]


def span(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Span:
    """Return the bytes of one position's set."""
    return token_ids.tobytes(), logprobs.tobytes()


def join(spans: Iterable[Span | None]) -> Positions:
    """Return the positions of `spans` in their order."""
    spans = list(spans)
    present = [each for each in spans if each is not None]
    return Positions(
        np.frombuffer(b"".join(ids for ids, _ in present), np.int32),
        np.frombuffer(b"".join(logprobs for _, logprobs in present), np.float32),
        [-1 if each is None else len(each[0]) // 4 for each in spans],
    )
