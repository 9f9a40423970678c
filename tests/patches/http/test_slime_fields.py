"""slime's fields: the threshold of a request, and the arrays of an answer."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.http.slime_fields import nucleus_threshold, write_nuclei
from sglang_topp_patches.set_buffer import Positions


@pytest.mark.parametrize(
    ("sampling", "threshold"),
    [
        (None, 1.0),
        ({}, 1.0),
        ({"top_p": None}, 1.0),
        ({"top_p": 1, "top_k": None}, 1.0),
        ({"top_p": 0.8}, 0.8),
    ],
)
def test_the_threshold_is_top_p(sampling: Any, threshold: float) -> None:
    assert nucleus_threshold(sampling) == threshold


@pytest.mark.parametrize("top_p", ["0.9", True, float("nan"), 0.0, -0.5, 1.5, [0.9]])
def test_a_top_p_that_is_none(top_p: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^sampling_params\.top_p: got .*, expected a number p with"):
        nucleus_threshold({"top_p": top_p})


def int32(text: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), "<i4").tolist()


def test_logprobs_are_renormalized_over_each_set() -> None:
    positions = Positions(
        np.array([5, 6, 7, 9], np.int32),
        np.log(np.array([0.5, 0.2, 0.1, 0.25], np.float32)),
        [3, 1],
    )
    reported = [(float(np.log(0.2)), 6, "b"), (float(np.log(0.25)), 9, None), (0.0, 1, None)]
    meta_info: dict[str, Any] = {"id": "a", "output_token_logprobs": reported}
    write_nuclei(meta_info, positions)
    assert int32(meta_info["top_p_token_ids"]) == [5, 6, 7, 9]
    assert int32(meta_info["top_p_token_offsets"]) == [0, 3, 4]
    logprobs, *rest = zip(*meta_info["output_token_logprobs"], strict=True)
    assert logprobs == pytest.approx([np.log(0.25), 0.0], abs=1e-6)
    assert rest == [(6, 9), ("b", None)]
    assert reported[0][0] == float(np.log(0.2)), "SGLang's own list is as it was"


def test_an_answer_without_tokens_has_empty_arrays() -> None:
    meta_info: dict[str, Any] = {"id": "a"}
    write_nuclei(meta_info, Positions(np.zeros(0, np.int32), np.zeros(0, np.float32), []))
    assert meta_info["output_token_logprobs"] == []
    assert int32(meta_info["top_p_token_ids"]) == []
    assert int32(meta_info["top_p_token_offsets"]) == [0]


def test_fewer_logprobs_than_sets_are_an_error() -> None:
    positions = Positions(np.array([5, 6], np.int32), np.zeros(2, np.float32), [1, 1])
    with pytest.raises(ValueError, match="zip"):
        write_nuclei({"output_token_logprobs": [(0.0, 5, None)]}, positions)
