"""Sets under speculative decoding while requests are paused, aborted, or retracted by a pause."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_topp_patches.compat.releases import Feature
from tests.engine.candidate_set_checks import check_nothing_is_held
from tests.engine.requests_during_push import InFlight
from tests.engine.speculating_server import ASKED, RULES, SAMPLING, run_speculating, sets_of
from tests.engine.start_servers import Engine
from tests.skip_missing_features import skip_without
from tests.speculative.chain_draft_worker import read_log

skip_without(Feature.SPECULATIVE)

LONGEST = 2000  # tokens of a request that is to be aborted


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
