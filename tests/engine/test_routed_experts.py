"""The experts of each token, beside its set: those of the weights that the answer names for the token.

The expected experts come from the router of a transformers model of each version's weights.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import string
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_tiny_model
from sglang_topp.batch import collate_rollouts
from sglang_topp_client import AsyncRolloutClient, Rollout
from sglang_topp_patches.hooks import release_key
from sglang_topp_patches.releases import Feature, installed, refused
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.pushed_weights import restore_weights, versions_of
from tests.engine.requests_during_push import InFlight, Scoring
from tests.engine.start_servers import Engine, chunks_of, run_engine, run_sidecar
from tests.skip_missing_features import can_flush_while_paused, needs, skip_without

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


def check_routes(
    answer: dict[str, Any], models: dict[str, Any], start: int = 0, pushed: Sequence[str] = ()
) -> list[str]:
    """Check that each row is the router's choice under the weights that drew its token.

    Positions before the last of the prompt belong to the weights of the first token. A row is not checked
    where the router's second and third choice are nearly equal.

    Args:
        answer: the answer, which names its tokens' versions from SGLang 0.5.19 on.
        models: a transformers model of each version.
        start: the position of the first row.
        pushed: the versions that may have drawn tokens after "default", in order.

    Returns:
        each token's version.
    """
    if refused(Feature.WEIGHT_VERSIONS):
        versions = drawing_versions(answer, models, ["default", *pushed])
    else:
        versions = versions_of(answer)
    check_rows(routes_of(answer), answer["prompt_token_ids"], answer["output_ids"], versions, models, start)
    return versions


def drawing_versions(answer: dict[str, Any], models: dict[str, Any], order: Sequence[str]) -> list[str]:
    """Return the version that drew each token: the one that gives it the log-prob that SGLang reports.

    The versions follow each other in `order`, so similar log-probs of a few tokens mislead nobody.
    """
    prompt, output = answer["prompt_token_ids"], answer["output_ids"]
    reported = torch.tensor([logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]])
    errors = []
    for version in order:
        with torch.no_grad():
            logits = models[version](torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]
        errors.append((logprobs - reported).abs().tolist())
    # The least sum of errors of the tokens so far, and their versions, if the last one is `order[i]`.
    best: list[tuple[float, list[int]]] = [(0.0, [])] * len(order)
    for t in range(len(output)):
        best = [
            (total + errors[i][t], [*path, i])
            for i in range(len(order))
            for total, path in [min(best[: i + 1])]
        ]
    total, path = min(best)
    assert total <= 0.01 * len(output)
    return [order[i] for i in path]


def check_rows(
    rows: np.ndarray,
    prompt: list[int],
    output: list[int],
    versions: Sequence[str],
    models: dict[str, Any],
    start: int = 0,
) -> None:
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
    body = asking(PROMPTS[0], 300)
    body["sampling_params"] |= {"stop": [*string.ascii_lowercase, *string.digits[:6]], "n": 3}
    for answer in moe_engine.generate(**body):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        checked_sets(answer, P)
        check_routes(answer, models)


@needs(Feature.SAMPLER_SOURCE)
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
            send(f"form-{i}", PROMPTS[i % 3], 5 * LENGTH, stream=i % 2 == 0)
        await requests.arrive()
        await requests.move("form-0", 4)
        for i, version in enumerate(pushed):
            await requests.pause(mode)
            for j in range(3):  # each start
                send(f"late-{i}-{j}", PROMPTS[1], 12)
            if mode == "retract" and can_flush_while_paused():
                await requests.order("/flush_cache")
            await requests.push(moe_folders[version], version, flush_cache=False)
            await requests.go_on()
            await requests.move("form-0", 16)
        answers = await requests.answers()

    for name, answer in answers.items():
        checked_sets(answer, P)
        versions = check_routes(answer, models, starts[name], pushed)
        if name.startswith("late"):
            assert set(versions) <= set(pushed[int(name.split("-")[1]) :])
        else:
            assert [version for version, _ in itertools.groupby(versions)] == ["default", *pushed]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("is_resumable", [False, pytest.param(True, marks=needs(Feature.RESUMED))])
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
        assert set(check_routes(answer, models, start, ["gate-1"])) == {"gate-1"}


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


def check_rollout(rollout: Rollout, models: dict[str, Any]) -> None:
    field = rollout.token_fields["routed_experts"]
    assert (field.start, field.values.dtype) == (0, np.uint8)
    prompt, output = rollout.prompt_ids.tolist(), rollout.output_ids.tolist()
    versions = rollout.weight_versions
    assert versions is not None
    # Appended tokens have no version; their rows come with the next turn.
    names = list(versions)
    for t in reversed(range(len(names))):
        names[t] = names[t] or names[t + 1]
    check_rows(np.sort(field.values.astype(np.int32), -1), prompt, output, names, models)


FIELDS: Any = {"top_logprobs_p": P, "return_fields": ["routed_experts"]}
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}


@needs(Feature.RESUMED)
@pytest.mark.parametrize("through", ["engine", "sidecar"])
async def test_rollouts_have_them(moe_engine: Engine, models: dict[str, Any], through: str) -> None:
    """Whole, cut and resumed, extended by a tool, and as a batch for a trainer."""
    async with AsyncExitStack() as stack:
        url = moe_engine.url if through == "engine" else stack.enter_context(run_sidecar(moe_engine.url))
        client = await stack.enter_async_context(AsyncRolloutClient(url))
        wholes = await client.generate(PROMPTS, {**SAMPLING, "n": 2}, **FIELDS)
        cut = await client.generate(PROMPTS, {**SAMPLING, "max_new_tokens": 5}, **FIELDS)
        nothing = await client.generate(PROMPTS, {**SAMPLING, "max_new_tokens": 0}, **FIELDS)
        resumed = await client.resume([*cut, *nothing], SAMPLING)
        turns = await client.resume([one.extend([65, 66, 67]) for one in wholes], SAMPLING)
        (plain,) = await client.generate([[104]], SAMPLING, top_logprobs_p=P)
    assert plain.token_fields == {}
    for rollout in (*wholes, *resumed, *turns):
        check_rollout(rollout, models)
    for part, rollout in zip(cut, resumed, strict=False):
        known = part.token_fields["routed_experts"].values
        np.testing.assert_array_equal(rollout.token_fields["routed_experts"].values[: len(known)], known)
    batch: Any = collate_rollouts(turns, [1.0] * len(turns), pad_token_id=0)
    assert batch["routed_experts"].shape == (*batch["sequences"].shape, LAYERS, TOP_K)
    for i, rollout in enumerate(turns):
        values = rollout.token_fields["routed_experts"].values
        np.testing.assert_array_equal(batch["routed_experts"][i, -len(values) - 1 : -1].numpy(), values)


@needs(Feature.RESUMED)
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.usefixtures("as_before")
async def test_rollouts_over_a_push(
    moe_engine: Engine, moe_folders: dict[str, Path], models: dict[str, Any], mode: str
) -> None:
    """The client resumes what the pause aborts; one may have no token yet."""
    version = "gate-1" if mode == "in_place" else "other-1"
    async with InFlight.at(moe_engine.url) as requests, AsyncRolloutClient(moe_engine.url) as client:
        requests.send("clock", **asking([99], 3000, stream=True, resumed_tokens=0))
        await requests.move("clock", 4)
        sampling = {**SAMPLING, "max_new_tokens": 3 * LENGTH}
        sending = asyncio.create_task(client.generate(PROMPTS, sampling, on_abort="resume", **FIELDS))
        await requests.arrive(len(PROMPTS))
        await requests.pause(mode)
        await requests.push(moe_folders[version], version, flush_cache=mode == "abort")
        await requests.go_on()
        rollouts = await sending
        await requests.order("/abort_request", abort_all=True)
    for rollout in rollouts:
        check_rollout(rollout, models)
    assert any(version in (rollout.weight_versions or ()) for rollout in rollouts)


def test_a_server_that_records_none_refuses(engine: Engine) -> None:
    answer = engine.post(**asking([104], 2))
    assert answer.status_code == 400
    assert "return_routed_experts: " in answer.text
    assert "--enable-return-routed-experts" in answer.text


def test_the_positions_of_sparse_attention_are_refused(engine: Engine) -> None:
    answer = engine.post(**asking([104], 2, return_routed_experts=False, return_indexer_topk=True))
    assert answer.status_code == 400
    assert "return_indexer_topk: not served here with candidate sets" in answer.text


async def test_retractions_for_memory_without_overlap(
    moe_path: Path, log_folder: Path, models: dict[str, Any]
) -> None:
    # Before 0.5.23, a CPU cannot load the experts' weights in two ranks, because SGLang splits them twice.
    num_ranks = "2" if release_key(installed()[0]) >= release_key("0.5.23") else "1"
    arguments = ["--enable-return-routed-experts", "--disable-overlap-schedule", "--tp-size", num_ranks]
    arguments += ["--max-total-tokens", "512", "--schedule-conservativeness", "0.05"]
    # Without `ignore_eos`, SGLang admits more requests than it can finish.
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "logit_bias": {"0": -100.0}}
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if num_ranks == "2" else {}
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
