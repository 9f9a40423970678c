"""Requests that are retracted while they generate, some of them aborted: each token has one exact set.

The expected sets come from SGLang's own log-probs of all tokens, in the same request.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.engine.candidate_set_checks import check_nothing_is_held, check_whole, checked_sets
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.requests_during_push import InFlight
from tests.engine.start_servers import Engine

P = 0.9
LENGTH = 64  # tokens of a stream, whose chunks each hold all distributions so far
LONG = 256  # tokens of the others; on busy cores, an abort takes effect many tokens later
LONGEST = 2048  # tokens of requests to abort


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_sets_stay_exact_over_pauses(engine: Engine, mode: str) -> None:
    forms = list(itertools.product((True, False), (True, False), (True, False)))
    # Longer than a prefill chunk, so that a retracted request is prefilled in several passes.
    prompts = [[97 + (i + j) % 26 for j in range(150)] for i in range(len(forms))]
    lengths = [LENGTH if stream else LONG for stream, _, _ in forms]
    lengths[5] = LONGEST
    async with InFlight.at(engine.url) as requests:
        for i, (stream, base64, greedy) in enumerate(forms):
            requests.send(
                f"form-{i}",
                input_ids=prompts[i],
                sampling_params={
                    "max_new_tokens": lengths[i],
                    "temperature": 0.0 if greedy else 1.0,
                    "ignore_eos": True,
                },
                stream=stream,
                return_logprobs_in_base64=base64,
                return_logprob=True,
                logprob_start_len=0 if i % 2 else -1,
                top_logprobs_num=VOCAB_SIZE,
                top_logprobs_p=P,
            )
        requests.send(
            "clock",
            input_ids=prompts[0],
            sampling_params={"max_new_tokens": LONGEST, "ignore_eos": True},
            stream=True,
        )
        for round_number in range(3):
            await requests.move("clock", 2)
            await requests.pause(mode)
            if round_number:
                await requests.abort("form-5")
            await requests.go_on()
        # SGLang may miss a request that is between two chunks of its prompt (0.5.12 does).
        for name in ("form-5", "clock"):
            while not requests.is_done(name):
                await requests.abort(name)
                await asyncio.sleep(0.1)
        answers = await requests.answers()

    for i in range(len(forms)):
        answer = answers[f"form-{i}"]
        # A request that is aborted while it waits may end without its prompt's sets.
        scored = prompts[i] if i % 2 and i != 5 else None
        sets = check_whole(answer, P, scored)
        if i == 5:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(sets) < LONGEST
        else:
            assert len(sets) == lengths[i]
    for name in set(requests.streams) - {"clock"}:
        chunks = requests.chunks(name)
        shown = [len(chunk["output_ids"]) for chunk in chunks]
        assert shown == sorted(shown)
        for chunk in chunks[::7]:
            check_whole(chunk, P)
    if mode == "retract":
        retracted = [answer["meta_info"].get("num_retractions") for answer in answers.values()]
        assert max(number or 0 for number in retracted) > 0


async def test_what_is_aborted_while_it_waits_has_sets_of_what_it_shows(engine: Engine) -> None:
    """For an unstreamed answer, SGLang sends its tokens after every 50th one."""
    prompt_ids = [97 + i % 26 for i in range(150)]
    async with InFlight.at(engine.url) as requests:
        for name, stream in (("whole", False), ("clock", True)):
            requests.send(
                name,
                input_ids=prompt_ids,
                sampling_params={"max_new_tokens": LONGEST, "ignore_eos": True},
                stream=stream,
                return_logprobs_in_base64=True,
                return_logprob=True,
                logprob_start_len=-1 if stream else 0,
                top_logprobs_num=VOCAB_SIZE if not stream else 0,
                top_logprobs_p=P,
            )
        while not (chunks := requests.chunks("clock")) or len(chunks[-1]["output_ids"]) < 80:
            await requests.move("clock", 1)
        await requests.pause("retract")
        for name in ("whole", "clock"):
            await requests.abort(name)
        await requests.go_on()
        answers = await requests.answers()
    for answer in answers.values():
        assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    sets = check_whole(answers["whole"], P, prompt_ids)
    assert sets
    assert len(sets) % 50 == 0
    assert len(checked_sets(answers["clock"], P)) >= 80
    check_nothing_is_held(engine)
