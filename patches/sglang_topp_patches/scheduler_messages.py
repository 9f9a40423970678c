"""Messages that carry candidate sets from the scheduler to the HTTP process.

SGLang carries the messages in its field `customized_info`. A `PackedSet` holds the candidate set of one
position as bytes. Each generated token has one `Entry`, which holds the token's `PackedSet`, or the reason
why the set is missing. Each scored prompt position has a `PackedSet` without an `Entry`. Bytes pickle fast,
and do not keep the arrays of the whole batch in memory, as NumPy views would. The format of `Entry` and
`PackedSet` may change in any version of this package, because the scheduler and the HTTP process run the same
version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "KEY",
    "PROMPT_KEY",
    "SETS",
    "Entry",
    "PackedSet",
    "Positions",
    "join",
    "pack_set",
]

KEY = "sglang_topp"
"""The key of `customized_info` under which each generated token has one `Entry`."""

PROMPT_KEY = "sglang_topp_prompt"
"""The key of `customized_info` for the list of prompt sets. SGLang sends this list once per request.

The list of prompt sets begins with an `Entry`, which holds the weight version of all prompt sets. After this
`Entry`, the list has one `PackedSet` per scored prompt position. If the scheduler refused the request, every
element of the list is an `Entry` that gives the reason."""

SETS = "sglang_topp_sets"
"""The key of `meta_info` for the sets and tokens of a request to an OpenAI route.

The value of this `meta_info` key is None if the request did not ask for sets."""

PackedSet: TypeAlias = tuple[bytes, bytes]
"""One position's set: the bytes of its token ids (int32), and the bytes of its log-probs (float32)."""


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
