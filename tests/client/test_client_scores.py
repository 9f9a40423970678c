"""`score` and `stream_scores` against servers with scripted answers."""

import json
from contextlib import aclosing
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient, retry_policy
from tests.client import conftest as fakes
from tests.client.conftest import NDJSON, bits, score, sends_bytes, silent, status

SEQUENCES = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture
async def client(served, no_leftovers):
    served.main_path = "/scores" if "/scores" in served.paths else "/generate"
    async with AsyncRolloutClient(served.url) as client:
        yield client


def assert_equal(scores, *expected):
    made = [replace(one, sequence_index=index) for index, one in enumerate(expected)]
    assert [*map(bits, scores)] == [*map(bits, made)]


async def test_the_same_from_an_engine_and_through_a_sidecar(client):
    scores = await client.score(SEQUENCES, top_logprobs_p=0.5, start=[1, None, 3])
    assert_equal(scores, *map(score, SEQUENCES, [1, 1, 3]))


async def test_texts_are_scored(client):
    assert_equal(await client.score(["ab", "cde"], top_logprobs_p=0.5), score("ab"), score("cde"))


async def test_scores_are_streamed_as_they_arrive(served, client):
    async with aclosing(client.stream_scores(SEQUENCES, top_logprobs_p=0.5)) as scores:
        assert sorted([score.sequence_index async for score in scores]) == [0, 1, 2]


async def test_a_time_limit_is_kept(served, client):
    served.script.append(silent)
    with pytest.raises(errors.RequestTimeoutError, match="passed before every sequence finished"):
        await client.score([5, 6], timeout_s=0.3)


async def test_each_sequence_goes_in_a_call_of_its_own(sidecar):
    sidecar.main_path = "/scores"
    sidecar.script.append(sends_bytes(b"", NDJSON, ends=False))
    async with AsyncRolloutClient(sidecar.url) as client:
        scores = await client.score([[5, i] for i in range(40)], top_logprobs_p=0.5)
    assert [score.sequence_index for score in scores] == list(range(40))
    assert [score.token_ids[1] for score in scores] == list(range(40))
    assert [len(call["sequences"]) for call in sidecar.calls] == [1] * 41


async def test_a_sidecar_that_sends_lines(sidecar):
    sidecar.paths["/scores"] = fakes.answer_lines
    async with AsyncRolloutClient(sidecar.url) as client:
        assert_equal(await client.score([5, 6], top_logprobs_p=0.5), score([5, 6]))


def test_the_synchronous_client(served):
    with RolloutClient(served.url) as client:
        assert_equal(client.score([5, 6, 7], top_logprobs_p=0.5, start=2), score([5, 6, 7], 2))
        assert len(list(client.stream_scores(SEQUENCES))) == 3


ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
SIDECARS_ABORT = {"error": {"type": "AbortedError", "message": "a weight update ended it", "status": 502}}


def answer_of_aborted(body):
    """Return the answers of an engine and of a sidecar to an aborted sequence."""
    if "rid" not in body:
        return json.dumps(SIDECARS_ABORT).encode() + b"\n"
    meta = {"id": body["rid"], "finish_reason": ABORT, "completion_tokens": 0}
    return fakes.events_of({"text": "", "output_ids": [], "meta_info": meta})


@pytest.fixture
def aborted_score(served):
    return sends_bytes(answer_of_aborted, NDJSON if "/scores" in served.paths else "text/event-stream")


async def test_an_aborted_sequence_is_an_error_with_advice(served, client, aborted_score):
    served.script.append(aborted_score)
    with pytest.raises(errors.AbortedError, match="weight update ended") as caught:
        await client.score(SEQUENCES[0], top_logprobs_p=0.5)
    if served.main_path == "/generate":
        assert "a pause, or a weight update" in str(caught.value)
        assert "on_abort='resume'" in str(caught.value)


async def test_an_aborted_sequence_is_scored_again(served, client, monkeypatch, aborted_score):
    monkeypatch.setattr(retry_policy, "delay_s", lambda retry, error: 0.01)
    served.script += [aborted_score, *[status(503)] * 9, aborted_score, *[status(503)] * 9]
    scores = await client.score(SEQUENCES[0], top_logprobs_p=0.5, on_abort="resume", timeout_s=60)
    assert_equal(scores, score(SEQUENCES[0]))
    assert served.script == []


@pytest.mark.parametrize("on_abort", ["return", "", None, 1])
async def test_on_abort_return_is_refused(client, on_abort):
    with pytest.raises(errors.InvalidInputError, match=r"on_abort: got .*expected 'raise' or 'resume'"):
        client.stream_scores(SEQUENCES, on_abort=on_abort)
