"""Which sampling parameters of SGLang's hold where a request goes on with an answer that another one began.

SGLang sees the tokens before the cut as part of the prompt. What follows from the logits of one position, or
from the tokens themselves, is the same there as without a cut; what counts or follows an answer's own tokens
begins anew. Every field of SGLang's `SamplingParams` is in one of the groups here, and a test compares them
with the installed release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_topp.engine_request import GRAMMARS

__all__ = ["BEGINS_ANEW", "HOLDS", "INTERNAL", "RESUMED", "cut_problem"]

RESUMED = "resumed_tokens"
"""The field of a request that goes on: how many of its last prompt tokens begin the answer."""

HOLDS = frozenset(
    {
        # A distribution, and what is drawn from it, depend on the tokens and on nothing else.
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        # Noise is made from the seed and the position in prompt and answer together.
        "sampling_seed",
        # What ends an answer: the last token, or the text of the last ones, whichever side of the cut.
        "stop",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        # Less what is there.
        "max_new_tokens",
        "min_new_tokens",
        # How an answer is written and sent.
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        # How many there are: each is resumed by itself.
        "n",
    }
)
"""The fields that hold."""

_PENALTY = "it counts the tokens of an answer, and would count from the cut on"
_GRAMMAR = "its grammar would begin again at the cut"

BEGINS_ANEW: Mapping[str, tuple[Any, str]] = {
    "frequency_penalty": (0, _PENALTY),
    "presence_penalty": (0, _PENALTY),
    "repetition_penalty": (1, _PENALTY),
    **dict.fromkeys(GRAMMARS, (None, _GRAMMAR)),
    "custom_params": (None, "what reads them may follow the answer from its first token"),
    "watermark": (None, "it follows the answer from its first token"),
    "beam_width": (1, "a beam's other branches are gone at the cut"),
}
"""The fields that do not: the value that is harmless, and why any other one is refused."""

INTERNAL = frozenset(
    {
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_regex_max_len",
        "is_normalized",
        "ebnf_full_assistant",
    }
)
"""The fields that SGLang fills in by itself, and callers do not give."""


def cut_problem(params: Mapping[str, Any]) -> str | None:
    """Why an answer under these sampling parameters cannot go on exactly behind a cut; None where it can.

    The sentence begins with the parameter's name.
    """
    for name, value in params.items():
        if name in HOLDS:
            continue
        if name not in BEGINS_ANEW:
            return f"{name}: it is not known to hold where an answer is resumed"
        harmless, why = BEGINS_ANEW[name]
        is_empty = value is None or (isinstance(value, str | dict) and not value)
        if not is_empty and value != harmless:
            return f"{name}: got {_shown(value)}, which cannot be exact where an answer is resumed: {why}"
    return None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
