"""The sidecar before an engine that fails, starts, restarts, or is not patched."""

import json
import socket

import pytest

from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError, RolloutError
from sglang_topp_client import RolloutClient
from sglang_topp_server.engine import EngineClient


@pytest.mark.parametrize(
    ("fault", "status", "kind", "words"),
    [
        ("refuse", 400, "BadRequestError", "the engine's own words: top_k must be positive"),
        ("fail", 502, "ServerError", "the engine's own words: CUDA error"),
        ("cut", 502, "TransportError", "Response payload is not completed"),
        ("give-up", 502, "AbortedError", "by hand"),
        ("wrong-sets", 502, "SampledTokenMissingError", "10 is not among the 4 candidates"),
        ("no-sets", 503, "MissingCandidateSetsError", "sglang-topp doctor"),
    ],
)
def test_the_engines_errors_arrive_with_their_cause(sidecar, stream, fault, status, kind, words, eventually):
    answer = sidecar.rollouts("a", fault=fault, stream=stream)

    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["status"]) == (kind, status)
    assert words in error["message"]
    assert sidecar.metric("sglang_topp_errors_total", status=str(status), type=kind) == 1
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="failed") == 1)


@pytest.mark.parametrize("path", ["/rollouts", "/scores"])
def test_weights_pushed_during_a_request_are_503_with_retry_after(sidecar, path, stream):
    if path == "/rollouts":
        answer = sidecar.rollouts("a", fault="pushed", stream=stream)
    else:
        answer = sidecar.scores([[5, 505]], stream=stream)

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert (error["type"], error["status"]) == ("ServerError", 503)
    assert "weights were pushed while the prompt was scored; send the request again" in error["message"]


def test_pushed_weights_fail_one_prompt_of_a_stream_with_503(sidecar):
    answer = sidecar.scores([[5, 6], [5, 505]], stream=True)

    (error,) = [line["error"] for line in map(json.loads, answer.text.splitlines()) if "error" in line]
    assert (error["type"], error["status"]) == ("ServerError", 503)


def test_a_full_engine_is_429_with_its_own_retry_after(sidecar, monkeypatch, stream):
    monkeypatch.setattr("sglang_topp_client.retry_policy.delay_s", lambda *_: 0.0)

    answer = sidecar.rollouts("a", fault="full", stream=stream)

    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert "the queue is full" in answer.json()["error"]["message"]


def test_whole_answers_are_all_or_an_error(sidecar, engine, eventually):
    params = [{"n": 2}, {"fault": "refuse"}, {"fault": "hang"}]
    answer = sidecar.rollouts(["a", "b", "c"], sampling_params=params)

    assert answer.status_code == 400
    assert "rollouts" not in answer.json()
    eventually(lambda: engine.running == 0)


def test_in_a_stream_the_other_prompts_go_on(sidecar, eventually):
    params = [{"fault": "give-up"}, {"n": 2}, {"fault": "refuse"}, {}]
    answer = sidecar.rollouts(["a", "b", "c", "d"], sampling_params=params, stream=True)

    assert answer.status_code == 200
    *lines, end = [json.loads(line) for line in answer.text.splitlines()]
    failed = {line["prompt_index"]: line["error"] for line in lines if "error" in line}
    assert {at: (error["type"], error["status"]) for at, error in failed.items()} == {
        0: ("AbortedError", 502),
        2: ("BadRequestError", 400),
    }
    assert sorted(line["prompt_index"] for line in lines if "error" not in line) == [1, 1, 3]
    assert end == {"done": True, "rollouts": 3}
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="partial") == 1)


@pytest.mark.parametrize(
    ("fault", "kind"), [("no-sets", MissingCandidateSetsError), ("give-up", RolloutError)]
)
def test_the_client_raises_the_named_error_through_the_sidecar(sidecar, fault, kind):
    with RolloutClient(sidecar.url, max_retries=0) as client, pytest.raises(kind):
        client.generate("a", {"fault": fault}, top_logprobs_p=0.9)


# -- the engine's state -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (None, "runs without the sglang-topp plugin"),
        ({}, "runs without the sglang-topp plugin"),
        ("yes", "runs without the sglang-topp plugin"),
        ({"active": False, "problems": ["Sampler.forward is gone"]}, "Sampler.forward is gone"),
        ({"active": "true", "seams": 3, "version": [1]}, "not active"),
        ({"active": True, "version": "0.1.0"}, "does not report its model's sizes"),
        ({"active": True, "model": {"vocab_size": -1}}, "install the same sglang-topp there and here"),
    ],
)
def test_an_unpatched_engine_is_never_ready_and_never_asked(engine, start, stream, patch, words):
    engine.patch = patch
    sidecar = start(engine.url, wait=False)

    for fields in ({}, {"top_logprobs_p": None}):
        answer = sidecar.rollouts("a", stream=stream, **fields)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "PatchError")
        assert words in answer.json()["error"]["message"]
    assert engine.bodies == []

    ready = sidecar.http.get("/readyz")
    assert ready.status_code == 503
    assert words in ready.json()["error"]["message"]
    assert sidecar.http.get("/healthz").status_code == 200
    info = sidecar.http.get("/info").json()
    assert (info["service"], info["ready"]) == ("sglang-topp", False)
    assert info["patch"]["active"] is (isinstance(patch, dict) and patch.get("active") is True)
    assert sidecar.metric("sglang_topp_engine_ready") == 0


def test_an_engine_that_starts_is_waited_for(engine, start, eventually):
    engine.health = 503
    sidecar = start(engine.url, wait=False)

    assert sidecar.rollouts("a").status_code == 503
    ready = sidecar.http.get("/readyz")
    assert ready.status_code == 503
    assert "/health answers 503" in ready.json()["error"]["message"]

    engine.health = 200
    eventually(sidecar.is_ready)
    assert sidecar.rollouts("a").status_code == 200
    assert sidecar.metric("sglang_topp_engine_ready") == 1


def test_without_an_engine_requests_are_503(start):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    sidecar = start(f"http://127.0.0.1:{port}", wait=False)

    answer = sidecar.rollouts("a")
    assert answer.status_code == 503
    assert f"127.0.0.1:{port} does not answer" in answer.json()["error"]["message"]
    assert sidecar.http.get("/readyz").status_code == 503


def test_an_engine_that_goes_and_comes_back(start, serve_engine, stream, eventually):
    with serve_engine() as engine:
        sidecar = start(engine.url)
    answer = sidecar.rollouts("a", stream=stream)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "TransportError")
    assert "nothing listens at" in answer.json()["error"]["message"]
    eventually(lambda: not sidecar.is_ready())

    with serve_engine(port=engine.port):
        eventually(sidecar.is_ready)
        assert sidecar.rollouts("a", stream=stream).status_code == 200


def test_an_engine_that_comes_back_unpatched_is_noticed(start, engine, eventually):
    sidecar = start(engine.url)
    engine.patch = None

    answer = sidecar.rollouts("a", fault="no-sets")

    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "MissingCandidateSetsError")
    eventually(lambda: sidecar.rollouts("a").json().get("error", {}).get("type") == "PatchError")
    assert not sidecar.is_ready()


def test_another_server_at_the_engines_address_is_not_ready(start):
    other = start("http://127.0.0.1:1", wait=False)
    sidecar = start(other.url, wait=False)

    answer = sidecar.rollouts("a")
    assert answer.status_code == 503
    assert "/server_info: HTTP 404" in answer.json()["error"]["message"]


@pytest.mark.parametrize("where", ["server.api.sample_endpoint.to_record", "client.run.Run._take"])
def test_a_server_error_is_not_a_bare_500(sidecar, monkeypatch, caplog, stream, where):
    def broken(*_):
        raise KeyError("a fault of our own")

    monkeypatch.setattr(f"sglang_topp_{where}", broken)
    answer = sidecar.rollouts("a", stream=stream)

    # If a stream has begun, its status has already been sent, and the last line reports the error.
    error = json.loads(answer.text.splitlines()[-1])["error"]
    assert answer.status_code == (200 if stream and "to_record" in where else 500)
    assert (error["type"], error["status"]) == ("ServerError", 500)
    assert error["message"] == "the sidecar failed: KeyError: 'a fault of our own'"
    assert 'raise KeyError("a fault of our own")' in caplog.text


def test_an_invalid_address_is_refused_at_the_start():
    with pytest.raises(InvalidInputError, match="got 'http://a b'"):
        EngineClient("http://a b")


def test_a_busy_engine_that_was_ready_still_gets_requests(engine, start, eventually):
    sidecar = start(engine.url)
    engine.health = 503
    sidecar.rollouts("a", fault="fail")  # makes the state doubtful, so the sidecar probes again at once
    eventually(lambda: not sidecar.is_ready())

    assert sidecar.rollouts("a").status_code == 200
