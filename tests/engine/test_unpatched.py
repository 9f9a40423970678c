"""A patched and an unpatched SGLang answer requests without sets alike, and clients tell them apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_topp.errors import MissingCandidateSetsError, PatchError, SglangToppError
from sglang_topp_client import RolloutClient
from tests.engine.start_servers import Engine, chunks_of, run_engine, run_gateway, run_sidecar

# SGLang's own allow-list of plugins: only the CPU platform, which it needs to start here.
UNPATCHED = {"SGLANG_PLUGINS": "sglang_topp_cpu"}

REQUESTS: list[dict[str, Any]] = [
    {"text": "hello", "sampling_params": {"max_new_tokens": 12, "temperature": 0}},
    {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 5, "temperature": 0, "n": 2}},
    {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 12, "temperature": 0, "top_k": 40},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [65, 66],
        "return_text_in_logprobs": True,
        "return_sampling_mask": True,
    },
    {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 3, "custom_params": {"mine": 1}, "temperature": 0},
    },
    {"text": "hello", "sampling_params": {"max_new_tokens": -3}},
    {
        "text": "hello",
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
    },
]
# As ids, because an unpatched 0.5.12 does not return those of a text.
HELLO = list(b"hello")
# These values depend on the request or the clock.
VARYING = {"id", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details"}


@pytest.fixture(scope="module")
def unpatched(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    with run_engine(
        model_path, log_folder / "unpatched.log", "--chunked-prefill-size", "64", env=UNPATCHED
    ) as running:
        yield running


def _comparable(answer: Any) -> Any:
    """Return the answer without fields that differ between requests, and with log-probs to 4 decimals."""
    if isinstance(answer, list):
        return [_comparable(each) for each in answer]
    if isinstance(answer, dict):
        return {key: _comparable(value) for key, value in answer.items() if key not in VARYING}
    return round(answer, 4) if isinstance(answer, float) else answer


@pytest.mark.parametrize("request_body", REQUESTS, ids=range(len(REQUESTS)))
@pytest.mark.parametrize("stream", [False, True])
def test_without_the_feature_the_answers_are_the_same(
    engine: Engine, unpatched: Engine, request_body: dict[str, Any], stream: bool
) -> None:
    def ask(server: Engine) -> tuple[int, dict[str, str], Any]:
        answer = server.post(**request_body, stream=stream)
        if stream:
            # How many tokens one chunk holds depends on timing; each sample's last one holds them all.
            last = {chunk.get("index", 0): chunk for chunk in chunks_of(answer.content)}
            body = [last[index] for index in sorted(last)] or answer.text
        else:
            body = answer.json()
        return answer.status_code, {"type": answer.headers["content-type"]}, _comparable(body)

    assert ask(engine) == ask(unpatched)


def test_the_client_refuses_an_answer_without_the_sets(unpatched: Engine) -> None:
    answer = unpatched.generate(
        text="hello", sampling_params={"max_new_tokens": 3}, return_logprob=True, top_logprobs_p=0.9
    )
    assert (
        "output_top_p_logprobs" not in answer["meta_info"]
    )  # ignored with a 200, which the client must notice
    with (
        RolloutClient(unpatched.url, kind="sglang") as client,
        pytest.raises((MissingCandidateSetsError, PatchError)) as caught,
    ):
        client.generate("hello", {"max_new_tokens": 3}, top_logprobs_p=0.9)
    assert isinstance(caught.value, SglangToppError)


def test_the_client_refuses_scores_without_the_sets(unpatched: Engine) -> None:
    with RolloutClient(unpatched.url, kind="sglang") as client:
        for p in (0.9, None):
            # Log-probs alone are refused too, because this server does not say that they come from one
            # version.
            with pytest.raises(MissingCandidateSetsError):
                client.score([HELLO], top_logprobs_p=p)


def test_server_info_does_not_claim_the_patch_set(unpatched: Engine) -> None:
    assert "sglang_topp" not in unpatched.http.get("/server_info").json()


def test_the_sidecar_before_it_is_not_ready_and_refuses(unpatched: Engine) -> None:
    with run_sidecar(unpatched.url) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/healthz").status_code == 200
        assert "without the sglang-topp plugin" in why_not_ready(http)
        for p in (0.9, None):
            refused = http.post("/rollouts", json={"prompts": ["hello"], "top_logprobs_p": p})
            assert refused.status_code == 503
            assert "plugin" in refused.json()["error"]["message"]


def test_behind_a_gateway_it_is_named(engine: Engine, unpatched: Engine, tmp_path: Path) -> None:
    with (
        run_gateway(tmp_path / "smg.log", engine.url, unpatched.url) as gateway,
        run_sidecar(gateway) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        reason = why_not_ready(http)
        assert f"the engine at {unpatched.url} behind the gateway at {gateway}" in reason
        assert "without the sglang-topp plugin" in reason
        assert http.post("/rollouts", json={"prompts": ["hello"]}).status_code == 503


def why_not_ready(http: httpx.Client) -> str:
    """Return the sidecar's status, once it has probed the engine."""
    for _ in range(300):
        answer = http.get("/readyz")
        if "was not asked yet" not in answer.text:
            break
        time.sleep(0.1)
    assert answer.status_code == 503
    return str(answer.json()["error"]["message"])
