"""Work: what the routes that ask the engine for samples differ in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_topp.engine_request import Model
from sglang_topp_client import Rollout, Score, packed_record, score_record
from sglang_topp_server.admission import check_admissible, check_scores
from sglang_topp_server.limits import Limits
from sglang_topp_server.schema import SampleBody, parse_request
from sglang_topp_server.score_schema import parse_scores

__all__ = ["ROLLOUTS", "SCORES", "Work", "place_of"]


@dataclass(frozen=True)
class Work:
    """One route's.

    Attributes:
        name: of the list in a whole answer, and of the count that closes a stream.
        one: an item of it, in words.
        index: the field that tells which prompt a failure is of.
        media_type: of a stream of frames.
        parse: reads a body.
        check: whether the engine survives what was read; its last argument is whether it takes grammars.
    """

    name: str
    one: str
    index: str
    media_type: str
    parse: Callable[[bytes | bytearray, Limits], SampleBody]
    check: Callable[[Any, Model, bool], None]


ROLLOUTS = Work(
    name="rollouts",
    one="sample",
    index="prompt_index",
    media_type=packed_record.MEDIA_TYPE,
    parse=parse_request,
    check=lambda request, model, takes_grammars: check_admissible(
        request, model, takes_grammars=takes_grammars
    ),
)
SCORES = Work(
    name="scores",
    one="sequence",
    index="sequence_index",
    media_type=score_record.MEDIA_TYPE,
    parse=parse_scores,
    check=lambda request, model, _: check_scores(request, model),
)


def place_of(sample: Rollout | Score) -> tuple[int, int]:
    """Which one it is of its request: the prompt's index, and the sample's."""
    if isinstance(sample, Score):
        return sample.sequence_index, 0
    return sample.prompt_index, sample.sample_index
