"""Refuse requests that would crash or block SGLang.

SGLang 0.5.23 accepts some values that crash its scheduler, such as an id beyond the vocabulary, or a logit
bias that makes probabilities NaN. A scheduler crash ends the service for every caller. Other values block
SGLang. For example, all other requests wait while SGLang tokenizes a long text, or searches an answer for a
slow stop regex. SGLang refuses some values by itself. This module checks such a value only if SGLang would
answer with status 500 and give no reason.

The sidecar checks every request with this module. The plugin checks only the requests that ask for
candidate sets. The sidecar may run where SGLang is not installed, so this module does not import SGLang.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from sglang_topp.engine_contract.stop_regex_cost import MAX_STEPS, search_steps
from sglang_topp.errors import InvalidInputError, describe

__all__ = ["GRAMMARS", "Model", "check_sampling_params", "check_token_ids", "overlong_param", "overlong_text"]

_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1

# The largest accepted absolute value of a logit bias. SGLang divides a logit by the temperature. The largest
# bias divided by the smallest temperature (1e-6) is still finite in float32.
_MAX_BIAS = 1e30
# The smallest accepted repetition penalty. SGLang divides a logit by the penalty and by the temperature. With
# this penalty and the smallest temperature, the quotient stays finite in float32.
_MIN_REPETITION_PENALTY = 1e-6

# The maximum length of a stop string or stop pattern in characters. SGLang itself refuses more than 32 stop
# strings.
_MAX_STOP_CHARS = 1024
_MAX_GRAMMAR_CHARS = 32768
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""The sampling parameters that constrain an answer by a grammar."""

_MAX_DEPTH = 64

# `Model.max_text_chars` allows at most this many characters per token. A long text has about 4 characters per
# token. A tokenizer's longest tokens are long runs of blanks or dashes, so `max_token_chars` characters per
# token would be too high a limit.
_MAX_TOKEN_CHARS = 16


@dataclass(frozen=True)
class Model:
    """The sizes of the engine's model, which limit requests.

    Attributes:
        vocab_size: the number of rows of the embedding, and of the LM head (`vocab_size` in the model's
            configuration). `vocab_size` may count ids that the tokenizer does not use.
        context_length: the most tokens that a prompt and its answer may have together.
        max_token_chars: the number of characters in the tokenizer's longest token.
    """

    vocab_size: int
    context_length: int
    max_token_chars: int

    @classmethod
    def from_record(cls, record: Any) -> Model | None:
        """Build a `Model` from the `model` record that the plugin adds to SGLang's `GET /server_info`.

        Return None if `record` is invalid.
        """
        names = ("vocab_size", "context_length", "max_token_chars")
        sizes: dict[str, Any] = {}
        if isinstance(record, Mapping):
            sizes = {name: record.get(name) for name in names}
        if not sizes or any(type(size) is not int or size < 1 for size in sizes.values()):
            return None
        return cls(**sizes)

    @property
    def max_text_chars(self) -> int:
        """The most characters that a prompt's text may have."""
        return self.context_length * min(self.max_token_chars, _MAX_TOKEN_CHARS)


def check_token_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Check that all `ids` are in the vocabulary.

    For an id beyond the vocabulary, SGLang's embedding raises IndexError, which crashes the scheduler.

    Args:
        name: the field's name, for the error message.
        ids: a list or an array of integers.
        vocab_size: valid ids are 0 to `vocab_size - 1`.

    Raises:
        InvalidInputError: an id is invalid. The message names the first invalid id and its position.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # `ids` holds lists of different lengths
        array = np.array(None)
    if array.ndim == 1 and array.dtype.kind in "iu":
        wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
        at = int(wrong[0]) if len(wrong) else None
    else:  # `ids` holds integers beyond 64 bits, or values of other types
        at = next((i for i, one in enumerate(ids) if type(one) is not int or not 0 <= one < vocab_size), None)
    if at is not None:
        wrong_id = ids[at].item() if isinstance(ids, np.ndarray) else ids[at]
        raise InvalidInputError(
            f"{name}: got token id {describe(wrong_id)} at position {at},"
            f" expected 0 to {vocab_size - 1}, the model's vocabulary"
        )


def overlong_text(name: str, text: str, model: Model) -> str | None:
    """Return an error message if a prompt's text is longer than `Model.max_text_chars`, and None otherwise.

    SGLang tokenizes the text on its event loop, at a few megabytes per second, before it checks the length.
    During the tokenization, all other requests wait.
    """
    if len(text) <= model.max_text_chars:
        return None
    return (
        f"{name}: got a text of {len(text)} characters, expected at most {model.max_text_chars} for a context"
        f" of {model.context_length} tokens; send a longer prompt as token ids"
    )


def overlong_param(name: str, params: Mapping[str, Any]) -> str | None:
    """Return an error message if a stop string, pattern, or grammar is too long, and None otherwise.

    SGLang tokenizes a stop string on its event loop, and searches the answer for the stop string after every
    token. SGLang compiles a grammar in a scheduler thread that cannot be stopped. The compilation of a long
    grammar may take minutes.
    """
    for key, kind in (("stop", "stop string"), ("stop_regex", "pattern")):
        for at, stop in enumerate(_texts(params.get(key))):
            if len(stop) > _MAX_STOP_CHARS:
                return (
                    f"{name}.{key}: got a {kind} of {len(stop)} characters at position {at},"
                    f" expected at most {_MAX_STOP_CHARS}"
                )
    for key in GRAMMARS:
        grammar = params.get(key)
        if isinstance(grammar, str) and len(grammar) > _MAX_GRAMMAR_CHARS:
            return f"{name}.{key}: got {len(grammar)} characters, expected at most {_MAX_GRAMMAR_CHARS}"
    return None


def check_sampling_params(name: str, params: Mapping[str, Any], model: Model) -> None:
    """Check one prompt's sampling parameters for values that would crash or block SGLang.

    Args:
        name: the name of `params` in error messages.
        params: a mapping from SGLang's parameter names to their values. Parameters with unknown names are not
            checked, because SGLang refuses them.
        model: the sizes of the engine's model.

    Raises:
        InvalidInputError: a parameter has such a value. The message names the parameter, the value, and the
            expected values.
    """
    for problem in _problems(params, model):
        raise InvalidInputError(f"{name}.{problem}")


def _problems(params: Mapping[str, Any], model: Model) -> Iterator[str]:
    for key, value in params.items():
        # Without this check, msgpack may fail to encode a large integer, or the scheduler may fail to decode
        # the integer, and exit.
        if _is_int(value) and not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
            yield f"{key}: got {describe(value)}, expected an integer of 64 bits"
    # SGLang stores top_k in an int32 tensor.
    top_k, penalty = params.get("top_k"), params.get("repetition_penalty")
    if _is_int(top_k) and top_k > _MAX_INT32:
        yield f"top_k: got {top_k}, expected at most {_MAX_INT32}; -1 is no limit"
    # A repetition penalty below `_MIN_REPETITION_PENALTY` makes logits infinite, and therefore makes
    # probabilities NaN. The sampler then raises an error.
    if _is_number(penalty) and 0 < penalty < _MIN_REPETITION_PENALTY:
        yield f"repetition_penalty: got {penalty}, expected {_MIN_REPETITION_PENALTY} to 2"
    # SGLang pickles custom_params. Pickle fails beyond a few hundred levels of nesting. If pickle fails,
    # SGLang answers with status 500 and gives no reason.
    if _nests_beyond(params.get("custom_params"), _MAX_DEPTH):
        yield f"custom_params: got more than {_MAX_DEPTH} levels of nesting, expected fewer"
    # SGLang's HTTP process accepts the field `choice`, but its `SamplingParams` class does not. If a request
    # sets `choice`, SGLang answers with status 500 and gives no reason.
    if "choice" in params:
        yield "choice: SGLang does not accept it; use regex instead"
    yield from _bias_problems(params.get("logit_bias"), model.vocab_size)
    yield from _stop_problems(params, model)


def _bias_problems(bias: Any, vocab_size: int) -> Iterator[str]:
    if not isinstance(bias, Mapping):
        return
    for key, value in bias.items():
        digits = str(key)
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20) or int(digits) >= vocab_size:
            expected = f"expected 0 to {vocab_size - 1}, the model's vocabulary"
            yield f"logit_bias: got token id {describe(key)}, {expected}"
        # A bias beyond the range of float32 becomes infinite, and the probabilities become NaN.
        if _is_number(value) and not -_MAX_BIAS <= value <= _MAX_BIAS:
            expected = f"expected {-_MAX_BIAS:g} to {_MAX_BIAS:g}"
            yield f"logit_bias: got {describe(value)} for token {key}, {expected}"


def _stop_problems(params: Mapping[str, Any], model: Model) -> Iterator[str]:
    stop_ids = params.get("stop_token_ids")
    if isinstance(stop_ids, Sequence) and not isinstance(stop_ids, str):
        # With `min_new_tokens`, SGLang indexes a row of logits with the stop token ids. An invalid id crashes
        # SGLang.
        try:
            check_token_ids("stop_token_ids", stop_ids, model.vocab_size)
        except InvalidInputError as error:
            yield str(error)
    minimum = params.get("min_new_tokens")
    if _is_int(minimum) and minimum > 0:
        # SGLang sets the logits of all stop ids to -inf until it has generated `min_new_tokens` tokens. If no
        # finite logit is left, the probabilities become NaN. This check therefore limits the stop ids to half
        # of the vocabulary.
        if isinstance(stop_ids, Sequence) and len(set(stop_ids)) > model.vocab_size // 2:
            yield (
                f"stop_token_ids: got {len(set(stop_ids))} with min_new_tokens {minimum}, which forbids them,"
                f" expected at most {model.vocab_size // 2}, half of the model's vocabulary"
            )
        if grammar := next((key for key in GRAMMARS if params.get(key)), None):
            yield (
                f"min_new_tokens: got {minimum} with {grammar}; expected one of the two: where the grammar is"
                " complete and only the end may follow, min_new_tokens forbids that too"
            )
    patterns = _texts(params.get("stop_regex"))
    try:
        steps = sum(search_steps(pattern, model.context_length) for pattern in patterns)
    except re.error as error:  # SGLang answers an invalid pattern with status 500 and no reason
        yield f"stop_regex: got {describe(params['stop_regex'])}, which is no regular expression: {error}"
        return
    if steps == math.inf:
        yield (
            f"stop_regex: got {describe(params['stop_regex'])}, expected a bound for every repeat, as in"
            " [a-z]{1,20}, no repeat of a group other than (...)?, no backreferences, and no verbose syntax"
        )
    elif steps > MAX_STEPS:
        yield (
            f"stop_regex: got {describe(params['stop_regex'])}: a search for it in an answer of"
            f" {model.context_length} tokens may take {steps:.0e} steps after every token, expected at most"
            f" {MAX_STEPS:.0e}; lower the bounds of its repeats"
        )


def _texts(value: Any) -> list[str]:
    """Return the strings of a parameter that is one string or a list of strings."""
    given = value if isinstance(value, list) else [value]
    return [one for one in given if isinstance(one, str)]


def _nests_beyond(value: Any, depth: int) -> bool:
    """Return whether the nesting depth of lists and objects exceeds `depth`."""
    level = [value]
    for _ in range(depth + 1):
        containers = [one for one in level if isinstance(one, list | dict)]
        if not containers:
            return False
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    return True


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
