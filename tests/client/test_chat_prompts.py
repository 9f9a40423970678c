"""Chat messages as prompts: the engine turns them into ids, once for each prompt."""

import asyncio
import json

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
OTHER = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


def ids_of(messages):
    return list(json.dumps(messages).encode())


@pytest.fixture
def chat_engine(engine):
    """An engine with a chat template."""

    async def tokenize(asked, reply):
        ids = ids_of(asked.body["messages"])
        await reply.json({"tokens": ids, "count": len(ids), "max_model_len": 4096})

    engine.paths["/tokenize"] = tokenize
    return engine


@pytest.fixture
async def client(chat_engine, no_leftovers):
    async with AsyncRolloutClient(chat_engine.url) as client:
        yield client


def check(rollouts, prompts, fakes, n=1):
    expected = [(ids_of(prompt), k) for prompt in prompts for k in range(n)]
    for rollout, (prompt_ids, k) in zip(rollouts, expected, strict=True):
        assert rollout.prompt_ids.tolist() == prompt_ids
        assert rollout.candidates == fakes.sample(prompt_ids, k).candidates


async def test_samples_are_those_of_the_templates_ids(chat_engine, client, fakes):
    rollouts = await client.generate([CHAT, OTHER], {"n": 2}, top_logprobs_p=0.9)
    check(rollouts, [CHAT, OTHER], fakes, n=2)
    bodies = [asked.body for asked in chat_engine.of("/tokenize")]
    assert sorted(bodies, key=str) == [{"messages": CHAT}, {"messages": OTHER}]
    assert all("text" not in body for body in chat_engine.calls)


async def test_one_conversation_is_one_prompt(client, fakes):
    check(await client.generate(CHAT, top_logprobs_p=0.9), [CHAT], fakes)
    check(await client.generate(tuple(CHAT), top_logprobs_p=0.9), [CHAT], fakes)


def test_the_synchronous_client_takes_them(chat_engine, fakes):
    with RolloutClient(chat_engine.url, kind="sglang") as client:
        check(client.generate([CHAT], top_logprobs_p=0.9), [CHAT], fakes)


async def test_a_retry_does_not_apply_the_template_again(chat_engine, client, fakes):
    async def busy(asked, reply):
        await reply.json({}, 503)

    chat_engine.script += [busy, busy]
    check(await client.generate([CHAT], top_logprobs_p=0.9), [CHAT], fakes)
    assert len(chat_engine.of("/tokenize")) == 1
    assert len(chat_engine.calls) == 3


async def test_a_busy_tokenizer_is_asked_again(chat_engine, client, fakes):
    tokenize = chat_engine.paths["/tokenize"]

    async def busy_at_first(asked, reply):
        if len(chat_engine.of("/tokenize")) < 3:
            return await reply.json({}, 503)
        await tokenize(asked, reply)

    chat_engine.paths["/tokenize"] = busy_at_first
    check(await client.generate([CHAT], top_logprobs_p=0.9), [CHAT], fakes)


@pytest.mark.parametrize(("code", "answer"), [(400, {"message": "roles must alternate"}), (404, {})])
async def test_messages_that_the_engine_refuses(chat_engine, client, code, answer):
    async def refuse(asked, reply):
        await reply.json(answer, code)

    chat_engine.paths["/tokenize"] = refuse
    words = r"prompts: the engine does not turn these chat messages into token ids: .*give the ids"
    with pytest.raises(errors.BadRequestError, match=words) as caught:
        await client.generate([CHAT])
    assert answer.get("message", "") in str(caught.value)
    assert caught.value.status == code
    assert chat_engine.calls == []


@pytest.mark.parametrize("answer", [{"tokens": []}, {}, [1, 2], {"tokens": ["a"]}, {"tokens": [[1]]}])
async def test_an_answer_without_ids_is_an_error(chat_engine, client, answer):
    async def odd(asked, reply):
        await reply.json(answer)

    chat_engine.paths["/tokenize"] = odd
    with pytest.raises(errors.WireError, match="token"):
        await client.generate([CHAT])
    assert chat_engine.calls == []


async def test_a_bad_conversation_leaves_the_others_alone(chat_engine, client, fakes):
    tokenize = chat_engine.paths["/tokenize"]

    async def refuse_one(asked, reply):
        if asked.body["messages"] == OTHER:
            return await reply.json({"message": "no"}, 400)
        await tokenize(asked, reply)

    chat_engine.paths["/tokenize"] = refuse_one
    outcomes = await client.generate([CHAT, OTHER], top_logprobs_p=0.9, return_exceptions=True)
    check(outcomes[:1], [CHAT], fakes)
    assert type(outcomes[1]) is errors.BadRequestError


async def test_an_interrupted_chat_continues_from_its_ids(chat_engine, client, fakes):
    async def abort_at_first(asked, reply):
        event = reply.event

        async def add(chunk):
            meta_info = chunk["meta_info"]
            meta_info["resumed_tokens"] = asked.body["resumed_tokens"]
            if not asked.body["resumed_tokens"]:
                meta_info["finish_reason"] = {"type": "abort", "message": "Aborted"}
            await event(chunk)

        reply.event = add
        await reply.start()
        await reply.event(fakes.chunk(fakes.sample(asked.body["input_ids"], 0)))
        await reply.write(b"data: [DONE]\n\n")
        await reply.end()

    chat_engine.paths["/generate"] = abort_at_first
    (rollout,) = await client.generate([CHAT], {"max_new_tokens": 6}, top_logprobs_p=0.9, on_abort="resume")
    first = fakes.sample(ids_of(CHAT), 0)
    assert rollout.prompt_ids.tolist() == ids_of(CHAT)
    assert chat_engine.calls[1]["input_ids"] == ids_of(CHAT) + first.output_ids.tolist()
    assert len(rollout.output_ids) == 6
    assert len(chat_engine.of("/tokenize")) == 1


async def test_a_chat_aborted_before_its_ids_are_known_is_an_error(chat_engine, client):
    async def abort_meanwhile(asked, reply):
        await reply.hung_up()

    chat_engine.paths["/tokenize"] = abort_meanwhile
    waiting = asyncio.create_task(
        client.generate([CHAT], {"max_new_tokens": 6}, on_abort="return", request_id="mine")
    )
    async with asyncio.timeout(10):
        while not chat_engine.of("/tokenize"):
            await asyncio.sleep(0.01)
    await client.abort("mine")
    with pytest.raises(errors.RolloutError, match="a text or a chat, so its token ids are unknown"):
        await waiting


async def test_a_sidecar_gets_the_messages(sidecar, fakes):
    async def answer(asked, reply):
        asked.body["prompts"] = [ids_of(prompt) for prompt in asked.body["prompts"]]
        await fakes.answer_rollouts(asked, reply)

    sent = []

    async def note(asked, reply):
        sent.append(asked.body["prompts"])
        await answer(asked, reply)

    sidecar.script += [note, note]
    async with AsyncRolloutClient(sidecar.url) as client:
        check(await client.generate([CHAT, OTHER], top_logprobs_p=0.9), [CHAT, OTHER], fakes)
    assert sorted(sent, key=str) == sorted([[CHAT], [OTHER]], key=str)
    assert sidecar.of("/tokenize") == []


async def test_scores_take_no_messages(chat_engine, client):
    for sequences in (CHAT, [CHAT]):
        with pytest.raises(errors.InvalidInputError, match="sequences: got chat messages, expected text or"):
            await client.score(sequences)
    assert chat_engine.asked == []
