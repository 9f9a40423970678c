"""Requests for sets that would crash SGLang's scheduler are refused, as a body and as an object."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp.engine_contract import Model
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.capabilities import Capabilities
from sglang_topp_patches.http.model_limit_checks import ModelLimits
from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.http.request_fields import parse
from tests.patches.make_http_process import http_process

VOCAB = 512


def limits_of(tokenizer: object, role: str = "null", dtype: str = "torch.bfloat16") -> ModelLimits:
    config = SimpleNamespace(vocab_size=VOCAB, context_len=100, hidden_size=4, dtype=dtype)
    manager = SimpleNamespace(model_config=config, tokenizer=tokenizer)
    return ModelLimits.of(manager, SimpleNamespace(disaggregation_mode=role))


LIMITS = limits_of(SimpleNamespace(get_vocab=lambda: {"a": 0, "<|end|>": 1}))


def test_the_limits_are_read_off_the_model() -> None:
    assert LIMITS.model == Model(vocab_size=VOCAB, context_length=100, max_token_chars=7)


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_a_tokenizer_that_lists_no_tokens_is_no_obstacle(tokenizer: object) -> None:
    assert limits_of(tokenizer).model == Model(vocab_size=VOCAB, context_length=100, max_token_chars=64)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregated_servers_hand_over_fewer_top_logprobs(role: str) -> None:
    limits = limits_of(None, role)
    limits.check_request({"text": "a", "top_logprobs_num": 128}.get)
    with pytest.raises(InvalidInputError, match="got 129, expected at most 128, on a disaggregated server"):
        limits.check_request({"text": "a", "top_logprobs_num": 129}.get)


def test_where_nothing_is_known_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProcess, "capabilities", Capabilities((), "", "", "", ""))
    with pytest.raises(InvalidInputError, match="not known"):
        parse(http_process(), {"text": "a", "top_logprobs_p": 0.9, "return_logprob": True}.get)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [99999]}, "input_ids: got token id 99999 at position 0"),
        ({"input_ids": [[3, 512]]}, r"input_ids\[0\]: got token id 512 at position 1"),
        ({"input_ids": [[3], []]}, r"input_ids\[1\]: got no token id"),
        ({"text": "a", "input_ids": [99999]}, "input_ids: got token id 99999"),
        ({"text": ""}, "text: got an empty text"),
        ({"text": ["a", ""]}, r"text\[1\]: got an empty text"),
        ({"text": "a" * 701}, "text: got a text of 701 characters, expected at most 700"),
        ({"text": "a", "sampling_params": {"top_k": 2**31}}, "sampling_params.top_k"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"stop": "a" * 2000}]}, r"sampling_params\[1\].stop"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len: got -2"),
        ({"text": ["a"], "logprob_start_len": [-2]}, "logprob_start_len: got -2"),
        ({"text": "a", "logprob_start_len": [1]}, "logprob_start_len: got a list of 1, expected one value"),
        ({"text": "a", "top_logprobs_num": 513}, "top_logprobs_num: got 513, expected at most 512"),
        ({"input_ids": [1], "return_logprob": [True]}, "return_logprob: got a list of 1"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params: got a list of 1, expected one value"),
        ({"text": "a", "sampling_params": {"n": None}}, "sampling_params.n: got None"),
        ({"text": "a", "sampling_params": {"n": 2**31}}, "n: got 2147483648, .* at most 8192 for 1 prompts"),
        ({"text": ["a"] * 100, "sampling_params": [{"n": 82}] * 100}, "n: got 82, .* at most 81 for 100"),
        ({"input_embeds": [[0.5] * 5]}, r"input_embeds: got rows of \[5\] numbers, expected .* of 4"),
        ({"input_embeds": [[[0.5] * 4], [[0.5] * 4, [0.5]]]}, r"input_embeds: got rows of \[1, 4\]"),
        ({"input_embeds": []}, "input_embeds: got rows of"),
        ({"text": "a", "rid": ["x"]}, "rid: got a list of 1, expected one value"),
        ({"text": "a", "positional_embed_overrides": {}}, "positional_embed_overrides: got JSON"),
        ({"text": ["a"], "positional_embed_overrides": [5]}, "positional_embed_overrides: got JSON"),
        ({"text": "a", "positional_embed_overrides": []}, "positional_embed_overrides: got JSON"),
        ({"text": "a", "input_ids": []}, "input_ids: got no token id"),
        ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor: expected what"),
        ({"text": "a", "custom_logit_processor": '{"callable": "xyz"}'}, "custom_logit_processor: expected"),
        ({"text": ["a"], "custom_logit_processor": ["[]"]}, r"custom_logit_processor\[0\]: expected what"),
        ({"text": ["a"], "input_ids": []}, "input_ids: got no token id"),
        ({"text": ["a", "b"], "input_ids": [1]}, "input_ids: expected a list for each of 2 prompts"),
        ({"text": ["a", "b"], "input_ids": [[1]]}, "input_ids: expected a list for each of 2 prompts"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob: got 1 lists, .* each of 2"),
        ({"text": "a", "token_ids_logprob": [[1]]}, "token_ids_logprob: got 1 lists, expected token ids"),
        ({"text": ["a", "b"], "lora_id": "x"}, "lora_id: got 'x', expected one for each of 2 prompts"),
        ({"input_ids": [[1], [2]], "top_logprobs_num": [1]}, "top_logprobs_num: .* each of 2 prompts"),
    ],
)
def test_it_is_refused_with_a_sentence(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        LIMITS.check_request(body.get)


def test_embeddings_in_another_dtype_than_the_models_are_refused() -> None:
    limits = limits_of(None, dtype="torch.float32")
    with pytest.raises(InvalidInputError, match=r"input_embeds: .* this model takes float32"):
        limits.check_request({"input_embeds": [[0.5] * 4]}.get)


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a"},
        {"text": ["a", "b"], "logprob_start_len": [0, -1], "top_logprobs_num": 512, "return_logprob": True},
        {"input_ids": [0, 511], "sampling_params": {"temperature": 0}},
        {"input_ids": [[0], [511]], "sampling_params": [{}, {"top_p": 0.5}], "return_logprob": [True, False]},
        {"input_ids": []},
        {"input_embeds": [[0.5] * 4]},
        {"input_embeds": [[[0.5] * 4], [[0.5] * 4]], "sampling_params": [{}, {}]},
        {"text": ["a", "b"], "positional_embed_overrides": [None, object()], "rid": ["x", "y"]},
    ],
)
def test_what_the_engine_serves_or_refuses_by_itself_passes(body: dict[str, Any]) -> None:
    LIMITS.check_request(body.get)
