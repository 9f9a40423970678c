"""Two HTTP workers and narrow budgets: each route serves sets or refuses them, within each request's budget.

The engine reports log-probs from before temperature. Releases without HTTP workers run with one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sglang_topp import formats
from sglang_topp_patches.releases import Feature, refused
from tests.engine.candidate_set_checks import check_nothing_is_held, checked_sets
from tests.engine.start_servers import Engine, chunks_of, run_engine

SAMPLING = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0}
WANTED = {"return_logprob": True, "top_logprobs_p": 0.9}
PER_SAMPLE, IN_FLIGHT = 100_000, 30_000
VOCAB = 512

# A release without HTTP workers still has the other settings.
WORKERS = 1 if refused(Feature.HTTP_WORKERS) else 2


@pytest.fixture(scope="module")
def server(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    environment = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE": str(PER_SAMPLE),
        "SGLANG_TOPP_MAX_CANDIDATES_IN_FLIGHT": str(IN_FLIGHT),
        # SGLang's own import takes longer than its supervisor waits for a worker.
        "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300",
    }
    arguments = ["--max-running-requests", "32"]
    if WORKERS > 1:
        arguments += ["--tokenizer-worker-num", str(WORKERS)]
    with run_engine(model_path, log_folder / "server.log", *arguments, env=environment) as running:
        yield running


def _each_worker(engine: Engine, **body: Any) -> list[httpx.Response]:
    """Return answers on separate connections, so many that every HTTP worker gives one."""
    with ThreadPoolExecutor(8) as pool:
        return list(
            pool.map(lambda _: httpx.post(f"{engine.url}/generate", json=body, timeout=180), range(16))
        )


# -- HTTP workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base64", [True, False], ids=["base64", "list"])
@pytest.mark.parametrize("place", ["body", "custom_params"])
def test_every_http_worker_serves_sets(server: Engine, place: str, base64: bool) -> None:
    asked = {"top_logprobs_p": 0.9, "return_logprobs_in_base64": base64}
    body: dict[str, Any] = {"text": "hello", "return_logprob": True, "sampling_params": SAMPLING}
    if place == "body":
        body |= asked
    else:
        body["sampling_params"] = {**SAMPLING, "custom_params": asked}
    for answer in _each_worker(server, **body):
        assert answer.status_code == 200, answer.text
        assert len(checked_sets(answer.json(), 0.9)) == 6


def test_every_http_worker_checks_the_field(server: Engine) -> None:
    for answer in _each_worker(server, text="hello", return_logprob=True, top_logprobs_p=7):
        assert answer.status_code == 400
        assert "top_logprobs_p: got 7" in answer.text


def test_every_http_worker_reports_the_patch_set(server: Engine) -> None:
    for _ in range(8):
        report = httpx.get(f"{server.url}/server_info", timeout=60).json()["sglang_topp"]
        assert report["active"] is True, report["problems"]
        assert report["budget"]["max_candidates_per_sample"] == PER_SAMPLE
        assert report["budget"]["max_candidates_in_flight"] == IN_FLIGHT


def test_every_http_worker_guards_the_other_routes(server: Engine) -> None:
    for _ in range(8):
        answer = httpx.post(f"{server.url}/api/generate", json={"prompt": "x", **WANTED}, timeout=60)
        assert answer.status_code == 400
        assert "/generate" in answer.json()["error"]


# -- log-probs before temperature --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("stream", [False, True])
def test_another_temperature_than_1_is_refused(server: Engine, temperature: float, stream: bool) -> None:
    sampling = {**SAMPLING, "temperature": temperature}
    answer = server.post(text="hello", sampling_params=sampling, stream=stream, **WANTED)
    assert answer.status_code == 400
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in answer.text
    without = server.generate(text="hello", sampling_params=sampling, return_logprob=True)
    assert len(without["output_ids"]) == 6


@pytest.mark.parametrize("temperature", [0, 1])
def test_temperature_1_and_greedy_requests_are_served(server: Engine, temperature: float) -> None:
    sampling = {**SAMPLING, "temperature": temperature}
    checked_sets(server.generate(text="hello", sampling_params=sampling, **WANTED), 0.9)


def test_the_setting_is_reported(server: Engine) -> None:
    (note,) = server.http.get("/server_info").json()["sglang_topp"]["notes"]
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in note


# -- budgets -----------------------------------------------------------------------------------------


def _whole(max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a request whose sets are the whole vocabulary."""
    return {
        "text": "hello",
        "sampling_params": {**SAMPLING, "max_new_tokens": max_new_tokens},
        "return_logprob": True,
        "top_logprobs_p": 1,
        "return_logprobs_in_base64": True,
        **fields,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_beyond_its_budget_is_an_error_that_says_what_fits(server: Engine, stream: bool) -> None:
    fitting = PER_SAMPLE // VOCAB
    whole = server.generate(**_whole(fitting))
    sets = formats.decode_top_p(whole["meta_info"], whole["output_ids"])
    assert len(sets) == fitting
    answer = server.post(**_whole(fitting + 1), stream=stream)
    assert answer.status_code == (200 if stream else 413)
    assert f"expected at most {PER_SAMPLE} for one sample" in answer.text
    assert f"{fitting} positions fit" in answer.text
    if stream:
        *shown, last = chunks_of(answer.content)
        for chunk in shown:
            formats.decode_top_p(chunk["meta_info"], chunk["output_ids"])
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["meta_info"]["finish_reason"]["status_code"] == 413
        assert "output_top_p_logprobs_lengths" not in last["meta_info"]


def test_lists_have_a_sixteenth_of_the_budget(server: Engine) -> None:
    fitting = PER_SAMPLE // VOCAB // 16
    assert server.post(**_whole(fitting, return_logprobs_in_base64=False)).status_code == 200
    answer = server.post(**_whole(fitting + 1, return_logprobs_in_base64=False))
    assert answer.status_code == 413
    assert "return_logprobs_in_base64" in answer.text


def test_a_prompt_beyond_the_budget_is_an_error(server: Engine) -> None:
    body = _whole(1, logprob_start_len=0, text="x" * (PER_SAMPLE // VOCAB + 2))
    answer = server.post(**body)
    assert answer.status_code == 413
    assert "the sets of the prompt's positions" in answer.text
    assert f"{PER_SAMPLE} candidates (SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE)" in answer.text
    assert server.post(**{**body, "text": "x" * 50}).status_code == 200


@pytest.mark.parametrize("form", ["whole", "stream", "openai"])
def test_beyond_what_fits_in_flight_new_requests_wait_and_running_ones_end_whole(
    server: Engine, form: str
) -> None:
    """A new request that asks for no sets is served."""
    fitting = PER_SAMPLE // VOCAB

    def ask(_: int) -> str:
        # A new connection each time, because another HTTP worker may hold the sets.
        if form == "openai":
            try:
                with _openai_client(server) as fresh:
                    _complete(fresh, 1)
            except openai.APIStatusError as error:
                return f"{error.status_code}: {error}"
            return ""
        answer = httpx.post(f"{server.url}/generate", json=_whole(1, stream=form == "stream"), timeout=60)
        if form == "stream" and "error" in (event := chunks_of(answer.content)[-1]):
            return f"{event['error']['code']}: {event['error']['message']}"
        return "" if answer.is_success else f"{answer.status_code}: {answer.text}"

    def whole(_: int) -> httpx.Response:
        return httpx.post(f"{server.url}/generate", json=_whole(fitting), timeout=60)

    refused, answers = "", []
    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(4) as asking:
        for _ in range(10):  # until a new request meets a worker that holds too much
            running = [pool.submit(whole, i) for i in range(8)]
            while not refused and not all(each.done() for each in running):
                refused = next(filter(None, asking.map(ask, range(4))), "")
            answers += [each.result() for each in running]
            if refused:
                break
    assert refused.startswith("429: ")
    assert f"more than the {IN_FLIGHT} that fit" in refused
    assert {answer.status_code for answer in answers} <= {200, 429}
    accepted = [answer.json() for answer in answers if answer.status_code == 200]
    assert accepted
    for answer in accepted:
        assert len(formats.decode_top_p(answer["meta_info"], answer["output_ids"])) == fitting
    check_nothing_is_held(server)
    assert server.post(text="x", sampling_params=SAMPLING).status_code == 200
    assert server.post(**_whole(fitting)).status_code == 200


def test_who_hangs_up_holds_nothing(server: Engine) -> None:
    with server.http.stream("POST", "/generate", json={**_whole(1000), "stream": True}) as answer:
        next(answer.iter_lines())
    check_nothing_is_held(server)


# -- OpenAI's form -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Engine) -> Iterator[openai.OpenAI]:
    with _openai_client(server) as openai_client:
        yield openai_client


def _openai_client(server: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=180)


def _complete(client: openai.OpenAI, tokens: int, **request: Any) -> Any:
    extra = {"top_logprobs_p": 1, "return_logprobs_in_base64": True, "ignore_eos": True}
    return client.completions.create(
        model="default", prompt="hello", max_tokens=tokens, extra_body=extra, **request
    )


def _chat(client: openai.OpenAI, tokens: int, **request: Any) -> Any:
    extra = {"top_logprobs_p": 1, "return_logprobs_in_base64": True, "ignore_eos": True}
    return client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=tokens,
        extra_body=extra,
        **request,
    )


@pytest.mark.parametrize("ask", [_complete, _chat])
def test_openais_form_beyond_its_budget_is_an_error(
    server: Engine, client: openai.OpenAI, ask: Callable[..., Any]
) -> None:
    fitting = PER_SAMPLE // VOCAB
    (entry,) = ask(client, fitting).sglext["candidate_sets"]
    assert len(formats.decode_top_p(entry, entry["output_ids"])) == fitting
    with pytest.raises(openai.APIStatusError, match=f"{fitting} positions fit") as error:
        ask(client, fitting + 1)
    assert error.value.status_code == 413
    shown = []
    with (
        pytest.raises(openai.APIError, match=f"{fitting} positions fit") as streamed,
        ask(client, fitting + 1, stream=True) as chunks,
    ):
        shown.extend(chunks)
    assert streamed.value.code == 413
    assert not [chunk for chunk in shown if getattr(chunk, "sglext", None)]
    check_nothing_is_held(server)


def test_openais_form_holds_nothing_for_who_hangs_up(server: Engine, client: openai.OpenAI) -> None:
    with _complete(client, 190, stream=True) as chunks:
        next(iter(chunks))
    check_nothing_is_held(server)


@pytest.mark.parametrize("ask", [_complete, _chat])
def test_openais_form_is_refused_at_another_temperature(
    client: openai.OpenAI, ask: Callable[..., Any]
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            ask(client, 4, temperature=0.6, stream=stream)


# -- a reader that is slower than the engine -----------------------------------------------------------


def test_a_paused_reader_costs_its_sets_and_no_more(engine: Engine) -> None:
    """Chunks that SGLang drops for a slow reader are never encoded.

    SGLang makes a cumulative chunk for every token, and drops those that the reader is too slow for. If each
    were encoded at once, they would take a gigabyte.
    """
    tokens = 600
    with httpx.stream("POST", f"{engine.url}/generate", json={**_whole(tokens), "stream": True}) as answer:
        parts = answer.iter_bytes()
        first = next(parts)
        before = _resident_bytes(engine.process.pid)
        most = 0
        for _ in range(30):
            most = max(most, _resident_bytes(engine.process.pid))
            time.sleep(0.5)
        *_, last = chunks_of(b"".join([first, *parts]))
    sets = formats.decode_top_p(last["meta_info"], last["output_ids"])
    assert len(sets) == tokens
    assert most - before < 200 * 2**20


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
