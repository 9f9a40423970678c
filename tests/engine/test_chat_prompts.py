"""Chat messages as prompts: the real engine's ids equal those of transformers' own template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_topp.errors import BadRequestError, InvalidInputError
from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import check_rollout
from tests.engine.start_servers import Engine, run_sidecar
from tests.skip_missing_features import needs

P = 0.9
SAMPLING = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True, "n": 2}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zürich, 東京?\n\n "}],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|endoftext|> and on"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="module", params=["engine", "sidecar"])
def client(request: pytest.FixtureRequest, engine: Engine) -> Iterator[RolloutClient]:
    if request.param == "engine":
        with RolloutClient(engine.url) as client:
            yield client
    else:
        with run_sidecar(engine.url) as url, RolloutClient(url) as client:
            yield client


def expected_ids(tokenizer: Any, chat: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_the_ids_are_those_of_transformers(client: RolloutClient, tokenizer: Any) -> None:
    rollouts = client.generate(CHATS, SAMPLING, top_logprobs_p=P)
    assert len(rollouts) == 2 * len(CHATS)
    for i, rollout in enumerate(rollouts):
        assert (rollout.prompt_index, rollout.sample_index) == divmod(i, 2)
        assert rollout.prompt_ids.tolist() == expected_ids(tokenizer, CHATS[i // 2])
        assert len(rollout.output_ids) == 8
        check_rollout(rollout, P)


def test_the_samples_are_those_of_the_ids(client: RolloutClient, tokenizer: Any) -> None:
    greedy = {**SAMPLING, "temperature": 0, "n": 1}
    chats = client.generate(CHATS, greedy, top_logprobs_p=P)
    ids = client.generate([expected_ids(tokenizer, chat) for chat in CHATS], greedy, top_logprobs_p=P)
    assert [rollout.output_ids.tolist() for rollout in chats] == [
        rollout.output_ids.tolist() for rollout in ids
    ]


def test_text_parts_and_one_conversation(client: RolloutClient, tokenizer: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    rollouts = client.generate(parts, SAMPLING, top_logprobs_p=P)
    assert len(rollouts) == 2
    for rollout in rollouts:
        assert rollout.prompt_ids.tolist() == expected_ids(tokenizer, CHATS[0])
        check_rollout(rollout, P)


def test_the_chat_route_renders_the_same(engine: Engine, tokenizer: Any) -> None:
    """The prompt of a chat completion has as many tokens, with and without a special token in a message."""
    for chat in CHATS:
        body = {"model": "default", "messages": chat, "max_tokens": 1}
        answer = engine.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(expected_ids(tokenizer, chat))


@needs(Feature.RESUMED)
def test_a_chat_is_resumed(client: RolloutClient, tokenizer: Any) -> None:
    (part,) = client.generate([CHATS[1]], {**SAMPLING, "n": 1, "max_new_tokens": 4}, top_logprobs_p=P)
    (rollout,) = client.resume(part, {**SAMPLING, "max_new_tokens": 9}, top_logprobs_p=P)
    assert isinstance(rollout, Rollout)
    assert rollout.prompt_ids.tolist() == expected_ids(tokenizer, CHATS[1])
    assert len(rollout.output_ids) == 9
    check_rollout(rollout, P)


def test_a_role_that_the_engine_does_not_know_is_refused(client: RolloutClient) -> None:
    with pytest.raises(BadRequestError, match="chat messages"):
        client.generate([[{"role": "narrator", "content": "Once"}]], SAMPLING)


def test_images_are_refused(client: RolloutClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidInputError, match="image_url"):
        client.generate([[{"role": "user", "content": [image]}]], SAMPLING)
