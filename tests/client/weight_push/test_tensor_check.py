"""What a push must have: the names and shapes that every engine loads."""

import pytest

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client.checks import convert
from sglang_topp_client.weight_push.tensors_to_push import CheckpointTensors, TensorCheck

SHAPES = {"model.embed.weight": [8, 4], "model.norm.weight": [4], "lm_head.weight": [8, 4]}
ENGINES = {
    "http://a": CheckpointTensors(SHAPES, frozenset()),
    "http://b": CheckpointTensors(SHAPES, frozenset(["lm_head.weight"])),
}


def check(shapes, *, engines=ENGINES, is_partial=False):
    check = TensorCheck(engines, is_partial=is_partial)
    for name, shape in shapes.items():
        check.add([(name, tuple(shape))], is_last=False)
    check.add([], is_last=True)


def without(name):
    return {other: shape for other, shape in SHAPES.items() if other != name}


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_whole_model_fits(is_partial):
    check(SHAPES, is_partial=is_partial)


def test_optional_tensors_may_be_left_out():
    check(without("lm_head.weight"), engines={"http://b": ENGINES["http://b"]})


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_an_error_unless_the_push_is_partial(name):
    with pytest.raises(InvalidInputError, match=f"2 tensors without 1 of the 3 that http://a .*'{name}'"):
        check(without(name))
    check(without(name), is_partial=True)


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"module.model.norm.weight": [4]}, "'module.model.norm.weight', but .* such as 'model.norm.weight'"),
        ({"norm.weight": [4]}, "'norm.weight', but http://a .* such as 'model.norm.weight'"),
        ({"value_head": [4]}, "'value_head', but http://a .* such as 'model.embed.weight'"),
        ({"model.norm.weight": [5]}, r"'model.norm.weight' of shape \[5\], expected \[4\]"),
        ({"model.norm.weight": []}, r"of shape \[\]"),
        ({"lm_head.weight": [4, 8]}, r"'lm_head.weight' of shape \[4, 8\], expected \[8, 4\]"),
    ],
)
def test_a_tensor_that_an_engine_would_not_load_is_an_error(shapes, message, is_partial):
    with pytest.raises(InvalidInputError, match=message):
        check(SHAPES | shapes, is_partial=is_partial)


def test_each_engine_is_compared():
    other = CheckpointTensors(SHAPES | {"model.norm.weight": [5]}, frozenset())
    with pytest.raises(InvalidInputError, match=r"expected \[5\], which http://c loads"):
        check(SHAPES, engines=ENGINES | {"http://c": other})


def test_a_name_that_comes_twice_is_an_error():
    check = TensorCheck(ENGINES, is_partial=False)
    check.add([("lm_head.weight", [8, 4])], is_last=False)
    with pytest.raises(InvalidInputError, match=r"'lm_head.weight' twice"):
        check.add([("lm_head.weight", [8, 4])], is_last=False)


@pytest.mark.parametrize("answer", [None, [], {}, {"tensors": []}, {"tensors": {}, "optional": None}])
def test_an_answer_without_tensors_is_an_error(answer):
    with pytest.raises(WireError):
        convert(answer, CheckpointTensors, field="checkpoint")
