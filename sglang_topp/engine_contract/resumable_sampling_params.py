"""Check whether sampling parameters allow a request to resume an interrupted answer exactly.

A resuming request sends the interrupted answer's tokens at the end of its prompt. Most parameters, such as
`top_p` and `stop`, have the same effect in a resuming request as in an uninterrupted request. Other
parameters, such as penalties and grammars, do not. SGLang updates the state of a penalty or grammar with each
token that a request generates, and does not rebuild the state from the prompt. A resuming request must
therefore not use these parameters.

Every field of SGLang's `SamplingParams` is in `RESUMABLE_PARAMS`, `NON_RESUMABLE_PARAMS`, or
`INTERNAL_PARAMS`. A test compares these three constants with the installed SGLang release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_topp.engine_contract.fatal_requests import GRAMMARS
from sglang_topp.errors import describe

__all__ = ["INTERNAL_PARAMS", "NON_RESUMABLE_PARAMS", "RESUMABLE_PARAMS", "RESUMED", "find_resume_problem"]

RESUMED = "resumed_tokens"
"""The request field that says how many tokens at the end of the prompt belong to the earlier answer."""

RESUMABLE_PARAMS = frozenset(
    {
        # Parameters that change each position's distribution. Their effect does not depend on which request
        # generated the tokens before the position.
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        # The sampler's random noise depends on the seed and on the token's position. Positions are counted
        # from the prompt's first token.
        "sampling_seed",
        # Parameters that control where an answer ends. The plugin makes SGLang search for stop strings and
        # patterns also in the tokens that earlier requests generated.
        "stop",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        # The client reduces `max_new_tokens` and `min_new_tokens` by the number of tokens that earlier
        # requests generated.
        "max_new_tokens",
        "min_new_tokens",
        # Parameters that control how SGLang writes and sends an answer.
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        # The client resumes each of the n samples in a separate request.
        "n",
    }
)
"""The fields of `SamplingParams` that work in a resuming request."""

_PENALTY = "it counts the tokens of an answer, and would count only from the resumed token on"
_GRAMMAR = "its grammar would begin again at the cut"

NON_RESUMABLE_PARAMS: Mapping[str, tuple[Any, str]] = {
    "frequency_penalty": (0, _PENALTY),
    "presence_penalty": (0, _PENALTY),
    "repetition_penalty": (1, _PENALTY),
    **dict.fromkeys(GRAMMARS, (None, _GRAMMAR)),
    "custom_params": (None, "their reader may follow the answer from its first token"),
    "watermark": (None, "it follows the answer from its first token"),
    "beam_width": (1, "a beam's other branches are gone at the cut"),
}
"""The fields of `SamplingParams` whose state would be lost if another request continues the answer.

Each parameter's name maps to the value that has no effect, and to the reason why other values are refused.
"""

INTERNAL_PARAMS = frozenset(
    {
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_regex_max_len",
        "is_normalized",
        "ebnf_full_assistant",
    }
)
"""The fields of `SamplingParams` that SGLang itself sets. Callers do not pass these fields."""


def find_resume_problem(params: Mapping[str, Any]) -> str | None:
    """Return why these sampling parameters prevent an exact resume, or None if an exact resume is possible.

    The message begins with the name of the parameter that prevents an exact resume.
    """
    for name, value in params.items():
        if name in RESUMABLE_PARAMS:
            continue
        if name not in NON_RESUMABLE_PARAMS:
            return f"{name}: it is not known to be exact where an answer is resumed"
        harmless, why = NON_RESUMABLE_PARAMS[name]
        is_empty = value is None or (isinstance(value, str | dict) and not value)
        if not is_empty and value != harmless:
            return f"{name}: got {describe(value)}, which cannot be exact where an answer is resumed: {why}"
    return None
