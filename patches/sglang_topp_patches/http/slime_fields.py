"""Support slime's request field: return each token's nucleus, and log-probs renormalized over the nucleus.

slime is an RL trainer. If its option `--rollout-top-p` is not 1, slime sets `return_top_p_token_ids` in
`sampling_params.custom_params`. The trainer reads two arrays from the answer's `meta_info`. Each array is
little-endian int32 in base64::

    top_p_token_ids       for each position in order, the ids of the nucleus and of the sampled token
    top_p_token_offsets   where each position's ids start in top_p_token_ids, then where the last ids end

For T generated tokens, `top_p_token_offsets` has T + 1 entries. Each log-prob in `output_token_logprobs` is
renormalized over its position's nucleus. slime has its own patch for SGLang's sampler
(`sglang-top_p.patch`), which produces the two arrays. This module replaces slime's patch: it encodes the
exact candidate sets at the request's `top_p` as slime's two arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_topp.candidates.csr_operations import log_sum_exp, offsets_of
from sglang_topp.errors import InvalidInputError
from sglang_topp.formats.field_parsing import INT32, b64text
from sglang_topp_patches.capabilities import nucleus_problem
from sglang_topp_patches.request import NUCLEUS
from sglang_topp_patches.set_buffer import Positions

# If a request sets one of these fields, SGLang reports additional log-probs, over the whole vocabulary. The
# additional log-probs would not match the renormalized log-probs of the generated tokens.
_OTHER_LOGPROBS = ("top_logprobs_num", "token_ids_logprob")


def nucleus_threshold(sampling_params: Any) -> float:
    """Return the nucleus threshold of one prompt, which is `top_p` in the prompt's sampling parameters.

    Args:
        sampling_params: the prompt's sampling parameters, as the caller sent them. SGLang may later add
            the server's default sampling parameters. The scheduler therefore checks the final sampling
            parameters again (`scheduler.requests`).

    Raises:
        InvalidInputError: `top_p` is invalid, or other sampling parameters make the sampler draw from a set
            that is not the nucleus at `top_p`.
    """
    params = sampling_params if isinstance(sampling_params, Mapping) else {}
    top_p = 1.0 if params.get("top_p") is None else params["top_p"]
    if isinstance(top_p, bool) or not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise InvalidInputError(f"sampling_params.top_p: got {top_p!r}, expected a number p with 0 < p <= 1")
    names = ("temperature", "top_k", "min_p")
    if problem := nucleus_problem(**{name: params.get(name) for name in names}):
        raise InvalidInputError(f"sampling_params.{problem}")
    return float(top_p)


def check_request(field: Callable[[str], Any]) -> None:
    """Refuse a request with slime's field if the request also asks for log-probs over the whole vocabulary.

    Args:
        field: a function that returns the value of a request field by the field's name. The function returns
            the value that the caller sent, not SGLang's normalized value. If the caller did not send the
            field, the function returns None.

    Raises:
        InvalidInputError: a field of the request asks for log-probs over the whole vocabulary. The error
            message names this request field.
    """
    for name in _OTHER_LOGPROBS:
        value = field(name)
        if any(value) if isinstance(value, list) else value:
            raise InvalidInputError(
                f"{name}: got {value!r} with {NUCLEUS}; expected none, because these log-probs would be over"
                " the whole vocabulary, and those of output_token_logprobs are renormalized"
            )


def write_nuclei(meta_info: dict[str, Any], positions: Positions) -> None:
    """Write slime's two arrays into `meta_info`, and renormalize the generated tokens' log-probs.

    Args:
        meta_info: the `meta_info` of a chunk or of the answer. `write_nuclei` replaces the list
            `output_token_logprobs` in `meta_info`.
        positions: one candidate set for each generated token in `meta_info`. The first log-prob of each set
            is the highest.

    Raises:
        ValueError: `output_token_logprobs` has fewer log-probs than `positions` has candidate sets.
    """
    offsets = offsets_of(positions.lengths)
    logprob_sums = log_sum_exp(positions.logprobs, offsets).tolist()
    # If `max_new_tokens` is 0, SGLang may report a log-prob although it generated no token.
    reported = meta_info.get("output_token_logprobs", [])[: len(logprob_sums)]
    meta_info["output_token_logprobs"] = [
        (logprob - logprob_sum, *rest)
        for (logprob, *rest), logprob_sum in zip(reported, logprob_sums, strict=True)
    ]
    meta_info["top_p_token_ids"] = b64text(positions.token_ids, INT32)
    meta_info["top_p_token_offsets"] = b64text(offsets, INT32)
