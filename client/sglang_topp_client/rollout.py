"""Rollout and Score, the client's results: each field with its type, unit, and meaning.

This is the one place that declares a field. The JSON record and the binary frame (`wire/records.py`), the
Parquet columns (`storage/parquet_columns.py`), the sidecar's OpenAPI models, and the reference page are made
from it: they say how each type of field is written, and take the fields from `FIELDS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import chain, repeat
from math import prod
from operator import itemgetter
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError, WireError, describe
from sglang_topp.formats.field_parsing import renaming_errors
from sglang_topp_client.rollout_html import rollout_to_html
from sglang_topp_client.value_checks import as_token_ids

ABORT, EXTENDED = "abort", "extended"
"""The finish reasons of a sample that the engine aborted, and of a sample extended by `Rollout.extend`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""Which tokens a candidate set holds.

With `DISTRIBUTION`, a token is in the set if all more likely tokens have a total probability below the
threshold `top_logprobs_p`. With `SAMPLER`, a set holds all tokens that the engine's sampler could draw.
"""

TokenIds: TypeAlias = NDArray[np.int32]
Logprobs: TypeAlias = NDArray[np.float32]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
Source: TypeAlias = Annotated[str, Meta(pattern=f"^({DISTRIBUTION}|{SAMPLER})$")]
Probability: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
WeightSpans: TypeAlias = tuple[tuple[str, Count], ...]
"""One pair `(weight version, number of tokens)` for each run of tokens of one version, in the tokens'
order."""
TokenRanges: TypeAlias = tuple[tuple[Count, Count], ...]
"""Pairs `(start, end)` of positions, ascending and without overlap."""


@dataclass(frozen=True, eq=False)
class TokenField:
    """Values that the engine recorded for consecutive tokens of prompt and output, such as their experts."""

    values: NDArray[np.unsignedinteger[Any]]
    """uint8, uint16, or uint32 [n, ...], the smallest that holds the values. The row at index i belongs to
    the position `start + i` of prompt and output."""
    start: int
    """The position of the first row, from 0."""

    @classmethod
    def of(cls, values: NDArray[np.integer[Any]], start: int) -> TokenField:
        """Store values of any integer type in the smallest unsigned one.

        Raises:
            InvalidInputError: a value is negative, or does not fit uint32.
        """
        least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
        if least < 0 or most >= 1 << 32:
            raise InvalidInputError(f"got values from {least} to {most}, expected values that fit uint32")
        return cls(values.astype(np.min_scalar_type(most)), start)

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.values)

    def to_bytes(self) -> bytes:
        """Return the values as little-endian integers in C order."""
        return self.values.astype(self.values.dtype.newbyteorder("<")).tobytes()

    def joined(self, rest: TokenField) -> TokenField:
        """Return these rows and the `rest`, which begins at `end`."""
        if rest.start != self.end:
            raise WireError(
                "token_fields", f"got rows from {rest.start} on, expected them from {self.end} on"
            )
        if not len(self.values):
            return TokenField(rest.values, self.start)
        return (
            TokenField(np.concatenate([self.values, rest.values]), self.start) if len(rest.values) else self
        )


TokenFields: TypeAlias = Mapping[str, TokenField]
ReturnField: TypeAlias = Literal["routed_experts"]
"""A field of tokens that the engine can return."""
RETURN_FIELDS: tuple[str, ...] = get_args(ReturnField)


@dataclass(frozen=True, eq=False)
class Rollout:
    """A sample that an engine generated from a prompt, and the candidate sets of the sample's tokens.

    T is the number of output tokens: the tokens that the engine generated, and those that `extend` appended.
    P is the number of prompt tokens.
    """

    prompt_index: int
    """The index of the prompt in the caller's request, from 0."""
    sample_index: int
    """The index of the sample among the prompt's `n` samples, from 0."""
    request_id: str
    """The engine's id of the request."""
    prompt_ids: TokenIds = field(metadata={"count": "prompt_tokens"})
    """int32 [P], the prompt's token ids as the engine saw them."""
    output_ids: TokenIds = field(metadata={"count": "completion_tokens"})
    """int32 [T], the generated token ids, and the token ids that `extend` appended."""
    text: str
    """The generated text as the engine detokenized it. If `extend` appended tokens, `text` covers only the
    turn after the last appended token."""
    logprobs: Logprobs
    """float32 [T], natural log-prob of each generated token over the full vocabulary, and 0 for each token
    that `extend` appended."""
    candidates: CandidateSets | None
    """The candidate set of each token, T sets, or None if the request did not ask for sets. A token that
    `extend` appended has an empty set."""
    finish_reason: str
    """`"stop"` or `"length"` if the engine finished the sample, `"abort"` if the sample was interrupted and
    the request had `on_abort` or `on_timeout` `"return"`, or `"extended"` if `extend` appended the last
    tokens."""
    weight_version: str | None
    """The weight version of the last token, as the engine reports it, or None if the engine reports no
    version."""
    cached_tokens: int
    """How many prompt tokens came from the engine's prefix cache. For a resumed sample, `cached_tokens`
    covers only the first request that generated tokens."""
    latency_s: Seconds
    """Seconds from the engine's receipt of the request to the last token. For a resumed sample, the latencies
    of all its requests are summed, without the time between the requests."""
    top_logprobs_source: Source | None = None
    """The kind of the sets, `"distribution"` (the nucleus at the threshold `top_logprobs_p`) or `"sampler"`
    (the tokens that the sampler could draw). None for a rollout without sets, and for a rollout whose sets
    come from another inference engine."""
    weight_spans: WeightSpans | None = None
    """Pairs `(version, number of tokens)` in output order, one for each run of tokens with the same weight
    version. The numbers add up to T. Tokens that `extend` appended have the version "". The generated tokens
    have several versions if weights were pushed while the engine was paused, or before the sample was
    resumed. A rollout without sets has None instead of spans, because SGLang's own field `weight_versions`
    can be off by one token for a request without sets."""
    routing_key: str = ""
    """A key that the client chose for the sample's prompt. The client sends the key as the header
    `X-SMG-Routing-Key` of HTTP requests that hold only this prompt. Gateways send requests with the same key
    to the same worker. The key's suffix identifies the server that generated the sample, so that `resume` can
    use that server's prefix cache. If the key is unknown, `routing_key` is an empty string."""
    top_logprobs_p: Probability | None = None
    """The requested threshold p of the sets, or None if no threshold was requested."""
    sampling_params: Mapping[str, Any] | None = None
    """The sampling parameters that were sent, without `n`, or None if unknown. For a resumed sample, this
    attribute holds the parameters given to `resume`."""
    appended_spans: TokenRanges = ()
    """`((start, end), ...)`, the ranges of `output_ids` that `extend` appended."""
    token_fields: TokenFields = field(default_factory=dict)
    """The requested `return_fields` by name. `"routed_experts"` has the experts [P + T - 1, layers, experts
    per token]: row i is the routing of position i of prompt and output, which scored the token at i + 1,
    under the weights of that token. Tokens that `extend` appended get their rows with the next turn."""

    @property
    def weight_versions(self) -> tuple[str, ...] | None:
        """The versions of the weights that generated the tokens and their sets, one version per token.

        This property is None if `weight_spans` is None.
        """
        if self.weight_spans is None:
            return None
        return tuple(chain.from_iterable(repeat(version, count) for version, count in self.weight_spans))

    @property
    def loss_mask(self) -> NDArray[np.int8]:
        """int8 [T]: 1 for generated tokens, 0 for tokens that `extend` appended.

        Count the ones with `loss_mask.sum()`. Python's built-in `sum` overflows above 127.

        The mask is also 0 for a generated token with an empty candidate set. Pass the mask to
        `sglang_topp.batch.collate_rl`, which collates samples into a training batch.
        """
        mask = np.ones(len(self.output_ids), np.int8)
        for start, end in self.appended_spans:
            mask[start:end] = 0
        if self.candidates is not None:
            mask[self.candidates.sizes == 0] = 0
        return mask

    @property
    def turn_start(self) -> int:
        """The index of the last turn's first token in `output_ids`.

        If `extend` has appended no tokens, the index is 0. Otherwise, the index is one past the last appended
        token.
        """
        return self.appended_spans[-1][1] if self.appended_spans else 0

    def extend(self, token_ids: Sequence[int] | NDArray[np.integer]) -> Rollout:
        """Return a copy of this rollout with the token ids of a tool or an environment appended.

        Appended tokens get empty candidate sets, the log-prob 0, and the weight version "". Replay
        (`sglang_topp.replay`) and the loss skip appended tokens. To generate the next turn, pass the copy to
        the client's `resume`. `max_new_tokens`, stop strings, and `text` apply only to the turn that `resume`
        generates.

        Args:
            token_ids: one or more token ids.

        Raises:
            InvalidInputError: the argument `token_ids` is empty, or holds anything other than token ids.
        """
        ids = np.array(as_token_ids("token_ids", token_ids), np.int32)
        start, end = len(self.output_ids), len(self.output_ids) + len(ids)
        before = self.appended_spans
        if before and before[-1][1] == start:
            (start, _), before = before[-1], before[:-1]
        candidates, spans = self.candidates, self.weight_spans
        if candidates is not None:
            nothing = np.empty(0, np.float32) if candidates.has_logprobs else None
            empty = CandidateSets(np.empty(0, np.int32), nothing, np.zeros(len(ids) + 1, np.int64), ids)
            candidates = CandidateSets.concat([candidates, empty])
        return replace(
            self,
            output_ids=np.concatenate([self.output_ids, ids]),
            logprobs=np.concatenate([self.logprobs, np.zeros(len(ids), np.float32)]),
            candidates=candidates,
            text="",
            finish_reason=EXTENDED,
            weight_spans=None if spans is None else _join_spans(spans, (("", len(ids)),)),
            appended_spans=(*before, (start, end)),
        )

    def continue_with(self, prompt_ids: Sequence[int] | NDArray[np.integer]) -> Rollout | None:
        """Return this rollout, extended to the prompt of a later turn, or None if the prompt is not its
        continuation.

        The prompt continues the rollout if it begins with `prompt_ids` and `output_ids`, token by token; the
        tokens after them are appended as by `extend`. Tokens that were tokenized again often differ, and
        training on them would put log-probs on tokens that the engine never drew. Continue a rollout once:
        the continuation holds all of its tokens, and two continuations would train them twice.

        Args:
            prompt_ids: the token ids of the whole prompt.

        Raises:
            InvalidInputError: the argument `prompt_ids` is empty, or holds anything other than token ids.
        """
        ids = np.array(as_token_ids("prompt_ids", prompt_ids), np.int32)
        known = np.concatenate([self.prompt_ids, self.output_ids])
        if not np.array_equal(ids[: len(known)], known):
            return None
        return self.extend(ids[len(known) :]) if len(ids) > len(known) else self

    @property
    def masked_logprobs(self) -> NDArray[np.float32]:
        """float32 [T]: each token's log-prob, renormalized over its candidate set.

        This property returns `candidates.masked_logprobs`.
        """
        if self.candidates is None:
            raise InvalidInputError("this rollout has no candidate sets: none were requested")
        return self.candidates.masked_logprobs

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show for this rollout; see `rollout_to_html`."""
        return rollout_to_html(self)


@dataclass(frozen=True, eq=False)
class Score:
    """One scored sequence of L tokens. The tokens at positions `start` to L - 1 have log-probs.

    Each log-prob comes from the model's own distribution at temperature 1, given all earlier tokens.
    Penalties, logit bias, and grammars do not change the log-probs, even if the sequence was sampled with
    them.
    """

    sequence_index: int
    """The index of the sequence in the request, from 0."""
    request_id: str
    """The engine's id of the request."""
    token_ids: TokenIds = field(metadata={"count": "num_tokens"})
    """int32 [L], the token ids of the whole sequence."""
    start: int
    """The first scored position, 1 to L, where L means that no position is scored."""
    logprobs: Logprobs
    """float32 [L - start], the natural log-prob of each token from `start` on, given all earlier tokens. The
    log-probs are normalized over the full vocabulary."""
    candidates: CandidateSets | None
    """The L - start candidate sets of the scored positions, or None if the request did not ask for sets. In
    the set of position t, the sampled token is `token_ids[t]`."""
    weight_version: str | None
    """The version of the weights that scored every position, as the engine reports it. SGLang before 0.5.19
    reports the version that the engine has at the end of the request. If weights are pushed between the
    scoring and the end of the request, these releases can report the version of the new weights."""
    cached_tokens: int
    """How many tokens before the first scored position came from the engine's prefix cache."""


class Field(NamedTuple):
    """A field of a result, as its class declares it.

    Attributes:
        name: the attribute's name.
        type: the attribute's type, without None.
        is_optional: whether the value may be None.
        default: the default value, or `dataclasses.MISSING`. Do not change it.
        count_name: for token ids, the name under which a record states their number; otherwise "".
    """

    name: str
    type: Any
    is_optional: bool
    default: Any
    count_name: str


def _fields_of(result: type[Rollout | Score]) -> tuple[Field, ...]:
    hints = get_type_hints(result, include_extras=True)
    declared = []
    for one in fields(result):
        kinds = get_args(hints[one.name])
        is_optional = NoneType in kinds
        kind = kinds[0] if is_optional else hints[one.name]
        kind = Count if kind is int else kind
        default = one.default if one.default_factory is MISSING else one.default_factory()
        declared.append(Field(one.name, kind, is_optional, default, one.metadata.get("count", "")))
    return tuple(declared)


FIELDS: dict[type[Rollout | Score], tuple[Field, ...]] = {one: _fields_of(one) for one in (Rollout, Score)}
"""The fields that each result's class declares, in its order."""


def scored_ids(result: Rollout | Score) -> TokenIds:
    """Return the token ids that have log-probs and sets: int32 [T] of a rollout, or [L - start] of a
    score."""
    return result.token_ids[result.start :] if isinstance(result, Score) else result.output_ids


def find_problems(result: Rollout | Score) -> Iterator[tuple[str, str]]:
    """Yield `(field, problem)` for each field whose length or positions contradict the token ids."""
    if isinstance(result, Score) and not 1 <= result.start <= len(result.token_ids):
        yield "start", f"got {result.start}, expected 1 to {len(result.token_ids)}, the number of token_ids"
    name = "positions" if isinstance(result, Score) else "output_ids"
    num_tokens = len(scored_ids(result))
    if len(result.logprobs) != num_tokens:
        yield "logprobs", f"got {len(result.logprobs)} for {num_tokens} {name}"
    if result.candidates is not None and len(result.candidates) != num_tokens:
        yield "candidates", f"got {len(result.candidates)} positions for {num_tokens} {name}"
    if isinstance(result, Score):
        return
    spans, end = result.weight_spans, 0
    if spans is not None and sum(map(itemgetter(1), spans)) != num_tokens:
        yield "weight_spans", f"got {describe(spans)} for {num_tokens} output_ids"
    for start, after in result.appended_spans:
        if not end <= start < after <= num_tokens:
            yield "appended_spans", f"got {start} to {after}, expected a range from {end} to {num_tokens}"
        end = after
    most = max(len(result.prompt_ids) + num_tokens - 1, 0)
    for name, one in result.token_fields.items():
        # The rows of appended tokens, and of a sample without tokens, are still to come.
        if one.end > most or (one.end < most and result.turn_start < num_tokens):
            yield "token_fields", f"{name}: got rows up to position {one.end}, expected {most}"


def check_result(result: Rollout | Score, *, p: float | None = None, may_be_extended: bool = False) -> None:
    """Raise WireError if a field of an answer contradicts another.

    Each set must hold its sampled token, with exactly the reported log-prob: the engine computes the sets and
    the tokens' log-probs from the same float32 numbers. This also rejects sets of another position or
    request, and log-probs that were computed at another temperature.

    Args:
        result: the decoded answer.
        p: the threshold that the sets must reach, if one was requested. `CandidateSets.check_kept_mass` says
            how exactly.
        may_be_extended: whether to accept tokens that `Rollout.extend` appended. They have empty sets, and
            the log-prob 0.
    """
    for name, problem in find_problems(result):
        raise WireError("weight_versions" if name == "weight_spans" else name, problem)
    logprobs, sets = result.logprobs, result.candidates
    if np.isnan(logprobs).any():
        raise WireError("logprobs", f"got NaN at position {int(np.isnan(logprobs).argmax())}")
    if sets is not None:
        ids = scored_ids(result)
        if len(wrong := np.flatnonzero(sets.sampled_ids != ids)):
            t = int(wrong[0])
            raise WireError(
                "candidates", f"got sampled token {sets.sampled_ids[t]} at position {t}, expected {ids[t]}"
            )
        if not may_be_extended and len(empty := np.flatnonzero(sets.sizes == 0)):
            raise MissingCandidateSetsError("candidates", f"no candidate set at position {int(empty[0])}")
        if not sets.has_logprobs:
            raise WireError("candidates", "got sets without log-probs")
        if len(wrong := np.flatnonzero(sets.sampled_logprobs != logprobs)):
            t = int(wrong[0])
            raise WireError(
                "candidates",
                f"got log-prob {sets.sampled_logprobs[t]} of the sampled token at position {t}, expected"
                f" {logprobs[t]}, as the engine reports ({len(wrong)} of {len(logprobs)} positions differ)",
            )
        if p is not None:
            with renaming_errors({"logprobs": "candidates"}):
                sets.check_kept_mass(p)
    if isinstance(result, Rollout) and result.appended_spans and not may_be_extended:
        raise WireError(
            "appended_spans", f"got {describe(result.appended_spans)}, expected only generated tokens"
        )


@dataclass(frozen=True)
class TokenFieldLayout:
    """The `shape` of a field's values, the position of the first row (`start`), and the `dtype`."""

    shape: Annotated[list[Count], Meta(min_length=1)]
    start: Count
    dtype: Literal["uint8", "uint16", "uint32"]


@dataclass(frozen=True)
class TokenFieldRecord(TokenFieldLayout):
    """A field of tokens in JSON. `data` is base64 of the values, little-endian and in C order."""

    data: str


def layout_of(one: TokenField) -> dict[str, Any]:
    """Return the fields of a `TokenFieldLayout`."""
    return {"shape": list(one.values.shape), "start": one.start, "dtype": one.values.dtype.name}


def read_array(raw: bytes, shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """Return little-endian integers in C order as an array.

    Raises:
        InvalidInputError: `shape` is empty, or `raw` has another size.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    if not shape or len(raw) != prod(shape) * kind.itemsize:
        raise InvalidInputError(f"got {len(raw)} bytes for {dtype} {list(shape)}")
    return np.frombuffer(raw, kind).astype(kind.newbyteorder("="), copy=False).reshape(shape)


@dataclass(frozen=True)
class WeightSpan:
    """The version of the weights that generated the tokens from `start` up to, but not including, `end`."""

    version: str
    start: Count
    end: Count


def write_spans(spans: WeightSpans) -> list[dict[str, Any]]:
    """Return spans in the form of SGLang's field `weight_versions`."""
    objects = []
    start = 0
    for version, count in spans:
        objects.append({"version": version, "start": start, "end": start + count})
        start += count
    return objects


def read_spans(field: str, objects: Sequence[WeightSpan]) -> WeightSpans:
    """Return the spans in the form of SGLang's field `weight_versions`, without those of no token.

    Raises:
        WireError: the spans do not begin at token 0, or one does not begin at the end of the span before.
    """
    spans, end = [], 0
    for one in objects:
        if one.start != end or one.end < end:
            raise WireError(field, f"got tokens {one.start} to {one.end}, expected those from {end} on")
        if one.end > end:
            spans.append((one.version, one.end - end))
        end = one.end
    return tuple(spans)


def _join_spans(first: WeightSpans, second: WeightSpans) -> WeightSpans:
    """Concatenate the weight spans of two consecutive parts of a rollout.

    If the first part's last span and the second part's first span have the same version, merge the two spans.
    """
    if first and second and first[-1][0] == second[0][0]:
        (version, count), *rest = second
        return (*first[:-1], (version, first[-1][1] + count), *rest)
    return (*first, *second)


def join_parts(first: Rollout, rest: Rollout) -> Rollout:
    """Return the rollout that consists of `first` and its continuation `rest`.

    Raises:
        WireError: the prompt of `rest` is not the prompt of `first` followed by the output of `first`, or
            only one of the two parts has candidate sets.
    """
    if rest.prompt_ids.tolist() != [*first.prompt_ids.tolist(), *first.output_ids.tolist()]:
        raise WireError("prompt_ids", "got other ids than those of the rollout that it continues")
    had_tokens, has_more = len(first.output_ids) > 0, len(rest.output_ids) > 0
    return replace(
        first,
        request_id=rest.request_id,
        output_ids=np.concatenate([first.output_ids, rest.output_ids]),
        # `rest.text` also covers the tokens in the last turn of `first`. The client told the engine, in the
        # request field `resumed_tokens`, how many such tokens are at the end of the prompt of `rest`.
        text=rest.text if has_more else first.text,
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        candidates=_joined_sets(first, rest),
        finish_reason=rest.finish_reason,
        weight_version=rest.weight_version if has_more or not had_tokens else first.weight_version,
        cached_tokens=first.cached_tokens if had_tokens else min(rest.cached_tokens, len(first.prompt_ids)),
        latency_s=first.latency_s + rest.latency_s,
        top_logprobs_source=first.top_logprobs_source if had_tokens else rest.top_logprobs_source,
        weight_spans=_joined_spans(first, rest),
        token_fields=_joined_fields(first, rest),
        routing_key=rest.routing_key,
    )


def _joined_sets(first: Rollout, rest: Rollout) -> CandidateSets | None:
    if not len(first.output_ids):
        return rest.candidates
    if first.candidates is None or rest.candidates is None:
        if first.candidates is not rest.candidates:
            raise WireError("candidates", "only one part of the rollout has sets, expected both or neither")
        return None
    return CandidateSets.concat([first.candidates, rest.candidates])


def _joined_spans(first: Rollout, rest: Rollout) -> WeightSpans | None:
    if not len(first.output_ids):
        return rest.weight_spans
    if not len(rest.output_ids):
        return first.weight_spans
    if first.weight_spans is None or rest.weight_spans is None:
        return None
    return _join_spans(first.weight_spans, rest.weight_spans)


def _joined_fields(first: Rollout, rest: Rollout) -> TokenFields:
    if first.token_fields.keys() != rest.token_fields.keys():
        raise WireError(
            "token_fields",
            f"got {[*first.token_fields]} in one part of the rollout and {[*rest.token_fields]} in the next,"
            " expected the same",
        )
    return {name: one.joined(rest.token_fields[name]) for name, one in first.token_fields.items()}
