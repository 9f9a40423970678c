"""SGLang's limits, for sidecar, client, and plugin: the requests that end it, and those that it can resume.

SGLang 0.5.23 accepts some values that crash its scheduler, such as an id beyond the vocabulary, or a logit
bias that makes probabilities NaN. A scheduler crash ends the service for every caller. Other values block
SGLang: all other requests wait while SGLang tokenizes a long text, or searches an answer for a slow stop
regex. `check_token_ids`, `check_sampling_params`, `overlong_text`, and `overlong_param` find these values. If
SGLang refuses a value by itself, they check it only if SGLang would answer with status 500 and give no
reason. The sidecar checks every request, and the plugin the requests for candidate sets.

After each token, SGLang runs `re.search` for each stop regex over the end of the answer, in the scheduler,
while all other requests wait. Python's `re` backtracks: the search time of `(.*)*x` is exponential in the
answer's length. A stop regex must therefore follow four rules:

1. Every quantifier has an upper bound: `?`, `{n}`, or `{m,n}`. The quantifiers `*`, `+`, and `{m,}` are
   refused.
2. A quantifier may repeat only a character, a character class, or an escape. A quantifier may make a group
   optional, `(...)?`, but must not repeat the group.
3. The regex has no backreferences, and no verbose syntax (`(?x)`).
4. After each token, the searches for all stop regexes of a request take at most `MAX_STEPS` steps in total.

A request that resumes an interrupted answer sends the answer's tokens at the end of its prompt. Most sampling
parameters have the same effect there, but penalties and grammars do not: SGLang updates their state with each
token that it generates, and does not rebuild it from the prompt. Every field of SGLang's `SamplingParams` is
in `RESUMABLE_PARAMS`, `NON_RESUMABLE_PARAMS`, or `INTERNAL_PARAMS`; a test compares them with the installed
SGLang release.

The sidecar may run where SGLang is not installed, so this module does not import SGLang.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np

from sglang_topp.errors import InvalidInputError, describe

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
        sizes: list[Any] = [
            record.get(one.name) if isinstance(record, Mapping) else None for one in fields(cls)
        ]
        return cls(*sizes) if all(type(size) is int and size > 0 for size in sizes) else None

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
    values = ids.tolist() if isinstance(ids, np.ndarray) else ids
    if set(map(type, values)) <= {int} and 0 <= min(values, default=0) <= max(values, default=0) < vocab_size:
        return
    for at, one in enumerate(values):
        if type(one) is bool or not isinstance(one, int | np.integer) or not 0 <= one < vocab_size:
            raise InvalidInputError(
                f"{name}: got token id {describe(one)} at position {at},"
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
    limits = dict.fromkeys(GRAMMARS, _MAX_GRAMMAR_CHARS)
    for key, most in {"stop": _MAX_STOP_CHARS, "stop_regex": _MAX_STOP_CHARS, **limits}.items():
        for at, text in enumerate(_texts(params.get(key))):
            if len(text) > most:
                where = "" if key in GRAMMARS else f" at position {at}"
                return f"{name}.{key}: got {len(text)} characters{where}, expected at most {most}"
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


MAX_STEPS = 2e7
"""The maximum total of `search_steps` for all stop regexes of a request.

After each token, SGLang searches for all stop regexes of the request. On 4,000 random patterns within this
limit, Python's `re` took at most 11 ns per step, which is 0.2 s for `MAX_STEPS` steps.
"""

_TOKEN = re.compile(
    r"""
      (?P<nothing> \(\?\#[^)]*\) | \(\?[a-zA-Z]+\) )  # a comment, or flags
    | (?P<backreference> \\[1-9] | \(\?P= )
    | (?P<open> \( (?: \? (?: [a-zA-Z-]*: | <?[=!] | > | P<\w+> | \(\w+\) ) )? )
    | (?P<close> \) )
    | (?P<bar> \| )
    | (?P<repeat> (?: [*+?] | \{(?!\}) (?P<low>\d*) (?P<comma>,?) (?P<high>\d*) \} ) [?+]? )
    | \[\^?\]? (?: \\. | [^\\\]] )* \]  # a class
    | \\. | .
    """,
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=256)  # the requests of a batch often share one stop regex
def search_steps(pattern: str, num_chars: int) -> float:
    """Return an upper bound on the steps of one `re.search` for `pattern`.

    A step is one try to match one element of a regex, such as a character or a group, at one position in the
    text. A character with a quantifier `{m,n}` can match in n - m + 1 ways, and a group with k alternatives
    in k ways. From one start position, the search can therefore reach an element several times, at most the
    product of the ways of all earlier elements. Each time, the element takes one step, or up to n steps with
    a quantifier `{m,n}`. The bound also counts combinations of matches that cannot occur together, so some
    harmless regexes are refused. The bound is infinity if the pattern breaks one of rules 1 to 3 in the
    module's docstring.

    Args:
        pattern: a regular expression in the syntax of Python's `re`.
        num_chars: the length of the longest text to search.

    Raises:
        re.error: the pattern is not valid.
    """
    try:
        is_verbose = re.compile(pattern).flags & re.VERBOSE or re.search(r"\(\?\w*x", pattern)
    except (RecursionError, OverflowError):
        return math.inf
    if is_verbose:
        return math.inf
    # `ways` counts the ways to match the pattern up to `token`, from one start position. `steps` counts the
    # steps that the regex engine needs to try all these ways.
    ways, steps = 1.0, 1.0
    alternatives, after_group = [1], False
    for token in _TOKEN.finditer(pattern):
        low, high = 1.0, 1.0
        if token["nothing"]:
            continue
        if token["backreference"]:
            return math.inf
        if token["open"]:
            alternatives.append(1)
        elif token["bar"]:
            alternatives[-1] += 1
        elif token["close"]:
            ways *= alternatives.pop()
        elif token["repeat"]:
            low, high = _counts(token)
            if high == math.inf or (high > 1 and after_group):
                return math.inf
            low, high = min(low, num_chars), min(high, num_chars)
        steps += ways * max(1, high)
        ways *= high - low + 1
        after_group = bool(token["close"])
    return (num_chars + 1) * (steps + ways * alternatives[0])


def _counts(repeat: re.Match[str]) -> tuple[float, float]:
    """Return the smallest and the largest number of repetitions that a quantifier allows."""
    if repeat["low"] is None:
        return 0, 1 if repeat["repeat"][0] == "?" else math.inf
    low = int(repeat["low"] or 0)
    if not repeat["comma"]:
        return low, low
    return low, int(repeat["high"]) if repeat["high"] else math.inf


RESUMED = "resumed_tokens"
"""The request field that says how many tokens at the end of the prompt belong to the earlier answer."""

# Parameters that change each position's distribution. Their effect does not depend on which request generated
# the tokens before the position. The sampler's random noise depends on the seed and on the token's position,
# which is counted from the prompt's first token.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logit_bias", "sampling_seed")
# Parameters that control where an answer ends. The plugin makes SGLang search for stop strings and patterns
# also in the tokens that earlier requests generated. The client reduces `max_new_tokens` and `min_new_tokens`
# by the number of these tokens.
_STOPPING = ("stop", "stop_token_ids", "stop_regex", "ignore_eos", "max_new_tokens", "min_new_tokens")
# Parameters that control how SGLang writes and sends an answer. The client resumes each of the n samples in a
# separate request.
_WRITING = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "n")

RESUMABLE_PARAMS = frozenset(_SAMPLING + _STOPPING + _WRITING)
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

_PARSED_STOPS = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len")

INTERNAL_PARAMS = frozenset((*_PARSED_STOPS, "is_normalized", "ebnf_full_assistant"))
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
