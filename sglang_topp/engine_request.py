"""What SGLang does not check, and does not survive: checked before a request reaches it.

An id beyond the vocabulary, a number beyond the tensor that it goes into, a bias that leaves no finite
logit: SGLang 0.5.23 takes each, and its scheduler dies of it, for every caller. A long text is tokenised
on its event loop, and everybody waits. What SGLang refuses by itself with a sentence is left to it. Each
check here says in a comment what happens without it.

Nothing here imports SGLang: the sidecar asks it for every request, the patch set for those that want
candidate sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from sglang_topp.errors import InvalidInputError
from sglang_topp.stop_regex import MAX_STEPS, search_steps

__all__ = ["GRAMMARS", "Model", "check_sampling_params", "check_token_ids", "overlong_param", "overlong_text"]

_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1

# The largest bias, either way, whose quotient with the smallest temperature (1e-6) is finite in float32.
_MAX_BIAS = 1e30
# A logit over it stays finite in float32, divided by the smallest temperature too.
_MIN_REPETITION_PENALTY = 1e-6

# Of one stop string; more than 32 of them SGLang refuses by itself.
_MAX_STOP_CHARS = 1024
_MAX_GRAMMAR_CHARS = 32768
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""The sampling parameters that constrain an answer by a grammar."""

_MAX_DEPTH = 64

# Text that takes up a whole context has some 4 characters a token. Long tokens are runs of blanks and
# dashes; a bound by those would be of no use with a long context.
_MAX_TOKEN_CHARS = 16


@dataclass(frozen=True)
class Model:
    """What a request is checked against, as the engine reports it.

    Attributes:
        vocab_size: rows of the embedding and of the LM head, `vocab_size` of the model's configuration:
            what SGLang embeds and scores with. Ids that no token of the tokenizer has may be among them.
        context_length: tokens, prompt and answer together.
        max_token_chars: characters of the tokenizer's longest token.
    """

    vocab_size: int
    context_length: int
    max_token_chars: int

    @classmethod
    def from_record(cls, record: Any) -> Model | None:
        """The `model` that `GET /server_info` shows; None where it is not one."""
        names = ("vocab_size", "context_length", "max_token_chars")
        sizes: dict[str, Any] = {}
        if isinstance(record, Mapping):
            sizes = {name: record.get(name) for name in names}
        if not sizes or any(type(size) is not int or size < 1 for size in sizes.values()):
            return None
        return cls(**sizes)

    @property
    def max_text_chars(self) -> int:
        """Characters of the longest text that is taken as a prompt."""
        return self.context_length * min(self.max_token_chars, _MAX_TOKEN_CHARS)


def check_token_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Check that every one of `ids` is a token of the vocabulary.

    An id beyond it is an IndexError in the embedding, and the scheduler's end.

    Args:
        name: the field, for the sentence.
        ids: integers; a list, or an array.
        vocab_size: ids go from 0 to below it.

    Raises:
        InvalidInputError: the first that is not one, by its position.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # a ragged nesting
        array = np.array(None)
    if array.ndim == 1 and array.dtype.kind in "iu":
        wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
        at = int(wrong[0]) if len(wrong) else None
    else:  # integers beyond 64 bits, or what is none
        at = next((i for i, one in enumerate(ids) if type(one) is not int or not 0 <= one < vocab_size), None)
    if at is not None:
        raise InvalidInputError(
            f"{name}: got token id {_shown(ids[at])} at position {at},"
            f" expected 0 to {vocab_size - 1}, the model's vocabulary"
        )


def overlong_text(name: str, text: str, model: Model) -> str | None:
    """The sentence about a prompt's text that is longer than `Model.max_text_chars`, or None.

    SGLang tokenises on its event loop, some megabytes a second, before it looks at the length.
    """
    if len(text) <= model.max_text_chars:
        return None
    return (
        f"{name}: got a text of {len(text)} characters, expected at most {model.max_text_chars} for a context"
        f" of {model.context_length} tokens; a longer one goes as token ids"
    )


def overlong_param(name: str, params: Mapping[str, Any]) -> str | None:
    """The sentence about a text among sampling parameters that is longer than SGLang can bear, or None.

    A stop string is tokenised on the event loop and compared with the answer's end after every token; a
    grammar is compiled in a thread of the scheduler that nobody can stop, for minutes.
    """
    for at, stop in enumerate(_texts(params.get("stop"))):
        if len(stop) > _MAX_STOP_CHARS:
            return (
                f"{name}.stop: got a stop string of {len(stop)} characters at position {at},"
                f" expected at most {_MAX_STOP_CHARS}"
            )
    for key in GRAMMARS:
        grammar = params.get(key)
        if isinstance(grammar, str) and len(grammar) > _MAX_GRAMMAR_CHARS:
            return f"{name}.{key}: got {len(grammar)} characters, expected at most {_MAX_GRAMMAR_CHARS}"
    return None


def check_sampling_params(name: str, params: Mapping[str, Any], model: Model) -> None:
    """Check one prompt's sampling parameters; those that SGLang refuses by itself are left to it.

    Args:
        name: of the parameters, for the sentence.
        params: by SGLang's names; an unknown one is SGLang's to refuse.
        model: what they are checked against.

    Raises:
        InvalidInputError: the sentence names the parameter, what it got and what it takes.
    """
    for problem in _problems(params, model):
        raise InvalidInputError(f"{name}.{problem}")


def _problems(params: Mapping[str, Any], model: Model) -> Iterator[str]:
    for key, value in params.items():
        # msgpack cannot carry it, or the scheduler cannot unpack it, and dies.
        if _is_int(value) and not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
            yield f"{key}: got {_shown(value)}, expected an integer of 64 bits"
    # Goes into an int32 tensor.
    top_k, penalty = params.get("top_k"), params.get("repetition_penalty")
    if _is_int(top_k) and top_k > _MAX_INT32:
        yield f"top_k: got {top_k}, expected at most {_MAX_INT32}; -1 is no limit"
    # Makes logits infinite, the probabilities NaN, and drawing from them an error.
    if _is_number(penalty) and 0 < penalty < _MIN_REPETITION_PENALTY:
        yield f"repetition_penalty: got {penalty}, expected {_MIN_REPETITION_PENALTY} to 2"
    # It is pickled on the way, which takes no more than some hundred levels: a bare 500.
    if _nests_beyond(params.get("custom_params"), _MAX_DEPTH):
        yield f"custom_params: got more than {_MAX_DEPTH} levels of nesting, expected fewer"
    # SGLang's HTTP side knows it, its sampling parameters do not: a bare 500.
    if "choice" in params:
        yield "choice: SGLang does not take it; say the same with regex"
    yield from _bias_problems(params.get("logit_bias"), model.vocab_size)
    yield from _stop_problems(params, model)


def _bias_problems(bias: Any, vocab_size: int) -> Iterator[str]:
    if not isinstance(bias, Mapping):
        return
    for key, value in bias.items():
        digits = str(key)
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20) or int(digits) >= vocab_size:
            expected = f"expected 0 to {vocab_size - 1}, the model's vocabulary"
            yield f"logit_bias: got token id {_shown(key)}, {expected}"
        # Beyond float32 it is infinite, and the probabilities NaN.
        if _is_number(value) and not -_MAX_BIAS <= value <= _MAX_BIAS:
            yield f"logit_bias: got {_shown(value)} for token {key}, expected {-_MAX_BIAS:g} to {_MAX_BIAS:g}"


def _stop_problems(params: Mapping[str, Any], model: Model) -> Iterator[str]:
    stop_ids = params.get("stop_token_ids")
    if isinstance(stop_ids, Sequence) and not isinstance(stop_ids, str):
        # With `min_new_tokens` they index a row of logits; without, they are not looked up.
        try:
            check_token_ids("stop_token_ids", stop_ids, model.vocab_size)
        except InvalidInputError as error:
            yield str(error)
    minimum = params.get("min_new_tokens")
    if _is_int(minimum) and minimum > 0:
        # It forbids every stop id. Where nothing else is left to draw, the probabilities are NaN.
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
    except re.error as error:  # which SGLang answers with a bare 500
        yield f"stop_regex: got {_shown(params['stop_regex'])}, which is no regular expression: {error}"
        return
    if steps > MAX_STEPS:
        yield (
            f"stop_regex: got {_shown(params['stop_regex'])}: looking for it in an answer of"
            f" {model.context_length} tokens may take {steps:.0e} steps after every token, expected at most"
            f" {MAX_STEPS:.0e}; bound its repetitions, as in [a-z]{{1,20}}, and leave none inside another"
        )


def _texts(value: Any) -> list[str]:
    """The strings of a parameter that takes one, or a list of them."""
    given = value if isinstance(value, list) else [value]
    return [one for one in given if isinstance(one, str)]


def _nests_beyond(value: Any, depth: int) -> bool:
    """Whether lists and objects stand in each other more than `depth` deep."""
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


def _shown(value: Any) -> str:
    """A value in a sentence: short, however long it is."""
    try:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    except ValueError:  # more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
