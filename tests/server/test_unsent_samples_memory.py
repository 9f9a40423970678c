"""The memory limit for finished samples: which requests it refuses or ends."""

import socket

import pytest

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


@pytest.fixture
def unread(stack):
    def unread(sidecar, body):
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", sidecar.port))
        head = b"POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        return connection

    return unread


def test_the_request_that_holds_the_most_is_ended(engine, start, unread, eventually):
    sidecar = start(engine.url, max_held_bytes=12_000_000)
    body = b'{"prompts":"a","top_logprobs_p":0.9,"stream":true,"sampling_params":%s}'

    unread(sidecar, body % b'{"set_size":20000,"repeat":20,"fault":"hang-second","n":2}')
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") > 9_000_000)
    assert sidecar.rollouts("b", sampling_params=LARGE).status_code == 200

    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="failed") == 1)
    assert sidecar.metric("sglang_topp_errors_total", status="429", type="OverloadedError") == 1
    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 1)
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") == 0)
