"""`POST /rollouts` when it fails: disconnects, size limits, time limits, and bad bodies."""

import json
import threading
from http.client import HTTPResponse

from sglang_topp_client import RolloutClient

# -- disconnects ------------------------------------------------------------------------------------


def test_hanging_up_aborts_in_the_engine(sidecar, engine, stream, eventually):
    connection = sidecar.send(prompts=["a", "b"], sampling_params={"n": 2, "fault": "hang"}, stream=stream)
    eventually(lambda: engine.running == 2)

    connection.close()

    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 2)
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="aborted") == 1)
    assert sidecar.metric("sglang_topp_in_flight") == 0


def test_hanging_up_in_the_middle_of_a_stream_aborts_the_rest(sidecar, engine, eventually):
    fields = {"prompts": "a", "sampling_params": {"n": 2, "fault": "hang-second"}, "stream": True}
    with sidecar.http.stream("POST", "/rollouts", json=fields) as answer:
        assert json.loads(next(answer.iter_lines()))["sample_index"] == 0

    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 1)
    assert sidecar.metric("sglang_topp_samples_total") == 1


EXPECTING = b"POST /rollouts HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"


def test_hanging_up_while_the_body_is_sent_is_no_error(sidecar, engine, eventually):
    with sidecar.dial(EXPECTING % 100) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")  # it is being read
        connection.sendall(b"{")

    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="aborted") == 1)
    assert engine.bodies == []


def test_a_client_that_stops_waiting_aborts_in_the_engine(sidecar, engine, eventually):
    with RolloutClient(sidecar.url) as client:
        waiting = threading.Thread(target=client.close)
        rollouts = client.stream("a", {"n": 2, "fault": "hang-second"}, top_logprobs_p=0.9)
        next(rollouts)
        waiting.start()
        waiting.join()

    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 1)


# -- limits ----------------------------------------------------------------------------------------


def test_one_request_too_many_gets_429_and_retry_after(engine, start, stream, eventually):
    sidecar = start(engine.url, max_in_flight=2)
    connections = [sidecar.send(sampling_params={"fault": "hang"}) for _ in range(2)]
    eventually(lambda: engine.running == 2)

    answer = sidecar.rollouts("b", stream=stream)

    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "OverloadedError"
    with sidecar.dial(EXPECTING % 100) as unread:
        assert unread.recv(4096).startswith(b"HTTP/1.1 429")
    assert len(engine.bodies) == 2
    engine.is_released = True
    for connection in connections:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.close()
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0)
    assert sidecar.rollouts("b").status_code == 200
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="rejected") == 2)


def test_samples_are_counted_and_a_request_below_the_limit_comes_in_whole(engine, start, eventually):
    sidecar = start(engine.url, max_in_flight=4)
    first = sidecar.send(sampling_params={"fault": "hang", "n": 3})
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 3)
    second = sidecar.send(prompts=["a", "b"], sampling_params={"fault": "hang", "n": 4})
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 3 + 2 * 4)
    assert sidecar.rollouts("c").status_code == 429
    second.close()
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 3)
    assert sidecar.rollouts("c").status_code == 200
    first.close()
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0)


def test_the_client_comes_back_after_429(engine, start, eventually):
    sidecar = start(engine.url, max_in_flight=1)
    blocking = sidecar.send(sampling_params={"fault": "hang"})
    eventually(lambda: engine.running == 1)

    with RolloutClient(sidecar.url) as client:
        results = []
        caller = threading.Thread(target=lambda: results.extend(client.generate("b", top_logprobs_p=0.9)))
        caller.start()
        eventually(lambda: sidecar.metric("sglang_topp_errors_total", status="429", type="OverloadedError"))
        engine.is_released = True
        caller.join()
    blocking.close()
    assert len(results) == 1


def test_a_body_that_is_declared_too_large_is_refused_unread(engine, start):
    sidecar = start(engine.url, max_body_bytes=1000)
    answer = HTTPResponse(sidecar.dial(EXPECTING % 1001))
    answer.begin()
    assert answer.status == 413
    assert b"got 1001 bytes, expected at most 1000" in answer.read()


def test_a_chunked_body_is_counted_as_it_arrives(engine, start):
    sidecar = start(engine.url, max_body_bytes=1000)

    def endless():
        for _ in range(2000):
            yield b" " * 1000

    answer = sidecar.http.post("/rollouts", content=endless())

    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert sidecar.rollouts("a").status_code == 200  # on the same connection, or another


def test_a_body_of_exactly_the_limit_is_taken(engine, start):
    sidecar = start(engine.url, max_body_bytes=1000)
    body = b'{"prompts": "a"}'

    assert sidecar.http.post("/rollouts", content=body.ljust(1000)).status_code == 200
    assert sidecar.http.post("/rollouts", content=body.ljust(1001)).status_code == 413


def test_too_many_samples_are_413(engine, start):
    sidecar = start(engine.url, max_samples=6)

    assert sidecar.rollouts(["a", "b"], sampling_params={"n": 3}).status_code == 200
    answer = sidecar.rollouts(["a", "b"], sampling_params=[{"n": 3}, {"n": 4}])
    assert answer.status_code == 413
    assert "got 7, expected at most 6 samples" in answer.json()["error"]["message"]
    assert sidecar.rollouts("a", sampling_params={"n": 10**15}).status_code == 413


# -- timeouts --------------------------------------------------------------------------------------


def test_a_time_limit_of_the_engine_is_reported_in_its_words(sidecar, stream):
    answer = sidecar.rollouts("a", fault="late", timeout_s=60, stream=stream)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "RequestTimeoutError"
    assert "the engine's own words: too late" in answer.json()["error"]["message"]


def test_a_request_that_takes_longer_than_it_may_is_aborted(sidecar, engine, stream, eventually):
    answer = sidecar.rollouts("a", fault="hang", timeout_s=0.5, stream=stream)

    assert answer.status_code == 504
    assert answer.json()["error"] == {
        "type": "RequestTimeoutError",
        "message": "timeout_s: 0.5 s passed before every sample finished",
        "status": 504,
    }
    eventually(lambda: engine.running == 0)


def test_a_stream_that_runs_out_of_time_has_no_end_mark(sidecar, engine, eventually):
    answer = sidecar.rollouts("a", sampling_params={"n": 2}, fault="hang-second", timeout_s=6, stream=True)

    record, error = [json.loads(line) for line in answer.text.splitlines()]
    assert record["sample_index"] == 0
    assert (error["error"]["type"], error["error"]["status"]) == ("RequestTimeoutError", 504)
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="failed") == 1)


def test_a_prompt_whose_samples_fail_is_one_error_and_the_others_go_on(sidecar, engine, eventually):
    params = [{"n": 2, "fault": "refuse"}, {"n": 2, "fault": "hang"}]
    connection = sidecar.send(prompts=["a", "b"], sampling_params=params, stream=True)
    eventually(lambda: len(engine.bodies) == 2 and engine.running == 1)
    engine.is_released = True

    (answer := HTTPResponse(connection)).begin()
    error, *records, end = map(json.loads, answer.read().splitlines())
    assert (error["prompt_index"], error["error"]["status"]) == (0, 400)
    assert [(record["prompt_index"], record["sample_index"]) for record in records] == [(1, 0), (1, 1)]
    assert end == {"done": True, "rollouts": 2}


def test_only_the_caller_limits_the_time_of_a_request(sidecar):
    assert "timeout_s" not in sidecar.http.get("/info").json()["limits"]


# -- invalid bodies --------------------------------------------------------------------------


def test_garbage_is_400(sidecar, eventually):
    bodies = [b"", b"{", b"\xff\xfe", b"prompts=a", b'{"prompts": "a"} x', b"[" * 100_000]
    for body in bodies:
        answer = sidecar.http.post("/rollouts", content=body)

        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the body: got b")
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="rejected") == len(bodies))


def test_a_wrong_field_is_400_and_reaches_no_engine(sidecar, engine, stream):
    answer = sidecar.rollouts("a", top_logprobs_p=1.5, stream=stream)

    assert answer.status_code == 400
    assert "top_logprobs_p: got 1.5, expected" in answer.json()["error"]["message"]
    assert engine.bodies == []
