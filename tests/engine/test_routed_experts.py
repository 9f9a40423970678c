"""The experts of each token, beside its set: those of the weights that the answer names for the token.

The expected experts come from the router of a transformers model of each version's weights.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_tiny_model
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.pushed_weights import restore_weights, versions_of
from tests.engine.requests_during_push import InFlight, Scoring
from tests.engine.start_servers import Engine, chunks_of, run_engine
from tests.skip_missing_features import skip_without

skip_without(Feature.ROUTES)

P = 0.3
NUM_EXPERTS, TOP_K, LAYERS = 8, 2, 2
LENGTH = 200
LONG = [97 + i % 26 for i in range(150)]  # longer than a prefill chunk
PROMPTS = [[104, 105], LONG, [98] * 70]


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), vocab_size=VOCAB_SIZE, num_experts=NUM_EXPERTS)


@pytest.fixture(scope="module")
def moe_engine(moe_path: Path, log_folder: Path) -> Iterator[Engine]:
    arguments = ("--enable-return-routed-experts", "--chunked-prefill-size", "64")
    with run_engine(moe_path, log_folder / "moe.log", *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def moe_folders(moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights to push. "gate-1" and "gate-2" differ from `moe_path` in the last router and the LM head.

    They leave the KV cache as it was. If a pause keeps it, the experts of each position are still known.
    """
    folder = tmp_path_factory.mktemp("moe-weights")
    folders = {"default": moe_path}
    for seed in (1, 2):
        other, gate = folder / f"other-{seed}", folder / f"gate-{seed}"
        folders[other.name] = make_tiny_model(
            other, vocab_size=VOCAB_SIZE, seed=seed, num_experts=NUM_EXPERTS
        )
        model = AutoModelForCausalLM.from_pretrained(moe_path, dtype=torch.float32)
        donor = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
        model.lm_head.weight.data.copy_(donor.lm_head.weight.data)
        model.model.layers[-1].mlp.gate.weight.data.copy_(donor.model.layers[-1].mlp.gate.weight.data)
        model.save_pretrained(gate)
        folders[gate.name] = gate
    return folders


@pytest.fixture(scope="module")
def models(moe_folders: dict[str, Path]) -> dict[str, Any]:
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in moe_folders.items()
    }


@pytest.fixture
def as_before(moe_engine: Engine, moe_path: Path) -> Iterator[None]:
    yield
    restore_weights(moe_engine, moe_path)


def asking(prompt: list[int], max_new_tokens: int = LENGTH, **fields: Any) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "top_logprobs_p": P,
        "return_logprobs_in_base64": True,
        "return_routed_experts": True,
        **fields,
    }


def routes_of(answer: dict[str, Any]) -> np.ndarray:
    """Return the answer's experts, int32 [rows, LAYERS, TOP_K], in ascending order."""
    meta_info = answer["meta_info"]
    rows = np.frombuffer(base64.b64decode(meta_info["routed_experts"]), "<i4")
    return np.sort(rows.reshape(meta_info["routed_experts_shape"]), -1)


def check_routes(answer: dict[str, Any], models: dict[str, Any], start: int = 0) -> list[str]:
    """Check that each row is the router's choice under the weights that the answer names for its token.

    Positions before the last of the prompt belong to the weights of the first token. A row is not checked
    where the router's second and third choice are nearly equal.

    Returns:
        each token's version.
    """
    versions = versions_of(answer)
    prompt, output = answer["prompt_token_ids"], answer["output_ids"]
    rows = routes_of(answer)
    assert rows.shape == (max(len(prompt) + len(output) - 1 - start, 0), LAYERS, TOP_K)
    position = np.arange(start, start + len(rows))
    of_row = np.array(versions)[np.maximum(position - (len(prompt) - 1), 0)]
    num_checked = 0
    for version in set(versions):
        with torch.no_grad():
            logits = models[version](torch.tensor([prompt + output]), output_router_logits=True).router_logits
        scores = torch.stack(logits, 1).double().numpy()  # [P + T, LAYERS, NUM_EXPERTS]
        order = np.argsort(-scores, -1)
        sure = np.take_along_axis(scores, order, -1)
        sure = (sure[..., TOP_K - 1] - sure[..., TOP_K] > 2e-5)[position] & (of_row == version)[:, None]
        expected = np.sort(order[..., :TOP_K], -1)[position]
        np.testing.assert_array_equal(rows[sure], expected[sure])
        num_checked += sure.sum()
    assert num_checked >= 0.99 * rows[..., 0].size - 1
    return versions


def test_rows_are_the_routers_choice(moe_engine: Engine, models: dict[str, Any]) -> None:
    """Prompts in one pass or in several, from the cache or not, streamed or not, in both forms, n > 1."""
    hits = 0
    for prompt, stream, in_base64, n in itertools.product(PROMPTS, (False, True), (False, True), (1, 3)):
        for start in (0, len(prompt) - 1, len(prompt)):
            body = asking(prompt, 5, return_logprobs_in_base64=in_base64, routed_experts_start_len=start)
            body["sampling_params"]["n"] = n
            if stream:
                chunks = moe_engine.stream(**body)
                answers = [each for each in chunks if each["meta_info"]["finish_reason"]]
                assert len(chunks) > len(answers)
                assert sum("routed_experts" in each["meta_info"] for each in chunks) == n
            else:
                answer = moe_engine.generate(**body)
                answers = [answer] if n == 1 else answer
            for answer in answers:
                checked_sets(answer, P)
                assert set(check_routes(answer, models, start)) == {"default"}
                hits += answer["meta_info"]["cached_tokens"]
    assert hits


@pytest.mark.parametrize("max_new_tokens", [0, 1])
def test_prompts_alone(moe_engine: Engine, models: dict[str, Any], max_new_tokens: int) -> None:
    answer = moe_engine.generate(**asking(LONG, max_new_tokens))
    rows = routes_of(answer)
    assert len(rows) == len(LONG) - 1 + max_new_tokens
    if max_new_tokens:
        check_routes(answer, models)


def test_answers_that_stop_at_a_string(moe_engine: Engine, models: dict[str, Any]) -> None:
    text = moe_engine.generate(**asking(PROMPTS[0], 40, top_logprobs_source=None))["text"]
    body = asking(PROMPTS[0], 40)
    body["sampling_params"] |= {"stop": [*text.replace("\ufffd", "")], "temperature": 1.0}
    answer = moe_engine.generate(**body)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    check_routes(answer, models)


def test_the_samplers_sets(moe_engine: Engine, models: dict[str, Any]) -> None:
    body = asking(PROMPTS[0], 8, top_logprobs_source="sampler")
    del body["top_logprobs_p"]
    body["sampling_params"]["top_p"] = 0.8
    check_routes(moe_engine.generate(**body), models)


def test_a_request_without_sets_is_answered_as_by_sglang(moe_engine: Engine) -> None:
    body = {"input_ids": [104], "sampling_params": {"max_new_tokens": 2}, "return_routed_experts": True}
    meta_info = moe_engine.generate(**body)["meta_info"]
    assert "routed_experts" in meta_info
    assert "routed_experts_shape" not in meta_info


@pytest.mark.parametrize(
    ("mode", "pushed"),
    [("in_place", ("gate-1", "gate-2", "default")), ("retract", ("other-1", "gate-1", "other-2"))],
)
@pytest.mark.usefixtures("as_before")
async def test_rows_agree_with_the_versions_over_pushes(
    moe_engine: Engine,
    moe_folders: dict[str, Path],
    models: dict[str, Any],
    mode: str,
    pushed: Sequence[str],
) -> None:
    async with InFlight.at(moe_engine.url) as requests:
        starts: dict[str, int] = {}

        def send(name: str, prompt: list[int], *args: Any, **fields: Any) -> None:
            starts[name] = (0, len(prompt) - 1, len(prompt))[len(starts) % 3]
            requests.send(name, **asking(prompt, *args, routed_experts_start_len=starts[name], **fields))

        for i in range(6):
            send(f"form-{i}", PROMPTS[i % 3], stream=i % 2 == 0)
        await requests.arrive()
        await requests.move("form-0", 4)
        for i, version in enumerate(pushed):
            await requests.pause(mode)
            for j in range(3):  # each start
                send(f"late-{i}-{j}", PROMPTS[1], 12)
            if mode == "retract":
                await requests.order("/flush_cache")
            await requests.push(moe_folders[version], version, flush_cache=False)
            await requests.go_on()
            await requests.move("form-0", 16)
        answers = await requests.answers()

    for name, answer in answers.items():
        checked_sets(answer, P)
        versions = check_routes(answer, models, starts[name])
        if name.startswith("late"):
            assert set(versions) <= set(pushed[int(name.split("-")[1]) :])
        else:
            assert [version for version, _ in itertools.groupby(versions)] == ["default", *pushed]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("is_resumable", [False, True])
@pytest.mark.usefixtures("as_before")
async def test_aborts_while_generation_is_paused(
    moe_engine: Engine, models: dict[str, Any], mode: str, is_resumable: bool
) -> None:
    """SGLang answers a request that is aborted in its queue without rows, unless it may be resumed."""
    async with InFlight.at(moe_engine.url) as requests:
        resumed = {"resumed_tokens": 0} if is_resumable else {}
        for name, prompt in (("short", PROMPTS[0]), ("long", LONG)):
            requests.send(name, **asking(prompt, 3000, stream=True, **resumed))
        for name in requests.streams:
            await requests.move(name, 4)
        await requests.pause(mode)
        await requests.order("/abort_request", abort_all=True)
        if not is_resumable:
            await requests.go_on()
        answers = await requests.answers()
    for answer in answers.values():
        if mode == "retract" and not is_resumable:
            assert "SGLang sent no routed_experts" in answer["error"]["message"]
            continue
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"]
        check_routes(answer, models)


@pytest.mark.usefixtures("as_before")
async def test_a_cached_row_of_older_weights_is_not_the_first_tokens(
    moe_engine: Engine, moe_folders: dict[str, Path], models: dict[str, Any]
) -> None:
    """SGLang keeps the KV slot of a prompt that it has cached, and with it the row of the prompt's end."""
    moe_engine.generate(**asking(LONG, 1))
    async with InFlight.at(moe_engine.url) as requests:
        await requests.push(moe_folders["gate-1"], "gate-1", flush_cache=False)
    for start in (0, len(LONG) - 1):
        answer = moe_engine.generate(**asking(LONG, 4, routed_experts_start_len=start))
        assert set(check_routes(answer, models, start)) == {"gate-1"}


@pytest.mark.usefixtures("as_before")
async def test_a_prompt_that_two_weights_prefilled_is_an_error(
    moe_engine: Engine, moe_folders: dict[str, Path]
) -> None:
    async with InFlight.at(moe_engine.url) as requests:
        scoring = Scoring(moe_engine, requests)
        for _ in range(20):
            body = asking(scoring.ids(), 3, stream=True)
            answering = asyncio.create_task(requests.http.post("/generate", json=body))
            if await scoring.meets_it("in_place", answering):
                break
        else:
            pytest.fail("no pause met a prompt while it was prefilled")
        await requests.push(moe_folders["gate-1"], "gate-1", flush_cache=False)
        await requests.go_on()
        answer = await answering
    reason = chunks_of(answer.content)[-1]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    assert "weights were pushed while the prompt was prefilled" in reason["message"]


def test_a_server_that_records_none_refuses(engine: Engine) -> None:
    answer = engine.post(**asking([104], 2))
    assert answer.status_code == 400
    assert "return_routed_experts: " in answer.text
    assert "--enable-return-routed-experts" in answer.text


async def test_retractions_for_memory_on_two_ranks_without_overlap(
    moe_path: Path, log_folder: Path, models: dict[str, Any]
) -> None:
    arguments = ["--enable-return-routed-experts", "--disable-overlap-schedule", "--tp-size", "2"]
    arguments += ["--max-total-tokens", "512", "--schedule-conservativeness", "0.05"]
    # Without `ignore_eos`, SGLang admits more requests than it can finish.
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "logit_bias": {"0": -100.0}}
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with run_engine(moe_path, log_folder / "moe-tight.log", *arguments, env=environment) as engine:
        for _ in range(10):  # after a retraction, SGLang admits fewer requests for a while
            async with InFlight.at(engine.url) as requests:
                for i in range(12):
                    requests.send(f"{i}", **asking([97] * (10 + i), sampling_params=sampling))
                answers = (await requests.answers()).values()
            for answer in answers:
                checked_sets(answer, P)
                check_routes(answer, models)
            if sum(answer["meta_info"]["num_retractions"] for answer in answers):
                return
    raise AssertionError("no request was retracted")
