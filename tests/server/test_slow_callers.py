"""Callers that do not read their answers or do not send their bodies, each on its own connection."""

import select
import threading
import time
from contextlib import suppress

from tests.server.conftest import post

# About 6.4 MB of JSON for one sample: more than the kernel buffers for a reader that does not read.
LARGE = {"set_size": 20_000, "repeat": 10}
SMALL = {"receive_buffer": 4096}
OPENAPI = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


def is_closed(connection):
    """Return whether the other side has closed the connection, even if unread bytes are left."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def is_cut_off(connection):
    """Return whether the answer was cut off. The kernel tells that only to a peer that continues to read."""
    last = b""
    try:
        while data := connection.recv(1 << 16):
            last = data
    except ConnectionResetError:
        return True
    return not last.endswith((b"]}", b"0\r\n\r\n"))


def outcomes(sidecar, outcome):
    return sidecar.metric("sglang_topp_requests_total", outcome=outcome)


# -- readers that do not read ----------------------------------------------------------------------


def test_the_time_limit_covers_the_last_byte(engine, start, stream, eventually):
    sidecar = start(engine.url, max_in_flight=4, io_timeout_s=10)

    unread = [sidecar.send(sampling_params=LARGE, stream=stream, timeout_s=5, **SMALL) for _ in range(4)]

    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 4)
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0, timeout_s=60)
    assert outcomes(sidecar, "failed") == 4
    assert sidecar.metric("sglang_topp_errors_total", status="504", type="RequestTimeoutError") == 4
    assert sidecar.rollouts("b").status_code == 200
    eventually(lambda: sidecar.num_connections() == 1)
    for connection in unread:
        assert is_cut_off(connection)


def test_the_connection_of_a_reader_that_does_not_read_is_reset(engine, start, stream, eventually):
    sidecar = start(engine.url, io_timeout_s=2)

    unread = sidecar.send(sampling_params=LARGE, stream=stream, **SMALL)

    eventually(lambda: outcomes(sidecar, "aborted") == 1)
    assert sidecar.metric("sglang_topp_in_flight") == 0
    assert sidecar.metric("sglang_topp_held_bytes") == 0
    eventually(lambda: sidecar.num_connections() == 1)
    assert is_cut_off(unread)


def test_samples_for_a_reader_that_does_not_read_are_aborted(engine, start, eventually):
    sidecar = start(engine.url, io_timeout_s=2)

    sidecar.send(sampling_params={**LARGE, "n": 2, "fault": "hang-second"}, stream=True, **SMALL)

    eventually(lambda: outcomes(sidecar, "aborted") == 1)
    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 1)


def test_a_reader_that_only_pauses_gets_everything(engine, start, stream):
    sidecar = start(engine.url, io_timeout_s=5)
    connection = sidecar.send(sampling_params=LARGE, stream=stream, receive_buffer=1 << 16)

    got, paused_s = bytearray(), 0.0
    while b"]}" not in got[-8:] and b"\n0\r\n\r\n" not in got[-8:]:
        if len(got) > (paused_s + 1) * 600_000 and paused_s < 8:
            time.sleep(1)
            paused_s += 1
        data = connection.recv(1 << 16)
        assert data, "it was cut off"
        got += data
    assert len(got) > 6_000_000
    assert paused_s > 5


def test_unread_answers_of_any_route_are_reset(engine, start, eventually):
    sidecar = start(engine.url, io_timeout_s=2)

    connection = sidecar.dial(**SMALL)
    connection.settimeout(1)
    with suppress(OSError):
        while True:
            connection.sendall(OPENAPI * 1000)

    eventually(lambda: is_closed(connection))


# -- bodies that do not arrive -----------------------------------------------------------------------


def test_incomplete_bodies_take_no_place(engine, start, eventually):
    sidecar = start(engine.url, max_in_flight=2, io_timeout_s=4)

    waiting = [sidecar.dial(post(b'{"prompts": "a"}')[:-1]) for _ in range(20)]

    assert sidecar.rollouts("b").status_code == 200
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0)
    eventually(lambda: outcomes(sidecar, "slow") == 20)
    for connection in waiting:
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"bytes in 4 s, expected the whole body in this time" in answer
    eventually(lambda: all(map(is_closed, waiting)))
    assert len(engine.bodies) == 1


def test_large_bodies_that_drip_in_block_others_until_they_time_out(engine, start, eventually):
    """Four callers declare 64 MiB and then send far faster than 64 KiB/s, but not fast enough."""
    sidecar = start(engine.url, io_timeout_s=3)
    slow = [sidecar.dial(post(b"", length=64 << 20)) for _ in range(4)]

    def drip():
        while not outcomes(sidecar, "slow"):
            for connection in slow:
                with suppress(OSError):
                    connection.sendall(b" " * (64 << 10))
            time.sleep(0.2)

    dripping = threading.Thread(target=drip)
    dripping.start()
    # A short body does not wait, and a long one waits for those four at most.
    assert sidecar.rollouts("b").status_code == 200
    body = b'{"prompts": "a", "top_logprobs_p": 0.9}'.ljust(1 << 20)
    assert sidecar.http.post("/rollouts", content=body).status_code == 200
    dripping.join()
    eventually(lambda: outcomes(sidecar, "slow") == 4)
