"""Weight pushes and pauses with requests in flight: each token has one set, from the weights that it names.

The expected values come from a transformers forward pass with each version's weights. If a pause keeps the KV
cache, the versions differ in the LM head only, so hidden states and the cache are equal under all of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_topp import formats
from sglang_topp_client import AsyncRolloutClient
from sglang_topp_patches.releases import Feature
from tests.documentation_blocks import block_with
from tests.engine.candidate_set_checks import check_rollout, checked_sets
from tests.engine.pushed_weights import check_answer, check_sets, restore_weights, versions_of
from tests.engine.requests_during_push import InFlight, Scoring
from tests.engine.start_servers import Engine, chunks_of, num_prefilled, run_sidecar
from tests.skip_missing_features import can_flush_while_paused, can_refuse_a_flush, skip_without

skip_without(Feature.WEIGHT_VERSIONS)

P = 0.3  # small sets: a slow reader would miss the chunks that it waits for
CAN_REFUSE_A_FLUSH = can_refuse_a_flush()
# Whether a pause that retracts lets SGLang flush its KV cache. Other pauses never do.
CAN_FLUSH = can_flush_while_paused()
PROMPTS = ["The quick brown fox", "a", "0123456789" * 20, "Zürich, 東京"]


@pytest.fixture(autouse=True)
def weights_for_others(engine: Engine, model_path: Path) -> Iterator[None]:
    """The engine is shared, so restore its weights afterwards, and continue generation."""
    yield
    restore_weights(engine, model_path)


# Long enough to run through several pauses. On a busy machine, a pause takes effect only after a hundred
# tokens.
LENGTH = 600


def asking(
    prompt: str, max_new_tokens: int = LENGTH, *, greedy: bool = False, **fields: Any
) -> dict[str, Any]:
    return {
        "text": prompt,
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "temperature": 0.0 if greedy else 1.0,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "top_logprobs_p": P,
        "return_logprobs_in_base64": True,
        **fields,
    }


def check_prompt(answer: dict[str, Any]) -> None:
    """Check that each prompt token has one set, with the log-prob that SGLang reports for it."""
    reported = answer["meta_info"]["input_token_logprobs"]
    assert len(reported) == answer["meta_info"]["prompt_tokens"]
    sets = formats.decode_top_p(answer["meta_info"], [token_id for _, token_id, _ in reported], side="input")
    expected = np.array([logprob for logprob, _, _ in reported[1:]], np.float32)
    np.testing.assert_array_equal(sets.sampled_logprobs[1:], expected)


def send_every_form(requests: InFlight) -> None:
    """Send requests of every form: streamed or not, base64 or lists, sampled or greedy, long prompt."""
    forms = itertools.product((True, False), (True, False), (True, False))
    for i, (stream, base64, greedy) in enumerate(forms):
        requests.send(
            f"form-{i}",
            **asking(PROMPTS[i % 4], greedy=greedy, stream=stream, return_logprobs_in_base64=base64),
        )
    requests.send("scored", **asking("scored " * 60, logprob_start_len=0))


@pytest.mark.parametrize(
    ("mode", "pushed"),
    [
        ("in_place", ("head-1", "head-2", "default")),
        ("retract", ("other-1", "head-1", "other-2") if CAN_FLUSH else ("head-1", "head-2", "default")),
    ],
)
async def test_each_token_comes_from_the_weights_that_are_named(
    engine: Engine,
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    mode: str,
    pushed: tuple[str, ...],
) -> None:
    async with InFlight.at(engine.url) as requests:
        send_every_form(requests)
        await requests.arrive()
        await requests.move("form-0", 4)
        for i, version in enumerate(pushed):
            # When generation stops, this request waits, or a part of its prompt is scored. If the cache
            # stays, that part stays too, and has another version than the rest.
            start = 0 if mode == "retract" else -1
            requests.send(f"early-{i}", **asking(f"{i} " * 300, 12, logprob_start_len=start))
            await requests.pause(mode)
            requests.send(f"late-{i}", **asking(PROMPTS[i], 12))
            if mode == "retract" and CAN_FLUSH:
                await requests.order("/flush_cache")
                await requests.push(weight_folders[version], version)
            else:
                # The cache is in use, so it stays. The weights are pushed, whether or not the push asks for a
                # flush.
                await requests.order("/flush_cache", 400)
                flush = i == 1 and CAN_REFUSE_A_FLUSH
                await requests.push(
                    weight_folders[version], version, flush_cache=flush, status=400 if flush else 200
                )
            await requests.go_on()
            # Retracted requests need time to be prefilled again and to draw a token with these weights.
            await requests.move("form-0", 16)
        answers = await requests.answers()

    for name, answer in answers.items():
        versions = check_answer(answer, P, reference_models)
        if name.startswith("late"):
            number = int(name[-1])
            assert set(versions) <= set(pushed[number:])
            assert len(versions) == 12
        elif name.startswith("early"):
            assert len(versions) == 12
        else:
            # Each request ran from the first weights to the last.
            assert [version for version, _ in itertools.groupby(versions)] == ["default", *pushed]
            assert len(versions) == LENGTH
        if "input_top_p_logprobs_lengths" in answer["meta_info"]:
            check_prompt(answer)
    for name in requests.streams:
        for chunk in requests.chunks(name):
            checked_sets(chunk, P)
            assert versions_of(chunk) == versions_of(answers[name])[: len(chunk["output_ids"])]


async def test_a_push_that_does_not_pause_lets_answers_end_or_aborts_them(
    engine: Engine, weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    async with InFlight.at(engine.url) as requests:
        send_every_form(requests)
        await requests.arrive()
        await requests.move("form-0", 4)
        await requests.push(weight_folders["other-1"], "other-1")
        for answer in (await requests.answers()).values():
            assert set(check_answer(answer, P, reference_models)) == {"default"}
            assert len(answer["output_ids"]) == LENGTH

        for i in range(4):
            requests.send(f"aborted-{i}", **asking(PROMPTS[i], 2000, stream=i % 2 == 0))
        await requests.arrive()
        await requests.move("aborted-0", 4)
        await requests.push(weight_folders["other-2"], "other-2", abort_all_requests=True, flush_cache=False)
        await requests.until_idle()  # SGLang refuses a flush while a pass with aborted requests runs
        await requests.order("/flush_cache")
        requests.send("after", **asking(PROMPTS[0]))
        answers = await requests.answers()
    for i in range(4):
        answer = answers[f"aborted-{i}"]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert set(check_answer(answer, P, reference_models)) == {"other-1"}
    assert set(check_answer(answers["after"], P, reference_models)) == {"other-2"}


async def test_a_pause_that_aborts(
    engine: Engine, weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    async with InFlight.at(engine.url) as requests:
        for i in range(6):
            requests.send(f"aborted-{i}", **asking(PROMPTS[i % 4], 2000, stream=i % 2 == 0))
        await requests.arrive()
        await requests.move("aborted-0", 4)
        await requests.pause("abort")
        for answer in (await requests.answers()).values():
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            versions = check_answer(answer, P, reference_models)
            assert set(versions) <= {"default"}
            assert versions or not answer["output_ids"]
        requests.send("waits", **asking(PROMPTS[0]))
        await requests.push(weight_folders["other-1"], "other-1")
        assert not requests.is_done("waits")
        await requests.go_on()
        answers = await requests.answers()
    assert check_answer(answers["waits"], P, reference_models) == ["other-1"] * LENGTH


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("everything", [False, True], ids=["one", "all"])
async def test_aborts_while_generation_is_paused(
    engine: Engine,
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    mode: str,
    everything: bool,
) -> None:
    async with InFlight.at(engine.url) as requests:
        for i in range(4):
            requests.send(f"aborted-{i}", **asking(PROMPTS[i], 2000, stream=i % 2 == 0))
        await requests.arrive()
        requests.send("goes-on", **asking(PROMPTS[0], 2 * LENGTH, stream=True))
        await requests.move("goes-on", 4)
        await requests.pause(mode)
        await requests.push(weight_folders["head-1"], "head-1", flush_cache=mode == "retract" and CAN_FLUSH)
        if everything:
            await requests.order("/abort_request", abort_all=True)
        else:
            for i in range(4):
                await requests.abort(f"aborted-{i}")
        await requests.go_on()
        answers = await requests.answers()
    for name, answer in answers.items():
        is_aborted = everything or name.startswith("aborted")
        assert (answer["meta_info"]["finish_reason"]["type"] == "abort") == is_aborted
        versions = check_answer(answer, P, reference_models)
        assert len(versions) < 2000 if is_aborted else len(versions) == 2 * LENGTH
        if not is_aborted:
            assert set(versions) == {"default", "head-1"}
        for chunk in requests.chunks(name):
            checked_sets(chunk, P)
            assert versions_of(chunk) == versions[: len(chunk["output_ids"])]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("max_new_tokens", [0, 3])
async def test_a_prompt_that_two_weights_scored_is_an_error_that_passes(
    engine: Engine, weight_folders: dict[str, Path], max_new_tokens: int, stream: bool
) -> None:
    async with InFlight.at(engine.url) as requests:
        scoring = Scoring(engine, requests)
        for _ in range(20):
            sampling = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True}
            body = {
                **asking("", stream=stream, logprob_start_len=0, sampling_params=sampling),
                "input_ids": scoring.ids(),
            }
            del body["text"]
            answering = asyncio.create_task(requests.http.post("/generate", json=body))
            if await scoring.meets_it("in_place", answering):
                break
        else:
            pytest.fail("no pause met a prompt while it was scored")
        # After the error, the repeated score and later scores each have one version.
        asked_again = asyncio.create_task(
            requests.http.post("/generate", json={**body, "stream": False, "input_ids": scoring.ids()})
        )
        await requests.push(weight_folders["head-1"], "head-1", flush_cache=False)
        await requests.go_on()
        answer, again = await answering, await asked_again
    if stream:
        assert answer.status_code == 200
        assert answer.content.endswith(b"data: [DONE]\n\n")
        (last,) = chunks_of(answer.content)
        reason = last["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"]) == ("abort", 503)
        assert not any("top_p" in name for name in last["meta_info"])
        words = reason["message"]
    else:
        assert answer.status_code == 503
        words = answer.text
    assert "weights were pushed while the prompt was scored" in words
    assert "'default' and then 'head-1'" in words
    assert again.status_code == 200
    assert again.json()["meta_info"]["weight_versions"] == [
        {"version": "head-1", "start": 0, "end": max_new_tokens}
    ]
    check_prompt(again.json())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("through", ["engine", "sidecar"])
async def test_a_score_is_of_the_weights_that_it_names(
    engine: Engine, weight_folders: dict[str, Path], reference_models: dict[str, Any], mode: str, through: str
) -> None:
    """The client repeats a score that a push interrupted, and the caller does not notice."""
    async with AsyncExitStack() as stack:
        url = engine.url if through == "engine" else stack.enter_context(run_sidecar(engine.url))
        requests = await stack.enter_async_context(InFlight.at(engine.url))
        client = await stack.enter_async_context(AsyncRolloutClient(url))
        await client.generate(["a"], {"max_new_tokens": 1}, top_logprobs_p=P)
        scoring = Scoring(engine, requests)
        for _ in range(20):
            ids = scoring.ids()
            work = asyncio.create_task(client.score([ids], top_logprobs_p=P))
            if await scoring.meets_it(mode, work):
                break
        else:
            pytest.fail("no pause met a sequence while it was scored")
        before = num_prefilled(engine)
        await requests.push(weight_folders["head-1"], "head-1", flush_cache=mode == "retract" and CAN_FLUSH)
        await requests.go_on()
        (score,) = await work
        # A retracted request begins again. Otherwise it ends with an error after the rest of its prompt, and
        # the client repeats it.
        assert num_prefilled(engine) > before
    assert score.weight_version == "head-1"
    assert score.candidates is not None
    versions = ["head-1"] * (len(ids) - 1)
    check_sets(score.candidates, P, versions, ids[:1], ids[1:], reference_models)


async def test_a_rollout_says_which_weights_each_token_came_from(
    engine: Engine, weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    prompts = PROMPTS[:2]
    # Sixteen requests must be in flight before the first one has ended. SGLang reserves their whole lengths.
    sampling: dict[str, Any] = {"max_new_tokens": 800, "temperature": 1.0, "ignore_eos": True, "n": 2}
    with run_sidecar(engine.url) as sidecar:
        async with (
            InFlight.at(engine.url) as requests,
            AsyncRolloutClient(engine.url) as direct,
            AsyncRolloutClient(sidecar) as through_sidecar,
        ):
            clients = (direct, through_sidecar)
            for client in clients:  # each client now knows its server and its state
                await client.generate(["a"], {"max_new_tokens": 1}, top_logprobs_p=P)
            requests.send("clock", **asking("clock", 2000, stream=True))
            sending = asyncio.gather(
                *(client.generate(prompts, sampling, top_logprobs_p=P) for client in clients),
                *(client.generate(prompts, sampling) for client in clients),
            )
            await requests.arrive(others=2 * len(clients) * len(prompts) * sampling["n"])
            for version in ("head-1", "head-2"):
                await requests.move("clock", 4)
                await requests.pause("in_place")
                await requests.push(weight_folders[version], version, flush_cache=False)
                await requests.go_on()
            answers = await sending
            with_sets, without = answers[:2], answers[2:]
            await requests.abort("clock")
            await requests.answers()
    for rollouts in with_sets:
        assert len(rollouts) == 4
        for rollout in rollouts:
            check_rollout(rollout, P)
            assert rollout.weight_versions is not None
            assert rollout.weight_version == rollout.weight_versions[-1]
            check_sets(
                rollout.candidates,
                P,
                rollout.weight_versions,
                rollout.prompt_ids.tolist(),
                rollout.output_ids.tolist(),
                reference_models,
            )
            assert rollout.weight_spans is not None
            assert [version for version, _ in rollout.weight_spans] == ["default", "head-1", "head-2"]
    assert [rollout.weight_versions for rollouts in without for rollout in rollouts] == [None] * 8


def test_the_documented_push_of_weights(engine: Engine, weight_folders: dict[str, Path]) -> None:
    program = block_with("how-to/weight-pushes.md", "push_weights(")
    for shown, here in (
        ("http://127.0.0.1:30010", engine.url),
        ("http://127.0.0.1:30000", engine.url),
        ("/checkpoints/step-8", str(weight_folders["other-1"])),
    ):
        assert shown in program
        program = program.replace(shown, here)
    exec(program, {})
    answer = engine.generate(**asking("a", 1))
    assert answer["meta_info"]["weight_version"] == "8"
