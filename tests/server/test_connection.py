"""Callers that do not send, or do not read, each on a connection of its own."""

import json
import select
import socket
import time
from contextlib import suppress

import pytest

# Some 6.4 MB of JSON for one sample: more than the kernel takes for a reader that does not read.
LARGE = {"set_size": 20_000, "repeat": 10}
HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
OPENAPI = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def dial(stack):
    """Opens a connection, and sends some bytes on it; it takes few bytes that nobody reads."""

    def dial(sidecar, sent=b""):
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", sidecar.port))
        connection.sendall(sent)
        return connection

    return dial


def rollouts(**fields):
    """The bytes of a request."""
    body = json.dumps({"prompts": "a", "top_logprobs_p": 0.9, **fields}).encode()
    return b"POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def is_closed(connection):
    """Whether the other side has closed it, read or not."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def drain(connection):
    while connection.recv(1 << 16):
        pass


def outcomes(sidecar, outcome):
    return sidecar.metric("sglang_topp_requests_total", outcome=outcome)


# -- readers that do not read ----------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request):
    return request.param


def test_the_time_limit_covers_the_last_byte(engine, start, dial, stream, eventually):
    sidecar = start(engine.url, max_in_flight=4, timeout_s=10)
    asked = rollouts(sampling_params=LARGE, stream=stream)

    unread = [dial(sidecar, asked) for _ in range(4)]

    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 4)
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0, timeout_s=60)
    eventually(lambda: all(map(is_closed, unread)))
    assert outcomes(sidecar, "failed") == 4
    assert sidecar.metric("sglang_topp_errors_total", status="504", type="RequestTimeoutError") == 4
    assert sidecar.rollouts("b").status_code == 200


def test_the_callers_own_time_limit_covers_it_too(sidecar, dial, stream, eventually):
    unread = dial(sidecar, rollouts(sampling_params=LARGE, stream=stream, timeout_s=10))

    eventually(lambda: outcomes(sidecar, "failed") == 1, timeout_s=60)
    eventually(lambda: is_closed(unread))


def test_a_reader_that_does_not_read_is_cut_off(engine, start, dial, stream, eventually):
    sidecar = start(engine.url, max_stall_s=2)

    unread = dial(sidecar, rollouts(sampling_params=LARGE, stream=stream))

    eventually(lambda: outcomes(sidecar, "slow") == 1)
    assert sidecar.metric("sglang_topp_in_flight") == 0
    assert sidecar.metric("sglang_topp_held_bytes") == 0
    eventually(lambda: is_closed(unread))
    with pytest.raises(ConnectionResetError):
        drain(unread)


def test_what_it_would_not_have_read_is_aborted_in_the_engine(engine, start, dial, eventually):
    sidecar = start(engine.url, max_stall_s=2)

    dial(sidecar, rollouts(sampling_params={**LARGE, "n": 2, "fault": "hang-second"}, stream=True))

    eventually(lambda: outcomes(sidecar, "slow") == 1)
    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 1)


def test_a_reader_that_only_pauses_gets_everything(engine, start, dial, stream):
    sidecar = start(engine.url, max_stall_s=5)
    connection = dial(sidecar, rollouts(sampling_params=LARGE, stream=stream))

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


def test_answers_of_any_route_are_to_be_read(engine, start, dial, eventually):
    sidecar = start(engine.url, max_stall_s=2)

    connection = dial(sidecar)
    connection.settimeout(1)
    with suppress(OSError):
        while True:
            connection.sendall(OPENAPI * 1000)

    eventually(lambda: is_closed(connection))


# -- headers that do not come ----------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost:"], ids=["none", "some"])
def test_headers_that_do_not_come(engine, start, dial, sent, eventually):
    sidecar = start(engine.url, max_stall_s=2)

    connections = [dial(sidecar, sent) for _ in range(50)]

    eventually(lambda: all(map(is_closed, connections)))
    assert sidecar.http.get("/healthz").status_code == 200


def test_headers_that_do_not_come_after_an_answer(engine, start, dial, eventually):
    sidecar = start(engine.url, max_stall_s=2)
    connection = dial(sidecar, HEALTHZ)
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")

    connection.sendall(b"GET /healthz")

    eventually(lambda: is_closed(connection))


def test_headers_that_never_end(engine, start, dial, eventually):
    sidecar = start(engine.url, max_stall_s=2)
    connection = dial(sidecar, b"GET /healthz HTTP/1.1\r\n")

    def drip():
        if not is_closed(connection):
            connection.sendall(b"a: b\r\n")
            time.sleep(0.1)
        return is_closed(connection)

    eventually(drip)


def test_a_connection_may_be_idle_between_requests(engine, start, dial):
    sidecar = start(engine.url, max_stall_s=3)
    connection = dial(sidecar)
    for _ in range(2):
        connection.sendall(HEALTHZ)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(5)
    assert not is_closed(connection)


# -- too many --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", rollouts()[:-1]], ids=["no headers", "no body"])
def test_connections_that_wait_make_room(engine, start, dial, sent, monkeypatch):
    monkeypatch.setattr("sglang_topp_server.connection._SPARE_CONNECTIONS", 10)
    sidecar = start(engine.url, max_in_flight=10)

    waiting = [dial(sidecar, sent) for _ in range(100)]

    for _ in range(3):
        with socket.create_connection(("127.0.0.1", sidecar.port), timeout=30) as connection:
            connection.sendall(HEALTHZ)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    is_open = [not is_closed(connection) for connection in waiting]
    assert sum(is_open) <= 20
    # Those that have waited longest are gone.
    assert is_open == sorted(is_open)


def test_requests_in_flight_do_not_make_room(engine, start, dial, monkeypatch, eventually):
    monkeypatch.setattr("sglang_topp_server.connection._SPARE_CONNECTIONS", 2)
    sidecar = start(engine.url, max_in_flight=10)
    flying = [dial(sidecar, rollouts(sampling_params={"fault": "hang"})) for _ in range(10)]
    eventually(lambda: engine.running == 10)

    waiting = [dial(sidecar) for _ in range(50)]

    eventually(lambda: sum(not is_closed(connection) for connection in waiting) <= 2)
    assert not any(map(is_closed, flying))
    engine.is_released = True
    assert all(connection.recv(4096).startswith(b"HTTP/1.1 200") for connection in flying)


# -- bodies that do not come -----------------------------------------------------------------------


def test_bodies_that_do_not_come_take_no_place(engine, start, dial, eventually):
    sidecar = start(engine.url, max_in_flight=2, max_stall_s=4)

    waiting = [dial(sidecar, rollouts()[:-1]) for _ in range(20)]

    assert sidecar.rollouts("b").status_code == 200
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0)
    eventually(lambda: outcomes(sidecar, "slow") == 20)
    for connection in waiting:
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"and fell 4 s behind, expected 65536 bytes/s" in answer
    eventually(lambda: all(map(is_closed, waiting)))
    assert len(engine.bodies) == 1


def test_a_body_that_only_drips_in(engine, start, dial, eventually):
    sidecar = start(engine.url, max_stall_s=2)
    connection = dial(sidecar, b"POST /rollouts HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")

    def drip():
        if not outcomes(sidecar, "slow"):
            connection.sendall(b"1\r\n \r\n")
            time.sleep(0.1)
        return outcomes(sidecar, "slow")

    eventually(drip)
    assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_long_body_waits_while_others_are_read(engine, start, dial):
    sidecar = start(engine.url, max_body_bytes=1 << 20, max_stall_s=4)
    head = b"POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    body = b'{"prompts": "a", "top_logprobs_p": 0.9}'.ljust(1 << 20)
    for _ in range(4):
        dial(sidecar, head % len(body) + body[:100_000])

    # A short one does not; nor does a long one for ever.
    assert sidecar.rollouts("b").status_code == 200
    assert sidecar.http.post("/rollouts", content=body).status_code == 200
