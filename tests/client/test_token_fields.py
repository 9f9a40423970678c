"""What the engine recorded of each token: every encoding restores it, and so does a continuation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client import Rollout, TokenField
from sglang_topp_client.protocols.sglang import SglangExchange
from sglang_topp_client.protocols.sidecar import SidecarExchange
from sglang_topp_client.requests import (
    build_resume_requests,
    build_sample_requests,
    continuation_request,
    empty_rollout,
)
from sglang_topp_client.rollout import join_parts
from sglang_topp_client.wire.records import from_record, to_record
from tests.client import conftest as fakes

NAME = "routed_experts"


def field(num_rows: int, start: int = 0, most: int = 7) -> TokenField:
    random = np.random.default_rng(most)
    values = random.integers(0, most, (num_rows, 2, 3), endpoint=True)
    values.flat[:1] = most
    return TokenField.of(values, start)


@pytest.fixture
def rollout() -> Rollout:
    """Two prompt tokens and four generated tokens."""
    made: Rollout = fakes.sample([5, 6], 0, 4)
    return replace(made, top_logprobs_p=0.9, token_fields={NAME: field(5)})


def fields_of(rollout: Rollout) -> dict[str, Any]:
    return {name: (one.start, one.values.tolist()) for name, one in rollout.token_fields.items()}


@pytest.mark.parametrize(
    ("most", "dtype"),
    [(0, "uint8"), (255, "uint8"), (256, "uint16"), (1 << 16, "uint32"), ((1 << 32) - 1, "uint32")],
)
@pytest.mark.parametrize("start", [0, 3])
def test_every_encoding_is_exact(rollout: Rollout, most: int, dtype: str, start: int) -> None:
    made = replace(rollout, token_fields={NAME: field(5 - start, start, most), "other": field(5)})
    assert made.token_fields[NAME].values.dtype == dtype
    layout = {"shape": [5 - start, 2, 3], "start": start, "dtype": dtype}
    assert to_record(made)["token_fields"][NAME].items() > layout.items()
    first, second = fakes.through_a_file(made, rollout)
    for back in (first, fakes.through_json(made), fakes.through_a_frame(made)):
        assert fakes.bits(back) == fakes.bits(made)
    assert fakes.bits(second) == fakes.bits(rollout)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "AAAA"}, "got 3 bytes for uint8"),
        ({"data": "?"}, "token_fields"),
        ({"shape": []}, "shape"),
        ({"shape": [5, 2, 1 << 62]}, "bytes for uint8"),
        ({"dtype": "int8"}, "dtype: got .*, expected one of 'uint16', 'uint32', 'uint8'"),
        ({"start": -1}, "start"),
        ({"start": 1}, "routed_experts: got rows up to position 6, expected 5"),
    ],
)
def test_a_record_that_contradicts_itself(rollout: Rollout, change: dict[str, Any], words: str) -> None:
    record = to_record(rollout)
    record["token_fields"][NAME] |= change
    with pytest.raises(WireError, match=words):
        from_record(Rollout, record)


@pytest.mark.parametrize("num_rows", [0, 4, 6])
def test_other_than_one_row_per_scored_token_is_an_error(rollout: Rollout, num_rows: int) -> None:
    wrong = replace(rollout, token_fields={NAME: field(num_rows)})
    with pytest.raises(WireError, match="routed_experts: got rows up to position"):
        fakes.through_a_frame(wrong)
    with pytest.raises(InvalidInputError, match="routed_experts: got rows up to position"):
        fakes.through_a_file(wrong)


@pytest.mark.parametrize("values", [np.array([[-1]]), np.array([[1 << 32]])])
def test_values_that_are_no_ids(values: Any) -> None:
    with pytest.raises(InvalidInputError, match="expected values that fit uint32"):
        TokenField.of(values, 0)


def continued(part: Rollout, num_tokens: int, **changes: Any) -> Rollout:
    """Resume a part, and return the join of both as the client makes it."""
    (wanted,), _ = build_resume_requests([part], {"max_new_tokens": 100})
    request = continuation_request(part, wanted, 0)
    assert request.return_fields == (NAME,)
    num_rows = len(request.prompt) + num_tokens - 1 - request.fields_start
    rest = fakes.sample(request.prompt, 0, num_tokens)
    rest = replace(rest, token_fields={NAME: field(num_rows, request.fields_start, 300)}, **changes)
    return join_parts(part, rest)


def test_a_resumed_rollout_keeps_its_rows(rollout: Rollout) -> None:
    part = replace(rollout, finish_reason="abort")
    joined = continued(part, 3).token_fields[NAME]
    assert (joined.start, joined.values.shape, joined.values.dtype) == (0, (8, 2, 3), np.uint16)
    np.testing.assert_array_equal(joined.values[:5], rollout.token_fields[NAME].values)


def test_appended_tokens_get_their_rows_with_the_next_turn(rollout: Rollout) -> None:
    extended = rollout.extend([7, 8, 9])
    back = fakes.through_json(extended, may_be_extended=True)
    assert fields_of(extended) == fields_of(back) == fields_of(rollout)
    joined = continued(extended, 2)
    assert joined.token_fields[NAME].end == len(joined.prompt_ids) + len(joined.output_ids) - 1 == 10


@pytest.mark.parametrize("appends", [False, True])
def test_an_empty_part_takes_the_rows_of_the_rest(appends: bool) -> None:
    (wanted,) = build_sample_requests([[5, 6]], {"max_new_tokens": 9}, 0.9, None, [NAME])
    part = empty_rollout(wanted, 0, "a")
    assert part is not None
    part = part.extend([1, 2]) if appends else part
    joined = continued(part, 4)
    assert joined.token_fields[NAME].start == 0
    assert joined.token_fields[NAME].end == 5 + 2 * appends


def test_one_part_with_and_one_without(rollout: Rollout) -> None:
    for fields, words in (
        ({}, "expected the same"),
        ({NAME: field(1)}, "from 0 on, expected them from 5 on"),
    ):
        rest = fakes.sample([5, 6, *rollout.output_ids.tolist()], 0, 1)
        with pytest.raises(WireError, match=f"token_fields.*{words}"):
            join_parts(rollout, replace(rest, token_fields=fields))
    with pytest.raises(
        InvalidInputError, match=r"return_fields: got .*, expected .*, which rollouts\[0\] has"
    ):
        build_resume_requests([rollout], {"max_new_tokens": 9}, return_fields=[])


def test_the_requests_name_them() -> None:
    (wanted,) = build_sample_requests([[5, 6]], {"max_new_tokens": 9}, 0.9, None, [NAME])
    wanted = replace(wanted, fields_start=4)
    body = SglangExchange(wanted, request_id="a").body()
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 4)
    body = SidecarExchange(wanted, request_id="a", max_bytes=9).body()
    assert (body["return_fields"], body["fields_start"]) == ([NAME], [4])
    (other,) = build_sample_requests([[5, 6]], {"max_new_tokens": 9}, 0.9)
    assert (
        not {"return_routed_experts", "return_fields"} & SglangExchange(other, request_id="a").body().keys()
    )


@pytest.mark.parametrize(
    ("names", "p", "words"),
    [
        (["hidden_states"], 0.9, "expected some of"),
        (NAME, 0.9, "expected some of"),
        ([NAME], None, "for prompt 0 without sets"),
    ],
)
def test_what_is_no_field(names: Any, p: float | None, words: str) -> None:
    with pytest.raises(InvalidInputError, match=f"return_fields: got .*{words}"):
        build_sample_requests([[5, 6]], {"max_new_tokens": 9}, p, None, names)
