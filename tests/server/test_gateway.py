"""The sidecar in front of a fake gateway, which treats routes like `smg` 1.13 and may drop fields."""

import json
from contextlib import ExitStack

import httpx
import pytest

from tests.server.conftest import Served

KNOWN_TO_ALL = ("input_ids", "text", "sampling_params", "return_logprob", "stream", "rid")


class FakeGateway:
    """A gateway that passes `/generate` to its workers in turn, and `/get_server_info` to the first.

    Attributes may be changed while it serves.
    """

    def __init__(self, *workers: str) -> None:
        self.workers = [{"url": url, "is_healthy": True} for url in workers]
        self.lists_workers = True
        self.drops_fields = self.drops_sets = False
        self.key: str | None = None
        self._turn = 0

    async def app(self, scope, receive, send):
        """Serve as an ASGI app."""
        status, body = await self._answer(scope, receive)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope, receive):
        path, headers = scope["path"], dict(scope["headers"])
        key = headers.get(b"authorization", b"").decode()
        if path == "/health":
            return 200, b"OK"
        if path == "/workers" and self.lists_workers:
            return 200, json.dumps({"workers": self.workers}).encode()
        async with httpx.AsyncClient(headers={"authorization": key} if key else {}, timeout=60) as http:
            if path == "/get_server_info":
                answer = await http.get(self.workers[0]["url"] + path)
            elif path == "/generate":
                if self.key is not None and key != f"Bearer {self.key}":
                    return 401, b"{}"
                body = json.loads((await receive())["body"])
                if self.drops_fields:
                    body = {name: body[name] for name in body if name in KNOWN_TO_ALL}
                self._turn += 1
                worker = self.workers[self._turn % len(self.workers)]
                answer = await http.post(worker["url"] + path, json=body)
                if self.drops_sets:
                    return 200, answer.content.replace(b"output_top_p_logprobs_lengths", b"dropped")
            else:
                return 404, b'{"error": {"code": "unknown_url"}}'
        return answer.status_code, answer.content


@pytest.fixture
def workers(serve_engine):
    with ExitStack() as stack:
        yield [stack.enter_context(serve_engine()) for _ in range(2)]


@pytest.fixture
def gateway(stack, workers):
    gateway = FakeGateway(*(worker.url for worker in workers))
    gateway.url = stack.enter_context(Served(gateway.app, lifespan="off")).url
    return gateway


def reason(sidecar):
    answer = sidecar.http.get("/readyz")
    return "" if answer.status_code == 200 else answer.json()["error"]["message"]


def test_a_gateway_of_patched_workers_is_ready_and_balances(gateway, workers, start):
    sidecar = start(gateway.url)

    for _ in range(4):
        answer = sidecar.rollouts("a")
        assert answer.status_code == 200
        assert answer.json()["rollouts"][0]["candidates"]
    assert [len(worker.bodies) for worker in workers] == [2, 2]
    assert sum(len(worker.probes) for worker in workers) == 1
    assert sidecar.http.get("/info").json()["engine"]["model_path"] == "fake-model"


# Without a list of workers, only the first answer of the second worker reveals it.
@pytest.mark.parametrize(("at", "is_listed"), [(0, True), (1, True), (0, False)])
def test_a_worker_that_is_not_patched_is_named(gateway, workers, start, eventually, at, is_listed):
    gateway.lists_workers = is_listed
    workers[at].patch = None
    sidecar = start(gateway.url, wait=False)

    eventually(lambda: "runs without the sglang-topp plugin" in reason(sidecar))
    assert (workers[at].url in reason(sidecar)) == is_listed
    assert f"behind the gateway at {gateway.url}" in reason(sidecar)
    answer = sidecar.rollouts("a")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "PatchError")
    assert not any(worker.bodies for worker in workers)
    assert sidecar.http.get("/info").json()["patch"]["active"] is False

    # The gateway stops using the worker.
    gateway.workers[at]["is_healthy"] = False
    if at == 1:
        eventually(sidecar.is_ready)


def test_a_worker_that_joins_later_is_probed(gateway, workers, start, eventually, monkeypatch):
    monkeypatch.setattr("sglang_topp_server.engine._POLL_READY_S", 0.1)
    late = gateway.workers.pop()
    workers[1].patch = {"active": False, "problems": ["Sampler.forward is gone"]}
    sidecar = start(gateway.url)

    gateway.workers.append(late)

    eventually(lambda: "Sampler.forward is gone" in reason(sidecar))
    assert late["url"] in reason(sidecar)


def test_workers_that_only_the_gateway_reaches_are_ignored(gateway, workers, start):
    gateway.workers += [{"url": url} for url in ("http://127.0.0.1:1", "grpc://worker:1", "http://a b", "")]
    gateway.workers += [{"url": 3}, {}, None]
    sidecar = start(gateway.url)

    gateway.workers[2:] = []
    assert sidecar.rollouts("a").status_code == 200


@pytest.mark.parametrize("what", ["drops_fields", "drops_sets"])
def test_a_gateway_that_drops_fields_is_found_at_the_start(gateway, workers, start, eventually, what):
    setattr(gateway, what, True)
    sidecar = start(gateway.url, wait=False)

    eventually(lambda: "drop fields that it does not know" in reason(sidecar))
    assert gateway.url in reason(sidecar)
    answer = sidecar.rollouts("a")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "PatchError")
    assert not any(worker.bodies for worker in workers)

    setattr(gateway, what, False)
    eventually(sidecar.is_ready)


def test_a_gateway_that_begins_to_drop_fields_is_no_longer_ready(gateway, start, eventually):
    sidecar = start(gateway.url)
    gateway.drops_fields = True

    assert sidecar.rollouts("a").json()["error"]["type"] == "MissingCandidateSetsError"
    eventually(lambda: "drop fields that it does not know" in reason(sidecar))


def test_a_gateways_own_key_is_sent(gateway, start, eventually):
    gateway.key = "theirs"
    without = start(gateway.url, wait=False)
    eventually(lambda: "/generate: HTTP 401" in reason(without))

    assert start(gateway.url, engine_api_key="theirs").rollouts("a").status_code == 200


def test_a_gateway_without_workers_is_waited_for(gateway, workers, start, eventually):
    listed, gateway.workers = gateway.workers, []
    sidecar = start(gateway.url, wait=False)
    eventually(lambda: "/get_server_info: HTTP 500" in reason(sidecar))

    gateway.workers = listed
    eventually(sidecar.is_ready)
