"""Names, shapes, and values of a model's tensors are those that `save_pretrained` writes."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.weight_push.tensors_to_push import buckets, check_weights, named_tensors

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


def test_buckets_are_full_and_the_last_is_named():
    tensors = [(str(i), torch.empty(size, dtype=torch.uint8)) for i, size in enumerate((60, 60, 200, 10, 0))]
    import sglang_topp_client.weight_push.tensors_to_push as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_BUCKET_BYTES", 128 * 2**20)
        assert [([n for n, _ in bucket], last) for bucket, last in buckets(tensors)] == [
            (["0", "1", "2", "3", "4"], True)
        ]
        patch.setattr(module, "MAX_BUCKET_BYTES", 120)
        assert [([n for n, _ in bucket], last) for bucket, last in buckets(tensors)] == [
            (["0", "1"], False),
            (["2"], False),
            (["3", "4"], True),
        ]


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
