"""`check_servers` names the field that a gateway loses. The gateway is a proxy before the real engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import sglang
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang_topp.errors import BadRequestError, MissingCandidateSetsError, ServerError, WireError
from sglang_topp_client import RolloutClient
from sglang_topp_patches.releases import Feature
from sglang_topp_server.cli.main import main
from tests.engine.start_servers import Engine, free_port, run_sidecar
from tests.skip_missing_features import needs

Change = Callable[[dict[str, Any]], None]


@contextmanager
def run_proxy(
    engine: Engine, *, of_request: Change | None = None, of_answer: Change | None = None, wraps: bool = False
) -> Iterator[str]:
    """Run a gateway that changes the body of requests to `/generate`, and the `meta_info` of answers.

    With `wraps`, it returns a list of the answer.
    """

    async def forward(request: Request) -> Response:
        body = json.loads(await request.body())
        if of_request is not None:
            of_request(body)
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{engine.url}/generate", json=body)
        content = answer.json()
        if of_answer is not None and answer.status_code == 200:
            of_answer(content["meta_info"])
        return Response(
            json.dumps([content] if wraps else content), answer.status_code, media_type="application/json"
        )

    app = Starlette(routes=[Route("/generate", forward, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "uvicorn did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def drop(name: str) -> Change:
    return lambda fields: fields.pop(name, None)


def test_engine_and_faithful_gateway_pass(engine: Engine) -> None:
    with run_proxy(engine) as proxy, RolloutClient([engine.url, proxy]) as client:
        client.check_servers()


def test_doctor_checks_an_engine(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", engine.url]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{engine.url}: SGLang {sglang.__version__}, model ")
    assert last.endswith("is active, and no field is lost on the way")


@pytest.mark.parametrize(
    "field",
    [
        "rid",
        "return_logprob",
        "top_logprobs_p",
        "return_logprobs_in_base64",
        pytest.param("top_logprobs_source", marks=needs(Feature.SAMPLER_SOURCE)),
        pytest.param("resumed_tokens", marks=needs(Feature.RESUMED)),
    ],
)
def test_a_lost_request_field_is_named(engine: Engine, field: str) -> None:
    kind = MissingCandidateSetsError if field.startswith("top_logprobs") else WireError
    with run_proxy(engine, of_request=drop(field)) as proxy, RolloutClient(proxy) as client:
        with pytest.raises(kind, match=f"{field}: {proxy} lost this field") as caught:
            client.check_servers()
        assert caught.value.field == field


@pytest.mark.parametrize(
    "field",
    [
        "output_top_p_logprobs_val_base64",
        "output_top_p_logprobs_idx_base64",
        "output_top_p_logprobs_lengths",
        "weight_versions",
    ],
)
def test_a_lost_answer_field_is_named(engine: Engine, field: str) -> None:
    with (
        run_proxy(engine, of_answer=drop(field)) as proxy,
        RolloutClient(proxy) as client,
        pytest.raises(WireError, match=f"{field}: {proxy} lost this field: it is missing in an answer"),
    ):
        client.check_servers()


def test_a_changed_id_is_named_because_it_could_not_be_aborted(engine: Engine) -> None:
    with (
        run_proxy(engine, of_answer=lambda meta: meta.update(id="other")) as proxy,
        RolloutClient(proxy) as client,
        pytest.raises(WireError, match=r"rid: .* came back without this id"),
    ):
        client.check_servers()


def set_to_wrong(name: str) -> Change:
    return lambda body: body.update({name: "wrong"} if name in body else {})


@needs(Feature.RESUMED)
def test_a_refusal_that_names_a_field_of_some_releases_passes(engine: Engine) -> None:
    with (
        run_proxy(engine, of_request=set_to_wrong("resumed_tokens")) as proxy,
        RolloutClient(proxy) as client,
    ):
        client.check_servers()


def test_any_other_refusal_raises(engine: Engine) -> None:
    with (
        run_proxy(engine, of_request=set_to_wrong("top_logprobs_p")) as proxy,
        RolloutClient(proxy) as client,
        pytest.raises(BadRequestError, match="top_logprobs_p"),
    ):
        client.check_servers()


def test_an_answer_of_another_form_is_refused(engine: Engine) -> None:
    with (
        run_proxy(engine, wraps=True) as proxy,
        RolloutClient(proxy) as client,
        pytest.raises(WireError, match=r"/generate: got \[.* expected"),
    ):
        client.check_servers()


def test_a_ready_sidecar_passes(engine: Engine) -> None:
    with run_sidecar(engine.url) as sidecar, RolloutClient(sidecar) as client:
        client.check_servers()


def test_a_sidecar_without_its_engine_says_so() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with (
        run_sidecar(nowhere) as sidecar,
        RolloutClient(sidecar, max_retries=0) as client,
        pytest.raises(ServerError, match=f"{sidecar} is not ready: .*{nowhere}"),
    ):
        client.check_servers()
