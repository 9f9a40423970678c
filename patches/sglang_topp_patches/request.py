"""`SetsRequest`: one request's wish, in one value from the body of the request to the scheduler.

`http.request_fields` parses the request's fields into a `SetsRequest`, and attaches it to SGLang's
`GenerateReqInput`. It crosses to the scheduler as a `Carried`, in place of the sampling parameters'
`custom_params`, and is attached to SGLang's `Req` there. SGLang pickles its messages, so the class of the
value proves that the plugin made it: no JSON, protobuf, or MessagePack body can produce a `Carried`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

THRESHOLD = "top_logprobs_p"
SOURCE = "top_logprobs_source"
BASE64 = "return_logprobs_in_base64"
NUCLEUS = "return_top_p_token_ids"
"""The request field of slime that asks for each token's nucleus at the request's own `top_p`.

The answer holds the sets in slime's two arrays (`http.slime_fields`)."""

ROUTES = "return_routed_experts"
"""SGLang's field for the experts of each token. In a request for sets, the plugin keeps them exact."""

INDEXER_TOPK = "return_indexer_topk"
"""SGLang's field for what each token's sparse attention reads. It's refused in a request for sets."""

FIELDS = (THRESHOLD, SOURCE, BASE64, NUCLEUS)
"""The request fields that the plugin adds to `POST /generate`.

A caller may also put them into `sampling_params.custom_params`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""The values of the request field `top_logprobs_source`.

With `DISTRIBUTION`, the default, `top_logprobs_p` is the threshold p of each set. With `SAMPLER`, each set
holds the tokens that the sampler could draw."""

_ATTRIBUTE = "sglang_topp_request"


@dataclass(frozen=True, kw_only=True)
class SetsRequest:
    """The wish of one prompt.

    Attributes:
        threshold: the threshold p of the sets; 0 if the prompt asks for none, or for the sampler's sets.
        is_from_sampler: whether each set holds the tokens that the sampler could draw.
        is_base64: whether the answer has packed arrays in place of lists.
        is_for_slime: whether the answer has the sets in slime's fields; `threshold` is the prompt's `top_p`.
        is_sent_at_end: whether the answer has all sets at its end, even in a stream (OpenAI routes).
        resumed_tokens: how many of the prompt's last ids belong to an interrupted answer; None if the answer
            neither resumes another one nor may be resumed.
        returns_prompt_ids: whether the plugin adds the prompt's ids to the answer, on a release that cannot.
    """

    threshold: float = 0.0
    is_from_sampler: bool = False
    is_base64: bool = False
    is_for_slime: bool = False
    is_sent_at_end: bool = False
    resumed_tokens: int | None = None
    returns_prompt_ids: bool = False

    @property
    def field(self) -> str:
        """The name of the request field that asks for sets; empty if none does."""
        if self.is_for_slime:
            return NUCLEUS
        if self.threshold:
            return THRESHOLD
        return SOURCE if self.is_from_sampler else ""


NOTHING = SetsRequest()
"""What a request wants that names no field of the plugin."""


@dataclass(frozen=True)
class Carried:
    """A `SetsRequest` on its way to the scheduler, in place of `SamplingParams.custom_params`.

    SGLang has merged the server's default sampling parameters by then, so nothing is displaced.

    Attributes:
        request: what the request wants.
        custom_params: the `custom_params` that the scheduler restores.
    """

    request: SetsRequest
    custom_params: Any


def attach(holder: Any, request: SetsRequest | list[SetsRequest]) -> None:
    """Attach what is wanted to a `GenerateReqInput` or `Req`. A batch has a list, with one value per part."""
    setattr(holder, _ATTRIBUTE, request)


def sets_request(holder: Any) -> SetsRequest:
    """Return what is attached to a `GenerateReqInput` that is no batch, or to a `Req`."""
    request: SetsRequest = getattr(holder, _ATTRIBUTE, NOTHING)
    return request


def without_fields(params: Any, *, keeps_none: bool = False) -> Any:
    """Return sampling parameters without the plugin's fields in their `custom_params`.

    The scheduler then samples exactly as for the same request without the fields. So `custom_params` that
    held nothing else are left out, and those of the server apply. `keeps_none` leaves None instead, which
    SGLang's OpenAI routes send for a request without `custom_params`.
    """
    if isinstance(params, list):
        return [without_fields(one, keeps_none=keeps_none) for one in params]
    custom = params.get("custom_params") if isinstance(params, Mapping) else None
    if not isinstance(custom, Mapping) or custom.keys().isdisjoint(FIELDS):
        return params
    rest = {name: value for name, value in custom.items() if name not in FIELDS}
    left = {name: value for name, value in params.items() if name != "custom_params"}
    return {**left, "custom_params": rest or None} if rest or keeps_none else left
