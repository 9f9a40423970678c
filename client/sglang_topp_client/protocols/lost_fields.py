"""Detect request fields and answer fields that are lost between the client and a patched SGLang.

A gateway may silently drop fields that it does not know. To find lost fields, the client sends a few check
requests. Each check request generates one token. The engine's answer shows which fields of the check request
have reached the engine. The client also checks that the answer itself has all expected fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from sglang_topp import formats
from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import BadRequestError, MissingCandidateSetsError, WireError, describe
from sglang_topp_client.checks import convert, fresh_id, parse_token_ids
from sglang_topp_client.rollout import SAMPLER

# Request fields that some releases of SGLang refuse. If an error names one of these fields, the field has
# reached the engine.
_REFUSABLE = ("top_logprobs_source", RESUMED)

_Meta: TypeAlias = Mapping[str, Any]
_BASE64_KEYS = tuple(f"output_top_p_logprobs_{part}" for part in ("val_base64", "idx_base64", "lengths"))

# Each key is a request field, and each value describes an item of the engine's answer. The answer contains
# the item only if the field has reached the engine. A value consists of the item's name for error messages,
# and a function that checks an answer for the item.
_SIGNS: dict[str, tuple[str, Callable[[Mapping[str, Any], _Meta], bool]]] = {
    "rid": ("this id", lambda body, meta: meta.get("id") == body["rid"]),
    "return_logprob": ("output_token_logprobs", lambda _, meta: bool(meta.get("output_token_logprobs"))),
    "top_logprobs_p": ("candidate sets", lambda _, meta: formats.has_top_p(meta)),
    "top_logprobs_source": (
        "top_logprobs_source",
        lambda _, meta: meta.get("top_logprobs_source") == SAMPLER,
    ),
    "return_logprobs_in_base64": ("base64 arrays", lambda _, meta: any(key in meta for key in _BASE64_KEYS)),
    RESUMED: (RESUMED, lambda body, meta: meta.get(RESUMED) == body[RESUMED]),
}


async def check_request_fields(base_url: str, post: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
    """Check that request fields reach the engine, and that answer fields come back.

    Args:
        base_url: the server's address, for errors.
        post: sends a request to `/generate`, and returns the answer. Each of the four requests has a prompt
            of two tokens, and makes the engine generate one token.

    Raises:
        MissingCandidateSetsError: an answer has no candidate sets, because the field that asks for them was
            lost.
        WireError: another field of a request or of an answer was lost. The error's `field` and message name
            the lost field.
        SglangToppError: the server did not answer, or refused a request.
    """
    params = {"max_new_tokens": 1, "ignore_eos": True}
    base64 = {"return_logprobs_in_base64": True}
    asked: list[dict[str, Any]] = [
        # The first body asks for no candidate sets. If a gateway drops `return_logprob`, the engine still
        # accepts this body, and the answer shows that the field was lost. Without `return_logprob`, the
        # engine refuses the other bodies, which ask for sets.
        {},
        {"top_logprobs_p": 0.01, **base64},
        {"top_logprobs_source": SAMPLER, "sampling_params": {**params, "top_k": 1}, **base64},
        {"top_logprobs_p": 0.01, RESUMED: 1, **base64},
    ]
    common = {"input_ids": [0, 0], "sampling_params": params, "return_logprob": True}
    for fields in asked:
        body = {**common, **fields, "rid": fresh_id("field-check")}
        try:
            answer = await post(body)
        except BadRequestError as error:
            if not any(name in body and name in str(error) for name in _REFUSABLE):
                raise
        else:
            _check_answer(base_url, body, answer)


def _check_answer(base_url: str, body: Mapping[str, Any], answer: Any) -> None:
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta_info, dict):
        raise WireError("meta_info", f"{base_url} answered {describe(answer)}, expected one answer")
    for name, (sign, is_there) in _SIGNS.items():
        if name in body and not is_there(body, meta_info):
            kind = MissingCandidateSetsError if name.startswith("top_logprobs") else WireError
            raise _lost(kind, base_url, name, f"a request with this field came back without {sign}")
    if "return_logprobs_in_base64" not in body:
        return
    for key in (*_BASE64_KEYS, "weight_versions"):
        if key not in meta_info:
            raise _lost(WireError, base_url, key, "it is missing in an answer with candidate sets")
    output_ids = convert(answer.get("output_ids"), list[int], field="output_ids")
    formats.decode_top_p(meta_info, parse_token_ids("output_ids", output_ids))


def _lost(kind: type[WireError], base_url: str, field: str, what: str) -> WireError:
    return kind(
        field,
        f"{base_url} lost this field: {what}. Either a gateway drops fields that it does not know, as"
        " sglang-router does (smg passes them on), or an engine behind it is not patched: run"
        " `sglang-topp doctor` there",
    )
