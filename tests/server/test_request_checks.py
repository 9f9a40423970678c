"""A request that the engine would not survive never reaches it."""

from __future__ import annotations

import pytest

SIZES = {"vocab_size": 512, "context_length": 4096, "max_token_chars": 8}


@pytest.mark.parametrize("sets", [0.9, None])
@pytest.mark.parametrize(
    ("prompts", "params", "status", "words"),
    [
        ([99999], {}, 400, ["prompts: got token id 99999 at position 0", "0 to 511, the model's vocabulary"]),
        ([[3, 512]], {}, 400, ["prompts[0]: got token id 512 at position 1"]),
        ([[3], [4, 600]], [{}, {}], 400, ["prompts[1]: got token id 600 at position 1"]),
        ("a", {"stop_token_ids": [-5]}, 400, ["sampling_params.stop_token_ids: got token id -5"]),
        (["a", "b"], [{}, {"top_k": 2**31}], 400, ["sampling_params[1].top_k: got 2147483648"]),
        ("a", {"logit_bias": {"1000": 1}}, 400, ["sampling_params.logit_bias: got token id '1000'"]),
        ("a", {"stop_regex": "(.*)*x"}, 400, ["sampling_params.stop_regex"]),
        ("a" * 32769, {}, 413, ["prompts: got a text of 32769 characters, expected at most 32768"]),
        ([{"role": "user", "content": "ü" * 32769}], {}, 413, ["prompts: got a text of 3280"]),
        ([[{"role": "user", "content": "a" * 32769}]], {}, 413, ["prompts[0]: got a text of 3280"]),
        (["a", "b" * 600_000], {}, 413, ["prompts[1]: got a text of 600000 characters"]),
        ("a", {"stop": ["b" * 600_000]}, 413, ["sampling_params.stop: got 600000 characters at position 0"]),
    ],
)
def test_a_request_that_the_engine_does_not_survive_is_refused(
    sidecar, engine, prompts, params, status, words, sets
):
    answer = sidecar.rollouts(prompts, sampling_params=params, top_logprobs_p=sets)

    assert answer.status_code == status
    for word in words:
        assert word in answer.json()["error"]["message"]
    assert engine.bodies == []


def test_a_valid_request_reaches_the_engine(sidecar, engine):
    assert sidecar.rollouts("a" * 32768, sampling_params={"stop": "b" * 1024}).status_code == 200
    assert sidecar.rollouts([[0, 511]], sampling_params={"stop_token_ids": [511]}).status_code == 200
    assert len(engine.bodies) == 2


def test_the_vocabulary_is_the_one_that_the_engine_reports(engine, start, eventually):
    engine.patch["model"] = {**SIZES, "vocab_size": 100}
    sidecar = start(engine.url)
    assert "0 to 99" in sidecar.rollouts([100]).json()["error"]["message"]


@pytest.mark.parametrize("key", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_grammars_go_only_to_an_engine_that_survives_them(engine, start, key):
    assert start(engine.url).rollouts("a", sampling_params={key: "x"}).status_code == 200
    engine.bodies.clear()
    engine.patch["sanitizes_logits"] = False

    answer = start(engine.url).rollouts(["a"], sampling_params=[{key: "x"}])

    assert answer.status_code == 400
    for word in (f"sampling_params[0].{key}", "SGLANG_SANITIZE_NAN_LOGITS=1", "sglang-topp serve"):
        assert word in answer.json()["error"]["message"]
    assert engine.bodies == []
