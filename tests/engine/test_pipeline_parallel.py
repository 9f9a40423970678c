"""Two pipeline stages on the CPU: the last one takes the sets, and the first one answers with them.

The cache is small, so that requests are retracted. Budgets are small, and some logits leave no set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_topp import formats
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import check_nothing_is_held, check_whole, checked_sets
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.logit_processors import NoNumber, num_sampled
from tests.engine.requests_during_push import InFlight
from tests.engine.start_servers import Engine, run_engine
from tests.skip_missing_features import skip_without

skip_without(Feature.PIPELINE)

PER_SAMPLE, IN_FLIGHT = 60 * VOCAB_SIZE, 150 * VOCAB_SIZE
SAMPLING = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
WANTED = {"return_logprob": True, "top_logprobs_p": 0.9}
WHOLE = {**WANTED, "top_logprobs_num": VOCAB_SIZE}
PROMPT_IDS = [97 + i % 26 for i in range(200)]
# Far fewer than 50, the interval in which SGLang sends the tokens of an unstreamed request.
PASSES_UNTIL_ABORTED = 25
BOTH_FORMS = pytest.mark.parametrize("base64", [True, False], ids=["base64", "list"])


@pytest.fixture(scope="module")
def stages(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    environment = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE": str(PER_SAMPLE),
        "SGLANG_TOPP_MAX_CANDIDATES_IN_FLIGHT": str(IN_FLIGHT),
    }
    arguments = ["--pp-size", "2", "--chunked-prefill-size", "64", "--enable-custom-logit-processor"]
    arguments += ["--max-total-tokens", "512", "--max-running-requests", "16"]
    arguments += ["--schedule-conservativeness", "0.05"]
    with run_engine(model_path, log_folder / "pp.log", *arguments, env=environment) as running:
        yield running


def test_it_is_served(stages: Engine) -> None:
    info = stages.http.get("/server_info").json()
    assert info["sglang_topp"]["active"] is True
    assert info["pp_size"] == 2


@BOTH_FORMS
def test_generated_sets_of_a_mixed_batch(stages: Engine, base64: bool) -> None:
    ps = [0.5, None, 0.9, 1.0] if base64 else [0.1, None, 0.3, 0.2]
    sampling = [
        {**SAMPLING, **each}
        for each in ({"temperature": 0}, {}, {"regex": "[a-z]{20}"}, {"temperature": 0.7})
    ]
    request = {**WHOLE, "top_logprobs_p": ps, "return_logprobs_in_base64": base64}
    for _ in range(2):
        answers = stages.generate(text=["a", "bc", "def", "ghij"], sampling_params=sampling, **request)
        for answer, p in zip(answers, ps, strict=True):
            if p is None:
                assert not formats.has_top_p(answer["meta_info"])
            else:
                assert len(check_whole(answer, p)) == 20


def test_parallel_samples(stages: Engine) -> None:
    request = {**WHOLE, "top_logprobs_p": [0.5, 0.8]}
    answers = stages.generate(input_ids=[[70, 71, 72], [80]], sampling_params={**SAMPLING, "n": 3}, **request)
    for i, answer in enumerate(answers):
        assert len(check_whole(answer, [0.5, 0.8][i // 3])) == 20
    assert len({tuple(answer["output_ids"]) for answer in answers[:3]}) > 1


@pytest.mark.parametrize("start", [0, 1, 90])
@pytest.mark.parametrize("max_new_tokens", [0, 3])
def test_prompt_sets_over_several_chunks(stages: Engine, start: int, max_new_tokens: int) -> None:
    """`max_new_tokens` 0 takes a path without the sampler."""
    answer = stages.generate(
        input_ids=PROMPT_IDS,
        sampling_params={**SAMPLING, "max_new_tokens": max_new_tokens},
        logprob_start_len=start,
        **{**WHOLE, "top_logprobs_p": 0.6},
    )
    assert len(check_whole(answer, 0.6, PROMPT_IDS[start:])) == max_new_tokens


@BOTH_FORMS
def test_streams_hold_the_sets_of_their_tokens(stages: Engine, base64: bool) -> None:
    chunks = stages.stream(
        input_ids=PROMPT_IDS[:100],
        sampling_params=SAMPLING,
        logprob_start_len=95,
        return_logprobs_in_base64=base64,
        **WANTED,
    )
    assert len(chunks) > 1  # SGLang merges chunks if its HTTP process falls behind
    for chunk in chunks:
        checked_sets(chunk, 0.9)
        assert len(formats.decode_top_p(chunk["meta_info"], PROMPT_IDS[95:100], side="input")) == 5
    assert len(chunks[-1]["output_ids"]) == 20


async def test_retracted_requests_have_one_set_per_token(stages: Engine) -> None:
    async def send(http: httpx.AsyncClient, i: int) -> Any:
        body = {
            "input_ids": [70 + i, *PROMPT_IDS[: 20 + i]],
            "sampling_params": {"max_new_tokens": 60, "temperature": 1.0, "logit_bias": {"0": -100.0}},
            "logprob_start_len": 10,
            "return_logprobs_in_base64": True,
            **WHOLE,
            "top_logprobs_p": 0.4,
        }
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async with httpx.AsyncClient(base_url=stages.url, timeout=300) as http:
        answers = await asyncio.gather(*(send(http, i) for i in range(8)))
    for i, answer in enumerate(answers):
        assert len(check_whole(answer, 0.4, PROMPT_IDS[9 : 20 + i])) == 60
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


async def test_aborted_requests_have_the_sets_of_what_they_show(stages: Engine) -> None:
    async def stop(requests: InFlight, name: str) -> None:
        await requests.move(name, 2)
        await requests.abort(name)

    names = [f"pp-{i}" for i in range(3)]
    async with InFlight.at(stages.url) as requests:
        for name in names:
            sampling = {**SAMPLING, "max_new_tokens": 400}
            # The sets are so small that no budget ends a request before its abort.
            requests.send(
                name,
                text="x",
                stream=True,
                sampling_params=sampling,
                return_logprob=True,
                top_logprobs_p=0.2,
            )
        await asyncio.gather(*(stop(requests, name) for name in names))
        answers = list((await requests.answers()).values())
    assert all(checked_sets(answer, 0.2) for answer in answers)
    # On a busy machine, one may have ended before the abort arrived.
    assert "abort" in [answer["meta_info"]["finish_reason"]["type"] for answer in answers]


def test_a_row_without_a_set_ends_its_request_and_no_other(stages: Engine, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    sampling = [
        {"max_new_tokens": 200, "custom_params": {"at": 5, "slow_after": 5, "seen": str(seen)}},
        {"custom_params": {"at": 100}},
    ]
    with ThreadPoolExecutor(2) as pool:
        broken, whole = pool.map(
            lambda params: stages.post(
                text="x",
                sampling_params={**SAMPLING, "temperature": 0, **params},
                custom_logit_processor=NoNumber().to_str(),
                return_logprobs_in_base64=True,
                **WHOLE,
            ),
            sampling,
        )
    assert broken.status_code == 500, f"{broken.text[:2000]} {broken.text[-2000:]}"
    assert "no candidate set at position 5" in broken.text
    assert "NaN" in broken.text
    assert num_sampled(seen) <= 5 + PASSES_UNTIL_ABORTED
    assert len(check_whole(whole.json(), 0.9)) == 20


# -- budgets: the first stage decides, and all stages end the request in the same step -----------------


def _vocabulary(max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a request whose sets are the whole vocabulary."""
    sampling = {**SAMPLING, "max_new_tokens": max_new_tokens}
    asked = {**WANTED, "top_logprobs_p": 1, "return_logprobs_in_base64": True}
    return {"text": "hello", "sampling_params": sampling, **asked, **fields}


def test_a_sample_beyond_its_budget_ends_in_every_stage(stages: Engine, tmp_path: Path) -> None:
    for tokens in (61, 200):
        seen = tmp_path / f"seen {tokens}"
        body = _vocabulary(tokens, custom_logit_processor=NoNumber().to_str())
        body["sampling_params"]["custom_params"] = {"at": -1, "slow_after": 61, "seen": str(seen)}
        answer = stages.post(**body)
        assert answer.status_code == 413
        # The last stage soon takes no more sets of this request.
        assert num_sampled(seen) <= 61 + PASSES_UNTIL_ABORTED
        assert f"expected at most {PER_SAMPLE} for one sample" in answer.text
        assert len(checked_sets(stages.generate(**_vocabulary(20)), 1.0)) == 20
    prompt = stages.post(**_vocabulary(1, text=None, input_ids=PROMPT_IDS, logprob_start_len=0))
    assert prompt.status_code == 413
    assert "candidates" in prompt.text
    check_nothing_is_held(stages)


async def test_what_was_accepted_ends_whole_even_beyond_what_fits_in_flight(stages: Engine) -> None:
    async with httpx.AsyncClient(base_url=stages.url, timeout=300) as http:
        answers = await asyncio.gather(*(http.post("/generate", json=_vocabulary(60)) for _ in range(6)))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert len(checked_sets(answer.json(), 1.0)) == 60
    check_nothing_is_held(stages)
