"""A prefill server and a decode server on the CPU: the decode server's answers are whole.

NVIDIA's `nixl` moves the KV cache, between host memory and host memory (`nixl_on_cpu`). A caller sends the
same request to both, as a router does. (`n` above 1 hangs there without the plugin, too.)
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_topp import formats
from sglang_topp_client import RolloutClient
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import check_nothing_is_held, check_rollout, checked_sets
from tests.engine.requests_during_push import InFlight
from tests.engine.start_servers import Engine, chunks_of, free_port, run_engine, run_gateway
from tests.engine.transformers_reference import MODEL_TOLERANCE, is_robust, nucleus, reference_logprobs
from tests.skip_missing_features import has_argument, needs, skip_without

skip_without(Feature.DISAGGREGATION)

if find_spec("nixl_cu13") is None:
    pytest.skip("nixl-cu13 is not installed: nothing moves a KV cache without a GPU", allow_module_level=True)

SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
PROMPT_IDS = [97 + i % 26 for i in range(200)]
WANTED = {"return_logprob": True, "top_logprobs_p": 0.8}
BOTH_FORMS = pytest.mark.parametrize("base64", [True, False], ids=["base64", "list"])


@dataclass(frozen=True)
class Pair:
    """A prefill server and the decode server that continues its requests."""

    prefill: Engine
    decode: Engine
    bootstrap_port: int

    def rooms(self, count: int | None = None) -> dict[str, Any]:
        """Return the bootstrap fields by which two servers meet for a request, or for each of its prompts."""
        rooms = [secrets.randbits(62) for _ in range(count or 1)]
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": rooms if count else rooms[0],
        }

    async def send(
        self,
        body: dict[str, Any],
        *,
        to_prefill: dict[str, Any] | None = None,
        num_prompts: int | None = None,
    ) -> tuple[httpx.Response, httpx.Response]:
        """Send a request to both servers, with `to_prefill` changed for the prefill server."""
        body = {**body, **self.rooms(num_prompts)}
        async with httpx.AsyncClient(timeout=300) as http:
            return await asyncio.gather(
                http.post(
                    f"{self.prefill.url}/generate", json={**body, **(to_prefill or {}), "stream": False}
                ),
                http.post(f"{self.decode.url}/generate", json=body),
            )

    async def generate(self, num_prompts: int | None = None, **body: Any) -> tuple[Any, Any]:
        """Return the parsed answers of both servers. Any status but 200 fails the test."""
        answers = await self.send(body, num_prompts=num_prompts)
        for answer in answers:
            assert answer.status_code == 200, answer.text
        return answers[0].json(), answers[1].json()


def run_role(
    model_path: Path, log: Path, role: str, port: int, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Engine]:
    """Run a server of this role, with the bootstrap server at `port`."""
    here = Path(__file__).parent / "nixl_on_cpu"
    environment = {
        # The transfer waits for CUDA events, and a retracted request's KV cache needs pinned memory.
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
        "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1",
        "UCX_TLS": "tcp,self",
        **(env or {}),
    }
    arguments = ["--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(port)]
    arguments += ["--chunked-prefill-size", "64", "--disaggregation-mode", role]
    if has_argument("disaggregation_decode_retraction_backup"):
        arguments += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return run_engine(model_path, log, *arguments, env=environment)


@pytest.fixture(scope="module")
def pair(model_path: Path, log_folder: Path) -> Iterator[Pair]:
    port = free_port()
    running = [run_role(model_path, log_folder / f"{role}.log", role, port) for role in ("prefill", "decode")]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        engines = [each.result() for each in [pool.submit(stack.enter_context, one) for one in running]]
        yield Pair(*engines, port)


@pytest.fixture(scope="module")
def reference_model(model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def check_against_reference(model: Any, prompt_ids: list[int], answer: Any, p: float) -> int:
    """Check the sets that rounding cannot change against the definition. Return their number."""
    sets = checked_sets(answer, p)
    expected = reference_logprobs(model, prompt_ids, answer["output_ids"], 1.0)
    compared = 0
    for t, (token_ids, logprobs) in enumerate(sets):
        np.testing.assert_allclose(logprobs, expected[t, token_ids], atol=MODEL_TOLERANCE)
        if is_robust(expected[t], p):
            compared += 1
            assert set(token_ids.tolist()) == nucleus(expected[t], p) | {answer["output_ids"][t]}
    return compared


def test_both_serve(pair: Pair) -> None:
    for engine, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        info = engine.http.get("/server_info").json()
        assert info["disaggregation_mode"] == role
        assert info["sglang_topp"]["active"] is True, info["sglang_topp"]["problems"]


@BOTH_FORMS
async def test_a_mixed_batch(pair: Pair, reference_model: Any, base64: bool) -> None:
    ps = [0.5, None, 0.8, 0.95, 1.0]
    prompts = [PROMPT_IDS[:n] for n in (3, 10, 64, 130, 1)]
    prefilled, answers = await pair.generate(
        num_prompts=5,
        input_ids=prompts,
        sampling_params=SAMPLING,
        return_logprob=True,
        top_logprobs_p=ps,
        return_logprobs_in_base64=base64,
    )
    compared = 0
    for first, answer, prompt, p in zip(prefilled, answers, prompts, ps, strict=True):
        assert len(answer["output_ids"]) == 12
        assert first["output_ids"] == answer["output_ids"][:1]
        if p is None:
            assert not formats.has_top_p(answer["meta_info"])
            continue
        compared += check_against_reference(reference_model, prompt, answer, p)
        ours, theirs = checked_sets(answer, p)[0], checked_sets(first, p)[0]
        for here, there in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(here, there)
    assert compared > 15


@pytest.mark.parametrize("max_new_tokens", [1, 2])
async def test_an_answer_that_ends_at_once(pair: Pair, max_new_tokens: int) -> None:
    """Its only token never passes through the decode server's sampler."""
    _, answer = await pair.generate(
        text="x", sampling_params={**SAMPLING, "max_new_tokens": max_new_tokens}, **WANTED
    )
    assert len(checked_sets(answer, 0.8)) == max_new_tokens


@pytest.mark.parametrize("start", [0, 1, 90])
async def test_prompt_sets_are_in_both_answers(pair: Pair, start: int) -> None:
    """The prefill server takes these sets in several chunks. SGLang's own log-probs stay in its answer."""
    prefilled, answer = await pair.generate(
        input_ids=PROMPT_IDS, sampling_params=SAMPLING, logprob_start_len=start, **WANTED
    )
    assert len(checked_sets(answer, 0.8)) == 12
    sets = [
        formats.decode_top_p(each["meta_info"], PROMPT_IDS[start:], side="input")
        for each in (prefilled, answer)
    ]
    assert sets[0] == sets[1]
    assert len(sets[0]) == 200 - start
    assert all(len(ids) for ids, _ in list(sets[0])[1:])


@BOTH_FORMS
async def test_streams(pair: Pair, base64: bool) -> None:
    body = {
        "input_ids": PROMPT_IDS[:100],
        "sampling_params": {**SAMPLING, "max_new_tokens": 48},
        "logprob_start_len": 95,
        "stream": True,
        "return_logprobs_in_base64": base64,
        **WANTED,
    }
    _, streamed = await pair.send(body)
    chunks = chunks_of(streamed.content)
    assert len(chunks) > 1  # SGLang merges chunks if its HTTP process falls behind
    for chunk in chunks:
        checked_sets(chunk, 0.8)
        assert len(formats.decode_top_p(chunk["meta_info"], PROMPT_IDS[95:100], side="input")) == 5
    assert len(chunks[-1]["output_ids"]) == 48


@needs(Feature.SAMPLER_SOURCE)
async def test_what_the_sampler_could_draw_is_the_native_mask(pair: Pair) -> None:
    """SGLang's own log-prob, for the first token too."""
    filters: list[dict[str, Any]] = [
        {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 0.6},
        {"top_k": 5, "top_p": 1.0},
        {"top_k": 400, "top_p": 0.9},
        {"top_k": 512, "min_p": 0.1, "top_p": 1.0},
    ]
    _, answers = await pair.generate(
        num_prompts=4,
        text=["a", "bc", "def", "ghij"],
        sampling_params=[{**SAMPLING, **each} for each in filters],
        return_logprob=True,
        return_sampling_mask=True,
        top_logprobs_source="sampler",
    )
    for answer in answers:
        sets = formats.decode_top_p(answer["meta_info"], answer["output_ids"], vocab_size=512)
        masks = answer["meta_info"]["output_token_sampling_mask"]
        assert len(sets) == len(masks) == 12
        for (token_ids, _), native in zip(sets, masks, strict=True):
            assert set(token_ids.tolist()) == set(native)


@needs(Feature.WEIGHT_VERSIONS)
async def test_each_token_has_the_version_of_the_server_that_drew_it(pair: Pair) -> None:
    async def name(engine: Engine, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        async with httpx.AsyncClient(timeout=60) as http:
            (await http.post(f"{engine.url}/update_weight_version", json=body)).raise_for_status()

    await name(pair.prefill, "7")
    _, answer = await pair.generate(text="x", sampling_params=SAMPLING, **WANTED)
    assert answer["meta_info"]["weight_versions"] == [
        {"version": "7", "start": 0, "end": 1},
        {"version": "default", "start": 1, "end": 12},
    ]
    await name(pair.prefill, "default")


async def test_aborted_requests_have_the_sets_of_what_they_show(pair: Pair) -> None:
    sampling = {**SAMPLING, "max_new_tokens": 2000}
    body = {"text": "x", "sampling_params": sampling, **WANTED, **pair.rooms()}
    async with InFlight.at(pair.prefill.url) as first, InFlight.at(pair.decode.url) as requests:
        first.send("to-abort", **body)
        requests.send("to-abort", **body, stream=True)
        await requests.move("to-abort", 2)
        await requests.abort("to-abort")
        answer = (await requests.answers())["to-abort"]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(checked_sets(answer, 0.8)) < 2000


async def test_many_at_once(pair: Pair) -> None:
    async def one(i: int) -> None:
        p = (0.3, 0.6, 0.9, 1.0)[i % 4]
        body = {
            "input_ids": [70 + i, *PROMPT_IDS[: 5 * i]],
            "sampling_params": {**SAMPLING, "max_new_tokens": 30},
        }
        _, answer = await pair.generate(
            **body, return_logprob=True, top_logprobs_p=p, return_logprobs_in_base64=bool(i % 2)
        )
        assert len(checked_sets(answer, p)) == 30

    await asyncio.gather(*(one(i) for i in range(24)))


@pytest.mark.parametrize("change", [{"max_new_tokens": 0}, {"n": 2}])
async def test_what_a_decode_server_cannot_answer_is_refused(pair: Pair, change: dict[str, int]) -> None:
    body = {"text": "x", "sampling_params": {**SAMPLING, **change}, **WANTED}
    assert [answer.status_code for answer in await pair.send(body)] == [400] * 2


async def test_more_top_logprobs_than_are_handed_over_are_refused(pair: Pair) -> None:
    """They end SGLang's prefill scheduler."""
    for num, status in ((129, 400), (128, 200)):
        body = {"text": "x", "sampling_params": SAMPLING, "top_logprobs_num": num, **WANTED}
        assert [answer.status_code for answer in await pair.send(body)] == [status] * 2


def test_through_a_router(pair: Pair, log_folder: Path) -> None:
    """The router joins the prompt's log-probs, which SGLang leaves on the prefill server, to the answer."""
    servers = (pair.prefill.url, str(pair.bootstrap_port), pair.decode.url)
    with run_gateway(log_folder / "pd-smg.log", disaggregated=servers) as url, RolloutClient(url) as client:
        (rollout,) = client.generate("hello", SAMPLING, top_logprobs_p=0.8)
        check_rollout(rollout, 0.8)
        body = {"input_ids": PROMPT_IDS, "sampling_params": SAMPLING, "logprob_start_len": 0, **WANTED}
        answer = httpx.post(f"{url}/generate", json=body, timeout=60).json()
        assert len(checked_sets(answer, 0.8)) == 12
        sets = formats.decode_top_p(answer["meta_info"], PROMPT_IDS, side="input")
        reported = [each[0] for each in answer["meta_info"]["input_token_logprobs"][1:]]
        np.testing.assert_array_equal(sets.sampled_logprobs[1:], np.array(reported, np.float32))


async def test_nothing_is_held_in_the_end(pair: Pair) -> None:
    """Runs before the mismatched requests below, whose sets wait for their time limit."""
    check_nothing_is_held(pair.prefill, pair.decode)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"top_logprobs_p": 0.5}, "top_logprobs_p"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "y"}, "prompt"),
        ({"sampling_params": {**SAMPLING, "temperature": 2.0}}, "sampling_params"),
    ],
)
async def test_a_set_of_something_else_is_an_error(pair: Pair, other: dict[str, Any], name: str) -> None:
    """Each form of answer is an error, and the servers continue."""
    body = {"text": "x", "sampling_params": {**SAMPLING, "max_new_tokens": 100}, **WANTED}
    (first, whole), (_, streamed) = await asyncio.gather(
        pair.send(body, to_prefill=other), pair.send({**body, "stream": True}, to_prefill=other)
    )
    assert first.status_code == 200
    assert whole.status_code == 500
    for answer in (whole, streamed):
        assert f"the prefill server was asked with other {name}; both need the same" in answer.text
    assert "output_ids" not in streamed.text
    _, answer = await pair.generate(text="x", sampling_params=SAMPLING, **WANTED)
    assert len(checked_sets(answer, 0.8)) == 12


async def test_a_prefill_server_that_is_not_asked_for_sets_is_an_error_at_once(pair: Pair) -> None:
    body = {"text": "x", "sampling_params": SAMPLING, **WANTED}
    first, answer = await pair.send(body, to_prefill={"top_logprobs_p": None})
    assert (first.status_code, answer.status_code) == (200, 500)
    # After 30 s of asking, the error would be another.
    assert "has none for this bootstrap room; was it asked for sets" in answer.text
