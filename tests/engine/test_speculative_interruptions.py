"""Sets under speculative decoding through pauses, aborts, retraction, and weight pushes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import check_nothing_is_held, check_whole
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.pushed_weights import check_answer, restore_weights
from tests.engine.requests_during_push import InFlight
from tests.engine.speculating_server import ASKED, RULES, SAMPLING, run_speculating, sets_of
from tests.engine.start_servers import Engine
from tests.skip_missing_features import can_flush_while_paused, needs, skip_without
from tests.speculative.chain_draft_worker import read_log

skip_without(Feature.SPECULATIVE)

LONGEST = 2000  # tokens of a request that is to be aborted
LENGTH = 300  # tokens of a request that runs through several pushes
P = 0.9


@pytest.fixture(scope="module")
def speculative(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A server whose drafts are chains of one to four tokens."""
    with run_speculating(model_path, tmp_path_factory.mktemp("speculative")) as engine:
        yield engine
        check_nothing_is_held(engine)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_pauses_and_aborts(speculative: Engine, mode: str) -> None:
    forms = list(itertools.product((True, False), RULES, (0.0, 1.0)))
    async with InFlight.at(speculative.url) as requests:
        for i, (stream, rule, temperature) in enumerate(forms):
            requests.send(
                f"form-{i}",
                input_ids=[97 + (i + j) % 26 for j in range(100)],
                sampling_params={**SAMPLING, "max_new_tokens": 96, "temperature": temperature},
                stream=stream,
                **ASKED,
                **rule,
            )
        for name in ("aborted", "clock"):
            requests.send(
                name,
                input_ids=[98, 99, 100],
                sampling_params={**SAMPLING, "max_new_tokens": LONGEST},
                stream=True,
                **ASKED,
                **RULES[0],
            )
        for round_number in range(3):
            await requests.move("clock", 2)
            await requests.pause(mode)
            if round_number == 1:
                await requests.abort("aborted")
            await requests.go_on()
        for name in ("aborted", "clock"):
            while not requests.is_done(name):
                await requests.abort(name)
                await asyncio.sleep(0.1)
        answers = await requests.answers()
    for i in range(len(forms)):
        assert len(sets_of(answers[f"form-{i}"])) == 96
    for name in ("aborted", "clock"):
        assert answers[name]["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(sets_of(answers[name])) == len(answers[name]["output_ids"])


async def test_aborts_between_verification_and_commit(speculative: Engine, tmp_path: Path) -> None:
    """With overlap, SGLang verifies the next run of a request while it ends the request."""
    names = [f"{i}" for i in range(8)]
    async with InFlight.at(speculative.url) as requests:
        for i, name in enumerate(names):
            custom = {"verification_log": str(tmp_path / name), "drafts": "likely"}
            requests.send(
                name,
                text=f"prompt {i}",
                sampling_params={**SAMPLING, "max_new_tokens": LONGEST, "custom_params": custom},
                stream=i % 2 == 0,
                **ASKED,
                **RULES[i % len(RULES)],
            )
        await requests.move("0", 3)
        for name in names:
            await requests.abort(name)
        answers = await requests.answers()
    num_uncommitted = 0
    for name in names:
        answer = answers[name]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        num_sets = len(sets_of(answer)) if answer["output_ids"] else 0
        log = tmp_path / name
        num_drawn = sum(len(each.token_ids) for each in read_log(log)) if log.exists() else 0
        assert num_sets <= 1 + num_drawn  # the first token comes from the prompt's pass
        num_uncommitted += 1 + num_drawn - num_sets
    assert num_uncommitted, "some verified tokens were not committed"


@needs(Feature.WEIGHT_VERSIONS)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_each_token_comes_from_the_weights_that_are_named(
    speculative: Engine,
    model_path: Path,
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    mode: str,
) -> None:
    """Push weights between two verifications, with overlap, while requests of every kind are in flight.

    Both rules give the same sets here: verification draws with top_p at the threshold.
    """
    flushes = mode == "retract" and can_flush_while_paused()
    pushed = ("other-1", "head-1") if flushes else ("head-1", "head-2")
    forms = list(itertools.product((True, False), RULES))
    try:
        async with InFlight.at(speculative.url) as requests:
            for i, (stream, rule) in enumerate(forms):
                requests.send(
                    f"form-{i}",
                    text=f"prompt {i}",
                    sampling_params={
                        "max_new_tokens": LENGTH,
                        "ignore_eos": True,
                        "top_p": P,
                        "custom_params": {"drafts": ("likely", "mixed")[i % 2]},
                    },
                    stream=stream,
                    **ASKED,
                    **rule,
                )
            await requests.arrive()
            await requests.move("form-0", 4)
            for version in pushed:
                await requests.pause(mode)
                if flushes:
                    await requests.order("/flush_cache")
                await requests.push(weight_folders[version], version, flush_cache=flushes)
                await requests.go_on()
                # A retracted request needs time to be prefilled again and to draw a token.
                await requests.move("form-0", 16)
            answers = await requests.answers()
    finally:
        restore_weights(speculative, model_path)
    for name, answer in answers.items():
        versions = check_answer(answer, P, reference_models)
        assert len(versions) == LENGTH
        assert [version for version, _ in itertools.groupby(versions)] == ["default", *pushed], name


async def test_requests_that_are_retracted_for_lack_of_memory(model_path: Path, tmp_path: Path) -> None:
    """The KV cache is too small for all requests, so some are retracted and prefilled again."""
    arguments = ("--max-total-tokens", "512", "--max-running-requests", "16")
    arguments += ("--schedule-conservativeness", "0.05")
    with run_speculating(model_path, tmp_path, *arguments) as engine:
        async with InFlight.at(engine.url) as requests:
            for i in range(16):
                rule = RULES[i % len(RULES)]
                requests.send(
                    f"{i}",
                    text="x" * (10 + i),
                    # With `ignore_eos`, SGLang reserves the whole length and retracts nothing.
                    sampling_params={"max_new_tokens": 100, "temperature": 1.0, "logit_bias": {"0": -100.0}},
                    stream=i % 3 == 0,
                    top_logprobs_num=VOCAB_SIZE if "top_logprobs_p" in rule else 0,
                    **ASKED,
                    **rule,
                )
            answers = await requests.answers()
        assert sum(answer["meta_info"].get("num_retractions") or 0 for answer in answers.values()) > 0
        for answer in answers.values():
            assert len(sets_of(answer)) == answer["meta_info"]["completion_tokens"] > 0
            if answer["meta_info"].get("output_top_logprobs_shape"):
                check_whole(answer, RULES[0]["top_logprobs_p"])
        check_nothing_is_held(engine)
