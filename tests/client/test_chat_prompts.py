"""Chat messages as prompts: the engine turns them into ids, once for each prompt."""

import asyncio
import json

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient
from tests.client import conftest as fakes
from tests.client.conftest import answers, by_request, silent, status, until

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
OTHER = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


def ids_of(messages):
    return list(json.dumps(messages).encode())


def as_chat(asked):
    ids = ids_of(asked.body["messages"])
    return answers({"tokens": ids, "count": len(ids), "max_model_len": 4096})


tokenize = by_request(as_chat)


@pytest.fixture
def chat_engine(engine):
    """An engine with a chat template."""
    engine.paths["/tokenize"] = tokenize
    return engine


@pytest.fixture
async def client(chat_engine, no_leftovers):
    async with AsyncRolloutClient(chat_engine.url) as client:
        yield client


def check(rollouts, prompts, n=1):
    expected = [(ids_of(prompt), k) for prompt in prompts for k in range(n)]
    for rollout, (prompt_ids, k) in zip(rollouts, expected, strict=True):
        assert rollout.prompt_ids.tolist() == prompt_ids
        assert rollout.candidates == fakes.sample(prompt_ids, k).candidates


async def test_samples_are_those_of_the_templates_ids(chat_engine, client):
    rollouts = await client.generate([CHAT, OTHER], {"n": 2}, top_logprobs_p=0.9)
    check(rollouts, [CHAT, OTHER], n=2)
    bodies = [asked.body for asked in chat_engine.of("/tokenize")]
    assert sorted(bodies, key=str) == [{"messages": CHAT}, {"messages": OTHER}]
    assert all("text" not in body for body in chat_engine.calls)


async def test_a_retry_does_not_apply_the_template_again(chat_engine, client):
    chat_engine.script += [status(503)] * 2
    check(await client.generate([CHAT], top_logprobs_p=0.9), [CHAT])
    assert len(chat_engine.of("/tokenize")) == 1
    assert len(chat_engine.calls) == 3


async def test_a_busy_tokenizer_is_asked_again(chat_engine, client):
    chat_engine.paths["/tokenize"] = by_request(
        lambda _: status(503) if len(chat_engine.of("/tokenize")) < 3 else tokenize
    )
    check(await client.generate([CHAT], top_logprobs_p=0.9), [CHAT])


@pytest.mark.parametrize("code", [400, 404])
async def test_messages_that_the_engine_refuses(chat_engine, client, code):
    chat_engine.paths["/tokenize"] = status(code)
    words = r"prompts: the engine does not turn these chat messages into token ids: .*scripted.*give the ids"
    with pytest.raises(errors.BadRequestError, match=words) as caught:
        await client.generate([CHAT])
    assert caught.value.status == code
    assert chat_engine.calls == []


@pytest.mark.parametrize("answer", [{"tokens": []}, {}, [1, 2], {"tokens": ["a"]}, {"tokens": [[1]]}])
async def test_an_answer_without_ids_is_an_error(chat_engine, client, answer):
    chat_engine.paths["/tokenize"] = answers(answer)
    with pytest.raises(errors.WireError, match="token"):
        await client.generate([CHAT])
    assert chat_engine.calls == []


async def test_a_bad_conversation_leaves_the_others_alone(chat_engine, client):
    chat_engine.paths["/tokenize"] = by_request(
        lambda asked: status(400) if asked.body["messages"] == OTHER else tokenize
    )
    outcomes = await client.generate([CHAT, OTHER], top_logprobs_p=0.9, return_exceptions=True)
    check(outcomes[:1], [CHAT])
    assert type(outcomes[1]) is errors.BadRequestError


async def test_an_interrupted_chat_continues_from_its_ids(chat_engine, client):
    def abort_at_first(body):
        reason = {"type": "stop"} if body["resumed_tokens"] else {"type": "abort", "message": "Aborted"}
        meta = {"finish_reason": reason, "resumed_tokens": body["resumed_tokens"]}
        return fakes.events_of(fakes.chunk(fakes.sample(body["input_ids"], 0), **meta)) + fakes.DONE

    chat_engine.paths["/generate"] = fakes.sends_bytes(abort_at_first)
    (rollout,) = await client.generate([CHAT], {"max_new_tokens": 6}, top_logprobs_p=0.9, on_abort="resume")
    first = fakes.sample(ids_of(CHAT), 0)
    assert rollout.prompt_ids.tolist() == ids_of(CHAT)
    assert chat_engine.calls[1]["input_ids"] == ids_of(CHAT) + first.output_ids.tolist()
    assert len(rollout.output_ids) == 6
    assert len(chat_engine.of("/tokenize")) == 1


async def test_a_chat_aborted_before_its_ids_are_known_is_an_error(chat_engine, client):
    chat_engine.paths["/tokenize"] = silent
    waiting = asyncio.create_task(
        client.generate([CHAT], {"max_new_tokens": 6}, on_abort="return", request_id="mine")
    )
    await until(lambda: chat_engine.of("/tokenize"))
    await client.abort("mine")
    with pytest.raises(errors.RolloutError, match="a text or a chat, so its token ids are unknown"):
        await waiting


async def test_a_sidecar_gets_the_messages(sidecar):
    def answer(body):
        prompts = [ids_of(prompt) for prompt in body["prompts"]]
        return fakes.encoded(fakes.results_of(body | {"prompts": prompts}))

    sidecar.script += [fakes.sends_bytes(answer, fakes.NDJSON)] * 2
    async with AsyncRolloutClient(sidecar.url) as client:
        check(await client.generate([CHAT, OTHER], top_logprobs_p=0.9), [CHAT, OTHER])
    assert sorted((body["prompts"] for body in sidecar.calls), key=str) == sorted([[CHAT], [OTHER]], key=str)
    assert sidecar.of("/tokenize") == []
