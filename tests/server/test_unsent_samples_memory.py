"""The memory limit for finished samples: which requests it refuses or ends."""

import asyncio
import json
from dataclasses import replace

import pytest

from sglang_topp.errors import OverloadedError
from sglang_topp_client.wire.records import to_record
from sglang_topp_server.engine import EngineClient
from sglang_topp_server.limits import ConcurrencyLimit, MemoryLimit, num_bytes_of
from sglang_topp_server.requests import parse_rollouts
from sglang_topp_server.settings import Limits
from tests.client import conftest as fakes

# About 0.5 MB of sets in one sample, and about 4 MB.
HALF = {"set_size": 2_000, "repeat": 10}
LARGE = {"set_size": 20_000, "repeat": 9}


def test_an_answer_that_would_be_too_much_in_one_is_refused(engine, start):
    sidecar = start(engine.url, max_held_bytes=1_000_000)

    answer = sidecar.rollouts(["a"] * 2, sampling_params={**HALF, "n": 2})

    assert answer.status_code == 413
    message = answer.json()["error"]["message"]
    assert message.startswith("rollouts: got 14")
    assert "expected at most 1000000; use stream" in message
    assert sidecar.metric("sglang_topp_held_bytes") == 0


def test_a_stream_that_is_read_may_be_of_any_length(engine, start, eventually):
    sidecar = start(engine.url, max_held_bytes=20_000_000)  # a busy machine reads some megabytes late

    answer = sidecar.rollouts("a", sampling_params={**HALF, "n": 60}, stream=True)

    assert answer.text.splitlines()[-1] == '{"done":true,"rollouts":60}'
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") == 0)


def test_the_request_that_holds_the_most_is_ended(engine, start, eventually):
    sidecar = start(engine.url, max_held_bytes=12_000_000)
    params = {"set_size": 20_000, "repeat": 20, "fault": "hang-second", "n": 2}
    sidecar.send(sampling_params=params, stream=True, receive_buffer=4096)
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") > 9_000_000)
    assert sidecar.rollouts("b", sampling_params=LARGE).status_code == 200

    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="failed") == 1)
    assert sidecar.metric("sglang_topp_errors_total", status="429", type="OverloadedError") == 1
    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 1)
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") == 0)


async def test_rollouts_to_continue_count(engine):
    given = replace(fakes.sample([5], 0), finish_reason="abort")
    body = {"rollouts": [to_record(given)], "sampling_params": {"max_new_tokens": 99}, "top_logprobs_p": 0.9}
    results = asyncio.Queue()
    client = EngineClient(engine.url)
    with MemoryLimit(1 << 20).share() as share:
        await client.collect(parse_rollouts(json.dumps(body).encode(), Limits()), share, {}, results)
        assert share.num_bytes == num_bytes_of(given) + num_bytes_of(results.get_nowait()[1])
    await client.close()


async def test_a_request_is_ended_only_if_those_that_leave_do_not_free_enough():
    limit = MemoryLimit(100)
    with limit.share() as small, limit.share() as large, limit.share() as medium:
        for share, num_bytes in ((small, 10), (large, 60), (medium, 30), (small, 5)):
            share.change(num_bytes)
        small.change(40)  # 145 in all, and 60 leave
        assert [share.excess.done() for share in (small, large, medium)] == [False, True, False]
        small.change(20)
        assert [share.excess.done() for share in (small, large, medium)] == [True, True, False]
        assert isinstance(large.excess.result(), OverloadedError)
    assert limit.num_bytes == 0


def test_at_the_limit_no_request_is_admitted():
    limit = ConcurrencyLimit(2)
    with limit.admit(1), limit.admit(5), pytest.raises(OverloadedError, match="6 samples are in flight"):
        limit.admit(1).__enter__()
    assert limit.num_samples == 0
