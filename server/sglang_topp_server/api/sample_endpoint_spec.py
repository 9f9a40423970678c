"""EndpointSpec: the body parser, request check, JSON field names, and media type of one route.

`ROLLOUTS` describes `POST /rollouts`, and `SCORES` describes `POST /scores`. The class `SampleEndpoint`
serves both routes, and takes the route's `EndpointSpec` as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_topp.engine_contract import Model
from sglang_topp_client import Rollout, Score
from sglang_topp_client.wire.records import MEDIA_TYPES
from sglang_topp_server.engine.request_checks import check_rollout_request, check_score_request
from sglang_topp_server.schemas.requests import SampleCall, parse_rollouts, parse_scores
from sglang_topp_server.settings import Limits

__all__ = ["ROLLOUTS", "SCORES", "EndpointSpec", "place_of"]


@dataclass(frozen=True)
class EndpointSpec:
    """The body parser, request check, JSON field names, and media type of one route.

    Attributes:
        name: the JSON field that holds the list of results if the answer is not a stream. In a stream's last
            message, the field holds the number of results.
        result_noun: the singular noun for a result, in error messages.
        index_field: in a stream's error message, the field that holds the index of the failed prompt.
        media_type: the media type of a stream that consists of binary frames.
        parse: a function that parses a request body.
        check: a function that raises an error if the request would crash or block the engine. The arguments
            of `check` are the request, the engine's model, and whether the engine survives a grammar that
            forbids every next token.
    """

    name: str
    result_noun: str
    index_field: str
    media_type: str
    parse: Callable[[bytes | bytearray, Limits], SampleCall[Any]]
    check: Callable[[Any, Model, bool], None]


ROLLOUTS = EndpointSpec(
    name="rollouts",
    result_noun="sample",
    index_field="prompt_index",
    media_type=MEDIA_TYPES[Rollout],
    parse=parse_rollouts,
    check=lambda request, model, survives_grammars: check_rollout_request(
        request, model, survives_grammars=survives_grammars
    ),
)
SCORES = EndpointSpec(
    name="scores",
    result_noun="sequence",
    index_field="sequence_index",
    media_type=MEDIA_TYPES[Score],
    parse=parse_scores,
    check=lambda request, model, _: check_score_request(request, model),
)


def place_of(sample: Rollout | Score) -> tuple[int, int]:
    """Return the index of a sample's prompt, and the sample's index among that prompt's samples.

    For a `Score`, which has no samples, the function returns `(sequence_index, 0)`.
    """
    if isinstance(sample, Score):
        return sample.sequence_index, 0
    return sample.prompt_index, sample.sample_index
