"""Messages that carry candidate sets from the scheduler to the HTTP process.

SGLang carries the messages in its field `customized_info`. Each generated token has one `Entry`, and each
scored prompt position has one `Span`. A span holds bytes, because bytes pickle fast and do not keep a whole
batch in memory. The format may change in any version, because both processes run the same version of this
package. This module also defines the names of the request fields that ask for sets.
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
"""slime's request field, which asks for sets at p = `top_p`, in slime's format (`http.slime_fields`)."""

FIELDS = (THRESHOLD, SOURCE, BASE64, NUCLEUS)
"""The request fields of the patch set. A caller may also put them into `custom_params`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""The values of the field `SOURCE`. `DISTRIBUTION` is the default."""


def asking_field(get: Callable[[str], Any]) -> str:
    """Return the name of the field that asks for sets, or an empty string if none does.

    Args:
        get: returns a field's value, or None if the request lacks it.
    """
    if get(NUCLEUS):
        return NUCLEUS  # checked before THRESHOLD, because such a request has a threshold too
    if get(THRESHOLD):
        return THRESHOLD
    return SOURCE if get(SOURCE) not in (None, DISTRIBUTION) else ""


def from_sampler(get: Callable[[str], Any]) -> bool:
    """Return whether a checked request asks for the tokens that the sampler could draw."""
    return bool(get(SOURCE) == SAMPLER)


def custom_params(req: Any) -> dict[str, Any]:
    """Return the custom parameters of SGLang's `Req`; empty if they are not a dictionary."""
    custom = req.sampling_params.custom_params
    return custom if isinstance(custom, dict) else {}


KEY = "sglang_topp"
"""The `customized_info` key under which each generated token has one `Entry`."""

PROMPT_KEY = "sglang_topp_prompt"
"""The `customized_info` key of the prompt's rows, which SGLang sends once per request.

The list begins with an `Entry` that names the weight version of all rows. One span per scored row follows. If
the scheduler refused the request, the list has only entries that give the reason."""

AT_END = "sglang_topp_at_end"
"""The HTTP process sets this attribute on a request whose sets it writes only once, at the end."""

SETS = "sglang_topp_sets"
"""The `meta_info` key under which a request with `AT_END` gets its sets and their tokens.

The value is None for a sample that did not ask for sets."""

Span: TypeAlias = tuple[bytes, bytes]
"""One position's set: the bytes of its token ids (int32), and the bytes of its log-probs (float32)."""


@dataclass(frozen=True)
class Entry:
    """The set of one generated token, or the reason why it is missing.

    Attributes:
        candidates: the set. None if the set is missing. Also None in the entry that precedes a prompt's rows.
        problem: why the set is missing.
        status: the HTTP status of the error that a missing set causes. A status other than 500 means that the
            scheduler refused the request and extracts no more sets for it.
        weight_version: the version of the weights that drew the token.
        handed_over: whether a prefill server generated the token and still holds the token's set
            (`disaggregation`).
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
    """The sets of several positions in flat arrays; n is the number of candidates in all sets.

    Attributes:
        token_ids: int32 [n], position after position.
        logprobs: float32 [n], in the order of `token_ids`.
        lengths: the size of each position's set; -1 if the position has no distribution.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: list[int]


def span(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Span:
    """Return the bytes of one position's set."""
    return token_ids.tobytes(), logprobs.tobytes()


def join(spans: Iterable[Span | None]) -> Positions:
    """Return the sets of `spans` in flat arrays. None stands for a position that has no distribution."""
    spans = list(spans)
    present = [each for each in spans if each is not None]
    return Positions(
        np.frombuffer(b"".join(ids for ids, _ in present), np.int32),
        np.frombuffer(b"".join(logprobs for _, logprobs in present), np.float32),
        [-1 if each is None else len(each[0]) // 4 for each in spans],
    )
