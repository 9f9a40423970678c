"""Messages that carry candidate sets from the scheduler to the HTTP process.

SGLang carries the messages in its field `customized_info`. A `PackedSet` holds the candidate set of one
position as bytes. Each generated token has one `Entry`, which holds the token's `PackedSet`, or the reason
why the set is missing. Each scored prompt position has a `PackedSet` without an `Entry`. Bytes pickle fast,
and do not keep the arrays of the whole batch in memory, as NumPy views would. The format of `Entry` and
`PackedSet` may change in any version of this package, because the scheduler and the HTTP process run the same
version. This module also defines the names of the request fields that ask for candidate sets.
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
    "NO_SET",
    "NUCLEUS",
    "PROMPT_KEY",
    "SAMPLER",
    "SETS",
    "SOURCE",
    "THRESHOLD",
    "Entry",
    "PackedSet",
    "Positions",
    "asking_field",
    "custom_params",
    "from_sampler",
    "join",
    "pack_set",
]

THRESHOLD = "top_logprobs_p"
SOURCE = "top_logprobs_source"
BASE64 = "return_logprobs_in_base64"
NUCLEUS = "return_top_p_token_ids"
"""The request field of slime that asks for each token's nucleus at the request's own `top_p`.

The answer to a request with `return_top_p_token_ids` holds the sets in slime's two arrays
(`http.slime_fields`)."""

FIELDS = (THRESHOLD, SOURCE, BASE64, NUCLEUS)
"""The request fields that the patch set adds to SGLang's `POST /generate`.

A caller may also put each of these request fields into `sampling_params.custom_params`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""The values of the request field `top_logprobs_source`.

With `DISTRIBUTION`, the default, `top_logprobs_p` is the threshold p of each set. With `SAMPLER`, each set
holds the tokens that the sampler could draw."""


def asking_field(get: Callable[[str], Any]) -> str:
    """Return the name of the request field that asks for sets, or an empty string if there is none.

    Args:
        get: returns the value of the request field with a given name, or None if the request lacks the field.
    """
    # Check NUCLEUS before THRESHOLD, because the HTTP process adds THRESHOLD to a request with NUCLEUS.
    if get(NUCLEUS):
        return NUCLEUS
    if get(THRESHOLD):
        return THRESHOLD
    return SOURCE if get(SOURCE) not in (None, DISTRIBUTION) else ""


def from_sampler(get: Callable[[str], Any]) -> bool:
    """Return whether a request asks for the tokens that the sampler could draw."""
    return bool(get(SOURCE) == SAMPLER)


def custom_params(req: Any) -> dict[str, Any]:
    """Return the `custom_params` of SGLang's `Req`, or an empty dictionary if they are not a dictionary."""
    custom = req.sampling_params.custom_params
    return custom if isinstance(custom, dict) else {}


KEY = "sglang_topp"
"""The key of `customized_info` under which each generated token has one `Entry`."""

PROMPT_KEY = "sglang_topp_prompt"
"""The key of `customized_info` for the list of prompt sets. SGLang sends this list once per request.

The list of prompt sets begins with an `Entry`, which holds the weight version of all prompt sets. After this
`Entry`, the list has one `PackedSet` per scored prompt position. If the scheduler refused the request, every
element of the list is an `Entry` that gives the reason."""

AT_END = "sglang_topp_at_end"
"""The attribute that the HTTP process sets on requests to OpenAI routes.

If a request has this attribute, the HTTP process writes all of the request's sets at the end of the answer,
even in a stream."""

SETS = "sglang_topp_sets"
"""The key of `meta_info` for the sets and tokens of a request that has the attribute `AT_END`.

The value of this `meta_info` key is None if the request did not ask for sets."""

PackedSet: TypeAlias = tuple[bytes, bytes]
"""One position's set: the bytes of its token ids (int32), and the bytes of its log-probs (float32)."""


NO_SET: PackedSet = b"", b""
"""What stands for the set of a prompt position that has none, because no token is there."""


@dataclass(frozen=True)
class Entry:
    """The set of one generated token, or the reason why the set is missing.

    An `Entry` in the list of prompt sets (`PROMPT_KEY`) belongs to no token and has no set. Such an `Entry`
    holds the weight version of the prompt sets, or the reason why the scheduler refused the request.

    Attributes:
        candidates: the token's set; None if the set is missing or if the `Entry` belongs to no token.
        problem: why the set is missing.
        status: the HTTP status of the error that a missing set causes. If `status` is not 500, the scheduler
            refused the request, and extracts no more sets for this request.
        weight_version: the version of the weights that drew the token.
        handed_over: whether a prefill server generated the token and still keeps the token's set
            (`disaggregation`).
    """

    candidates: PackedSet | None
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
        token_ids: int32 [n], the candidates of the first position, then those of the next, and so on.
        logprobs: float32 [n], in the order of `token_ids`.
        lengths: the size of each position's set; -1 if the position has no set.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: list[int]


def pack_set(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> PackedSet:
    """Return the bytes of one position's set."""
    return token_ids.tobytes(), logprobs.tobytes()


def join(packed: Iterable[PackedSet | None]) -> Positions:
    """Return the sets of `packed` in flat arrays. A None in `packed` is a position without a set."""
    packed = list(packed)
    present = [each for each in packed if each is not None]
    return Positions(
        np.frombuffer(b"".join(ids for ids, _ in present), np.int32),
        np.frombuffer(b"".join(logprobs for _, logprobs in present), np.float32),
        [-1 if each is None else len(each[0]) // 4 for each in packed],
    )
