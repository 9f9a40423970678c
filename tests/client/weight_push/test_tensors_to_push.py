"""A model's tensors are those that `save_pretrained` writes, and a push has those that every engine loads."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client.value_checks import convert
from sglang_topp_client.weight_push import tensors_to_push
from sglang_topp_client.weight_push.tensors_to_push import (
    CheckpointTensors,
    TensorCheck,
    buckets,
    check_weights,
    named_tensors,
)

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen2(*, tied):
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


@pytest.mark.parametrize(
    "make", [lambda: qwen2(tied=False), lambda: qwen2(tied=True), mixtral], ids=["untied", "tied", "experts"]
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_tensors_are_those_of_a_checkpoint(make, is_loaded, tmp_path):
    model = make()
    if is_loaded:
        model.save_pretrained(tmp_path / "first")
        model = type(model).from_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    named = dict(named_tensors(model))
    assert named.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(named[name], tensor), name
        assert not named[name].requires_grad


def test_pairs_pass_as_they_are():
    pairs = [("b", torch.ones(2)), ("a", torch.zeros(1))]
    assert [name for name, _ in named_tensors(iter(pairs))] == ["b", "a"]
    assert [name for name, _ in named_tensors(dict(pairs))] == ["b", "a"]


def test_buckets_are_full_and_the_last_is_named(monkeypatch):
    tensors = [(str(i), torch.empty(size, dtype=torch.uint8)) for i, size in enumerate((60, 60, 200, 10, 0))]
    for limit, expected in (
        (128 * 2**20, [(["0", "1", "2", "3", "4"], True)]),
        (120, [(["0", "1"], False), (["2"], False), (["3", "4"], True)]),
    ):
        monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", limit)
        assert [([n for n, _ in bucket], last) for bucket, last in buckets(tensors)] == expected


class Quantized:
    hf_quantizer = "bitsandbytes"

    def state_dict(self):
        raise AssertionError


class Adapted(Quantized):
    hf_quantizer = None
    peft_config = {"default": 1}  # noqa: RUF012  # nothing changes it


@pytest.mark.parametrize(
    ("weights", "message"), [(Quantized(), "quantized model"), (Adapted(), "merge_and_unload")]
)
def test_models_whose_weights_are_not_their_own_are_refused(weights, message):
    with pytest.raises(InvalidInputError, match=message):
        check_weights(weights, is_folder=False)


def test_a_sharded_tensor_is_refused():
    class Sharded(torch.Tensor):
        def full_tensor(self):
            raise AssertionError

    sharded = torch.ones(2).as_subclass(Sharded)
    with pytest.raises(InvalidInputError, match="weights: a is a sharded DTensor, expected a whole tensor"):
        list(named_tensors([("a", sharded)]))


# -- the check against the engines -----------------------------------------------------------------

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


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_an_error_unless_it_is_optional_or_the_push_is_partial(name):
    check(SHAPES)
    check(without("lm_head.weight"), engines={"http://b": ENGINES["http://b"]})
    with pytest.raises(InvalidInputError, match=f"2 tensors without 1 of the 3 that http://a .*'{name}'"):
        check(without(name))
    check(without(name), is_partial=True)


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
