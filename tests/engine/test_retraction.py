"""Requests that are retracted in mid-generation, and one that is aborted there: each token has one exact set.

The truth is SGLang's own distribution of all tokens, which the same request asks for.
"""

from __future__ import annotations

import itertools

import pytest

from tests.engine.checks import check_whole
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.in_flight import InFlight
from tests.engine.running import Engine

P = 0.9
LENGTH = 64
LONG = 512  # of the one that is aborted: chunks of a stream are merged, and it must not have ended by then


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_sets_stay_exact_over_pauses(engine: Engine, mode: str) -> None:
    forms = list(itertools.product((True, False), (True, False), (True, False)))
    # Longer than a chunk of the prefill: a retracted request is prefilled in several passes.
    prompts = [[97 + (i + j) % 26 for j in range(150)] for i in range(len(forms))]
    async with InFlight.at(engine.url) as requests:
        for i, (stream, base64, greedy) in enumerate(forms):
            requests.send(
                f"form-{i}",
                input_ids=prompts[i],
                sampling_params={
                    "max_new_tokens": LENGTH if i != 5 else LONG,
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
        for round_number in range(3):
            await requests.move("form-0", 2)
            await requests.pause(mode)
            if round_number:  # twice: 0.5.12 overlooks a request that is between two chunks of its prompt
                await requests.abort("form-5")
            await requests.go_on()
        answers = await requests.answers()

    for i in range(len(forms)):
        answer = answers[f"form-{i}"]
        # What is aborted while it waits may end without its prompt's.
        scored = prompts[i] if i % 2 and i != 5 else None
        sets = check_whole(answer, P, scored)
        if i == 5:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(sets) < LONG
        else:
            assert len(sets) == LENGTH
    for chunks in requests.chunks.values():
        shown = [len(chunk["output_ids"]) for chunk in chunks]
        assert shown == sorted(shown)
        for chunk in chunks[::7]:
            check_whole(chunk, P)
    if mode == "retract":
        retracted = [answer["meta_info"].get("num_retractions") for answer in answers.values()]
        assert max(number or 0 for number in retracted) > 0
