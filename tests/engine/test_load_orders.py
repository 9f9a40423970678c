"""The fields are served whether SGLang's HTTP server, its engine, or the plugin is loaded first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_topp_patches.releases import Feature, refused
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.start_servers import Engine, run_engine

SAMPLING = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0}
ASKED = {"text": "hello there", "sampling_params": SAMPLING, "return_logprob": True}
P = 0.9
BASE64 = "output_top_p_logprobs_val_base64"

ORDERS = ["spawned", "called", "engine_first"]
if not refused(Feature.HTTP_WORKERS):
    # uvicorn cannot start workers in a spawned process, whose standard input they would not inherit.
    ORDERS.append("called with two HTTP workers")


@pytest.fixture(scope="module", params=ORDERS)
def served(request: pytest.FixtureRequest, model_path: Path, log_folder: Path) -> Iterator[Engine]:
    order, _, workers = request.param.partition(" ")
    arguments = ["--tokenizer-worker-num", "2"] if workers else []
    with run_engine(
        model_path,
        log_folder / f"{request.param.replace(' ', '_')}.log",
        *arguments,
        env={"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"},
        module=("tests.engine.serve_in_order", order),
    ) as running:
        yield running


def test_the_server_says_that_it_serves(served: Engine) -> None:
    info = served.http.get("/server_info").json()["sglang_topp"]
    assert (info["active"], info["problems"]) == (True, [])


def test_sets_come_as_lists_and_as_arrays(served: Engine) -> None:
    for fields in (
        {"top_logprobs_p": P},
        {"top_logprobs_p": P, "return_logprobs_in_base64": True},
        {"sampling_params": {**SAMPLING, "custom_params": {"top_logprobs_p": P}}},
    ):
        answer = served.generate(**{**ASKED, **fields})
        assert len(checked_sets(answer, P)) == 6
        assert (BASE64 in answer["meta_info"]) is ("return_logprobs_in_base64" in fields)
    many = served.generate(
        **{**ASKED, "text": ["a", "b"], "sampling_params": {**SAMPLING, "n": 2}}, top_logprobs_p=P
    )
    assert [len(checked_sets(one, P)) for one in many] == [6] * 4
    last = served.stream(**ASKED, top_logprobs_p=P)[-1]
    assert len(checked_sets(last, P)) == 6


def test_bad_values_are_refused_and_nothing_is_added_unasked(served: Engine) -> None:
    for fields in ({"top_logprobs_p": 7}, {"return_logprobs_in_base64": "yes"}, {"resumed_tokens": -1}):
        answer = served.post(**ASKED, **fields)
        assert answer.status_code == 400
        assert next(iter(fields)) in answer.text
    assert not any("top_p" in key for key in served.generate(**ASKED)["meta_info"])


def test_slimes_fields_come(served: Engine) -> None:
    meta_info = served.generate(**ASKED, return_top_p_token_ids=True)["meta_info"]
    assert meta_info["top_p_token_ids"]


def test_resumed_tokens_are_served_or_refused(served: Engine, model_path: Path) -> None:
    first = served.generate(**ASKED, return_prompt_token_ids=True)
    ids = [*first["prompt_token_ids"], *first["output_ids"][:3]]
    answer = served.post(input_ids=ids, sampling_params=SAMPLING, return_logprob=True, resumed_tokens=3)
    if refused(Feature.RESUMED):
        assert answer.status_code == 400
        assert "resumed_tokens: answers are not resumed here" in answer.text
    else:
        resumed = answer.json()
        assert resumed["meta_info"]["resumed_tokens"] == 3
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        assert resumed["text"] == tokenizer.decode(
            [*ids[-3:], *resumed["output_ids"]], skip_special_tokens=True
        )
