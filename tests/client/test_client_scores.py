"""`score` and `stream_scores` against servers with scripted answers."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient, Score, retry_policy

SEQUENCES = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(params=["sglang", "sidecar"])
def served(request):
    """A server of each kind, and its route for scores."""
    server = request.getfixturevalue("engine" if request.param == "sglang" else "sidecar")
    server.main_path = "/generate" if request.param == "sglang" else "/scores"
    return server


@pytest.fixture
async def client(served, no_leftovers):
    async with AsyncRolloutClient(served.url) as client:
        yield client


def assert_equal(score, expected):
    assert isinstance(score, Score)
    np.testing.assert_array_equal(score.token_ids, expected.token_ids)
    np.testing.assert_array_equal(score.logprobs, expected.logprobs)
    np.testing.assert_array_equal(score.candidates.token_ids, expected.candidates.token_ids)
    np.testing.assert_array_equal(score.candidates.logprobs, expected.candidates.logprobs)
    assert (score.start, score.weight_version, score.cached_tokens) == (expected.start, "step-7", 1)


async def hang(asked, reply):
    await reply.start()
    await reply.hung_up()


async def refuse(asked, reply):
    await reply.json({"error": {"message": "no"}}, 400)


async def busy(asked, reply):
    await reply.json({"error": {"message": "later"}}, 503)


async def test_the_same_from_an_engine_and_through_a_sidecar(client, fakes):
    scores = await client.score(SEQUENCES, top_logprobs_p=0.5, start=[1, None, 3])
    assert [score.sequence_index for score in scores] == [0, 1, 2]
    for score, sequence, start in zip(scores, SEQUENCES, [1, 1, 3], strict=True):
        assert_equal(score, fakes.score(sequence, start))


async def test_texts_are_scored(client, fakes):
    scores = await client.score(["ab", "cde"], top_logprobs_p=0.5)
    for score, text in zip(scores, ["ab", "cde"], strict=True):
        assert_equal(score, fakes.score(text))


async def test_rollouts_are_sent_as_their_ids(client, fakes):
    rollouts = [fakes.sample([5, 6], 0), fakes.sample([7], 1)]
    scores = await client.score(rollouts, top_logprobs_p=0.5)
    for score, rollout in zip(scores, rollouts, strict=True):
        np.testing.assert_array_equal(score.token_ids[: score.start], rollout.prompt_ids)
        np.testing.assert_array_equal(score.token_ids[score.start :], rollout.output_ids)


async def test_nothing_is_sent_for_wrong_arguments(served, client):
    for wrong in (
        {"start": 0},
        {"start": 5},
        {"top_logprobs_p": 2},
        {"timeout_s": 0},
        {"progress": 1},
        {"request_id": ""},
    ):
        with pytest.raises(errors.InvalidInputError, match=next(iter(wrong))):
            await client.score([5, 6, 7], **wrong)
    with pytest.raises(errors.InvalidInputError, match="sequences"):
        await client.score([])
    assert served.calls == []


async def test_a_failed_sequence_is_scored_again(served, client, fakes):
    served.script += [busy, busy]
    scores = await client.score(SEQUENCES, top_logprobs_p=0.5)
    assert len(scores) == 3


async def test_a_refused_sequence_is_not_scored_again(served, client):
    served.script.append(refuse)
    with pytest.raises(errors.BadRequestError, match="no"):
        await client.score([5, 6])
    assert len(served.calls) == 1


async def test_scores_are_streamed_as_they_arrive(served, client):
    async with aclosing(client.stream_scores(SEQUENCES, top_logprobs_p=0.5)) as scores:
        assert sorted([score.sequence_index async for score in scores]) == [0, 1, 2]


async def test_a_time_limit_is_kept(served, client):
    served.script.append(hang)
    with pytest.raises(errors.RequestTimeoutError, match="passed before every sequence finished"):
        await client.score([5, 6], timeout_s=0.3)


async def test_abort_by_name(served, client):
    served.script.append(hang)
    waiting = asyncio.create_task(client.score([5, 6], request_id="mine"))
    while not served.in_flight:
        await asyncio.sleep(0.01)
    await client.abort("mine")
    with pytest.raises(errors.RolloutError, match="mine was aborted"):
        await waiting


async def test_leaving_the_stream_aborts_the_rest_in_the_engine(engine, fakes):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        engine.script += [fakes.answer_generate, hang]
        async with aclosing(client.stream_scores([[5, 6], [7, 8]], request_id="mine")) as scores:
            await anext(scores)
            while len(engine.calls) < 2:
                await asyncio.sleep(0.01)
    (aborted,) = engine.aborted
    assert aborted.startswith("mine-")
    assert aborted in [call["rid"] for call in engine.calls]


async def test_each_sequence_goes_in_a_call_of_its_own(sidecar, fakes):
    sidecar.main_path = "/scores"

    async def cut(asked, reply):
        await reply.start(content_type="application/x-ndjson")
        raise fakes.Cut

    sidecar.script.append(cut)
    async with AsyncRolloutClient(sidecar.url) as client:
        scores = await client.score([[5, i] for i in range(40)], top_logprobs_p=0.5)
    assert [score.sequence_index for score in scores] == list(range(40))
    assert [score.token_ids[1] for score in scores] == list(range(40))
    assert [len(call["sequences"]) for call in sidecar.calls] == [1] * 41


async def test_a_sidecar_that_sends_lines(sidecar, fakes):
    sidecar.paths["/scores"] = fakes.answer_scores
    async with AsyncRolloutClient(sidecar.url) as client:
        (score,) = await client.score([5, 6], top_logprobs_p=0.5)
    assert_equal(score, fakes.score([5, 6]))


def test_the_synchronous_client(served, fakes):
    with RolloutClient(served.url) as client:
        (score,) = client.score([5, 6, 7], top_logprobs_p=0.5, start=2)
        assert_equal(score, fakes.score([5, 6, 7], 2))
        assert len(list(client.stream_scores(SEQUENCES))) == 3


def test_leaving_the_synchronous_stream_aborts_the_rest(engine, fakes):
    with RolloutClient(engine.url, kind="sglang") as client:
        engine.script += [fakes.answer_generate, hang]
        for _ in client.stream_scores([[5, 6], [7, 8]]):
            while len(engine.calls) < 2:
                pass
            break
    assert len(engine.aborted) == 1


ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


async def aborted_score(asked, reply):
    """Return the answers of an engine and of a sidecar to an aborted sequence."""
    if asked.path == "/scores":
        await reply.start(content_type="application/x-ndjson")
        await reply.line(
            {"error": {"type": "AbortedError", "message": "a weight update ended it", "status": 502}}
        )
        return await reply.end()
    await reply.start()
    meta_info = {"id": asked.body["rid"], "finish_reason": ABORT, "completion_tokens": 0}
    await reply.event({"text": "", "output_ids": [], "meta_info": meta_info})
    await reply.write(b"data: [DONE]\n\n")
    await reply.end()


async def test_an_aborted_sequence_is_an_error_with_advice(served, client):
    served.script.append(aborted_score)
    with pytest.raises(errors.AbortedError, match="weight update ended") as caught:
        await client.score(SEQUENCES[0], top_logprobs_p=0.5)
    if served.main_path == "/generate":
        assert "a pause, or a weight update" in str(caught.value)
        assert "on_abort='resume'" in str(caught.value)


async def test_an_aborted_sequence_is_scored_again(served, client, fakes, monkeypatch):
    monkeypatch.setattr(retry_policy, "delay_s", lambda retry, error: 0.01)
    served.script += [aborted_score, *[busy] * 9, aborted_score, *[busy] * 9]
    (score,) = await client.score(SEQUENCES[0], top_logprobs_p=0.5, on_abort="resume", timeout_s=60)
    assert_equal(score, fakes.score(SEQUENCES[0], 1))
    assert served.script == []


@pytest.mark.parametrize("on_abort", ["return", "", None, 1])
async def test_on_abort_return_is_refused(client, on_abort):
    with pytest.raises(errors.InvalidInputError, match=r"on_abort: got .*expected 'raise' or 'resume'"):
        client.stream_scores(SEQUENCES, on_abort=on_abort)
