"""Sets under speculative decoding, on the real engine: real scheduler, verification, log-probs, and commit.

The drafts come from a test worker (`tests.speculative.chain_draft_worker`). It records what each verification
drew from, at the call of the sampling kernel.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_topp.replay import replayed_old_logprobs, score
from sglang_topp_client import RolloutClient
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import check_nothing_is_held, check_whole, checked_sets
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.requests_during_push import InFlight
from tests.engine.speculating_server import ASKED, RULES, SAMPLING, run_speculating, sets_of
from tests.engine.start_servers import Engine
from tests.engine.transformers_reference import MODEL_TOLERANCE, is_robust, nucleus, reference_logprobs
from tests.skip_missing_features import needs, needs_grammars, skip_without
from tests.speculative.chain_draft_worker import read_log

skip_without(Feature.SPECULATIVE)

EITHER_RULE = pytest.mark.parametrize("rule", RULES, ids=str)


@pytest.fixture(scope="module")
def speculative(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A server whose drafts are chains of one to four tokens."""
    folder = tmp_path_factory.mktemp("speculative")
    with run_speculating(model_path, folder, "--chunked-prefill-size", "64") as engine:
        yield engine
        check_nothing_is_held(engine)


def logged(folder: Path, *, name: str = "log", **custom: Any) -> dict[str, Any]:
    """Sampling parameters of a request that records its verifications."""
    return {**SAMPLING, "custom_params": {"verification_log": str(folder / name), **custom}}


@needs(Feature.SAMPLER_SOURCE)
def test_sets_are_the_support_that_verification_drew_from(speculative: Engine, tmp_path: Path) -> None:
    filters = [
        {"top_p": 0.9},
        {"top_k": 5, "top_p": 0.8, "temperature": 0.7},
        {"top_k": 30, "temperature": 1.3},
        {},
        {"top_k": 20, "min_p": 0.1},  # verification ignores min_p
        {"temperature": 0.2},
    ] * 2  # verifications enough that runs of every length occur
    answers = speculative.generate(
        text=[f"prompt {i}" for i in range(len(filters))],
        sampling_params=[{**logged(tmp_path, name=f"{i}"), **each} for i, each in enumerate(filters)],
        top_logprobs_source="sampler",
        **ASKED,
    )
    lengths = set()
    for i, answer in enumerate(answers):
        sets, log = sets_of(answer), read_log(tmp_path / f"{i}")
        lengths |= {len(each.token_ids) for each in log}
        drawn = list(
            itertools.chain.from_iterable(zip(each.token_ids, each.probs, strict=True) for each in log)
        )
        # The first token comes from the prompt's pass. SGLang stops inside of the last run.
        assert len(drawn) >= len(sets) - 1
        for t, (token_id, probs) in zip(range(1, len(sets)), drawn, strict=False):
            assert token_id == answer["output_ids"][t]
            ids, logprobs = sets[t]
            assert set(ids.tolist()) == set(np.flatnonzero(probs).tolist()), f"position {t} of {filters[i]}"
            np.testing.assert_allclose(np.exp(logprobs - sets.log_kept_mass[t]), probs[ids], atol=1e-4)
    assert {1, 2, 3} <= lengths, "verifications accept runs of many lengths"


@pytest.mark.parametrize(("p", "temperature"), [(0.8, 1.0), (0.95, 0.7)])
def test_sets_by_threshold_equal_the_definition_on_transformers_logprobs(
    speculative: Engine, model_path: Path, p: float, temperature: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = [tokenizer.encode(text) for text in ("The quick brown fox", "a", "0123456789" * 20)]
    answers = speculative.generate(
        input_ids=prompts,
        sampling_params={**SAMPLING, "temperature": temperature, "top_p": 0.9},
        top_logprobs_p=p,
        **ASKED,
    )
    compared = 0
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        sets = checked_sets(answer, p)
        expected = reference_logprobs(model, prompt_ids, answer["output_ids"], temperature)
        for t, (token_ids, logprobs) in enumerate(sets):
            np.testing.assert_allclose(logprobs, expected[t, token_ids], atol=MODEL_TOLERANCE)
            if is_robust(expected[t], p):
                compared += 1
                assert set(token_ids.tolist()) == nucleus(expected[t], p) | {answer["output_ids"][t]}
    assert compared > 48


def test_a_mixed_batch(speculative: Engine) -> None:
    """Different thresholds and rules, greedy requests, and requests without sets; some are streamed."""
    rules: list[dict[str, Any]] = [{"top_logprobs_p": p} for p in (0.1, 0.5, 0.9, 1.0)]
    rules += [*RULES[1:], {}]
    asks = [
        {
            "text": f"prompt {i}",
            "sampling_params": {**SAMPLING, "temperature": temperature, "top_p": 0.95},
            "return_logprob": True,
            "top_logprobs_num": VOCAB_SIZE if "top_logprobs_p" in rule else 0,
            "logprob_start_len": 0 if "top_logprobs_p" in rule and i % 2 else -1,
            "return_logprobs_in_base64": bool(rule) and i % 3 > 0,
            **rule,
        }
        for i, (temperature, rule) in enumerate(itertools.product((0.0, 0.8), rules))
    ]

    async def run() -> dict[str, Any]:
        async with InFlight.at(speculative.url) as requests:
            for i, ask in enumerate(asks):
                requests.send(f"ask-{i}", stream=bool(i % 2), **ask)
            return await requests.answers()

    answers = asyncio.run(run())
    for i, ask in enumerate(asks):
        answer = answers[f"ask-{i}"]
        assert len(answer["output_ids"]) == SAMPLING["max_new_tokens"]
        if "top_logprobs_p" in ask:
            check_whole(answer, ask["top_logprobs_p"])
        elif "top_logprobs_source" in ask:
            sets = sets_of(answer)
            assert ask["sampling_params"]["temperature"] or sets.sizes.tolist() == [1] * len(sets)
        else:
            assert not [key for key in answer["meta_info"] if "top_p" in key]


@EITHER_RULE
def test_ratios_are_one_with_the_sets_and_not_without(
    speculative: Engine, model_path: Path, rule: dict[str, Any]
) -> None:
    top_p = rule.get("top_logprobs_p", 0.8)
    with RolloutClient(speculative.url, kind="sglang") as client:
        rollouts = client.generate(
            ["The quick brown fox", "a", "0123456789" * 8],
            {**SAMPLING, "top_p": top_p, "n": 3},
            **rule,
        )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    weight = model.get_output_embeddings().weight.detach()
    assert len(rollouts) == 9
    for rollout in rollouts:
        assert rollout.candidates is not None
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.output_ids])).long()
        with torch.no_grad():
            states = model.model(ids[None]).last_hidden_state[0, len(rollout.prompt_ids) - 1 : -1]
            scores = score(states, weight, ids[len(rollout.prompt_ids) :], rollout.candidates)
        old = replayed_old_logprobs(rollout.candidates, output_ids=rollout.output_ids)
        assert ((scores.logprobs - old).exp() - 1).abs().max() < 1e-3
        assert (np.exp(np.array(rollout.candidates.log_kept_mass)) < 0.999).any()


def test_greedy_answers_are_those_without_speculation(speculative: Engine, engine: Engine) -> None:
    ask = {
        "text": ["The quick brown fox", "Once upon a time", "0123456789" * 8],
        "sampling_params": {**SAMPLING, "temperature": 0.0},
        "top_logprobs_p": 0.9,
        **ASKED,
    }
    for ours, plain in zip(speculative.generate(**ask), engine.generate(**ask), strict=True):
        assert ours["output_ids"] == plain["output_ids"]
        assert sets_of(ours).sizes.tolist() == sets_of(plain).sizes.tolist()


@EITHER_RULE
@pytest.mark.parametrize("stop", ["max_new_tokens", "stop", "stop_token_ids"])
def test_a_stop_inside_of_a_run_ends_the_sets_too(
    speculative: Engine, tmp_path: Path, rule: dict[str, Any], stop: str
) -> None:
    """The drafts are the target's own choices, so most runs have their full length."""
    text = "Once upon a time"
    greedy = {**SAMPLING, "temperature": 0.0}
    whole = speculative.generate(
        text=text, sampling_params=greedy, return_logprob=True, return_text_in_logprobs=True
    )
    tokens = [each[2] for each in whole["meta_info"]["output_token_logprobs"]]
    # A stop string that occurs before would end the answer there.
    lasts = [t for t in range(5, 48) if tokens[t] and tokens[t] not in "".join(tokens[:t])][:10]
    params = [
        {
            **greedy,
            "custom_params": {"verification_log": str(tmp_path / str(last)), "drafts": "likely"},
            **{
                "max_new_tokens": {"max_new_tokens": last},
                "stop": {"stop": [tokens[last]]},
                "stop_token_ids": {"stop_token_ids": [whole["output_ids"][last]]},
            }[stop],
        }
        for last in lasts
    ]
    answers = speculative.generate(text=[text] * len(lasts), sampling_params=params, **ASKED, **rule)
    ends_inside = 0
    for last, answer in zip(lasts, answers, strict=True):
        sets = sets_of(answer)
        assert answer["output_ids"] == whole["output_ids"][: len(sets)]
        assert answer["meta_info"]["completion_tokens"] == len(sets)
        drawn = sum(len(each.token_ids) for each in read_log(tmp_path / str(last)))
        ends_inside += drawn > len(sets) - 1
    assert ends_inside, "some answers ended before the end of an accepted run"


@needs_grammars()
@EITHER_RULE
def test_tokens_that_a_grammar_forbids_are_in_no_set(
    speculative: Engine, tmp_path: Path, rule: dict[str, Any]
) -> None:
    params = {**logged(tmp_path), "ignore_eos": False, "regex": "[0-9]{12}-[a-f]{8}"}
    answer = speculative.generate(text="a number", sampling_params=params, **ASKED, **rule)
    assert answer["text"][12] == "-"
    assert len(answer["text"]) == 21
    sets = sets_of(answer)
    tokens = speculative.generate(
        text="a number",
        sampling_params=params,
        return_logprob=True,
        top_logprobs_num=VOCAB_SIZE,
        return_text_in_logprobs=True,
    )
    texts = {each[1]: each[2] for row in tokens["meta_info"]["output_top_logprobs"] for each in row}
    for t in range(12):
        ids, _ = sets[t]
        assert all(texts[int(i)].strip("0123456789-") == "" for i in ids), f"position {t}"


@EITHER_RULE
def test_a_token_outside_of_its_support_names_its_position(speculative: Engine, rule: dict[str, Any]) -> None:
    """The fault of SGLang's issue 35771, with coins of 0: a draft without mass is accepted."""
    answer = speculative.post(
        text="a fault",
        sampling_params={
            **SAMPLING,
            "top_k": 3,
            "custom_params": {"accepts_zero_mass": True, "drafts": "unlikely"},
        },
        **ASKED,
        **rule,
    )
    assert answer.status_code == 500
    assert "no candidate set at position 1: verification drew token" in answer.text
    assert "outside of its support" in answer.text


def test_tensor_parallel_ranks_agree(model_path: Path, tmp_path: Path) -> None:
    """Every rank takes the tokens of the first one, which has the sets."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with run_speculating(model_path, tmp_path, "--tp-size", "2", env=env) as ranks:
        for rule in RULES:
            ask = {"sampling_params": {**SAMPLING, "top_p": 0.9, "n": 4}, **ASKED, **rule}
            for answer in ranks.generate(text="Once upon a time", **ask):
                assert len(sets_of(answer)) == SAMPLING["max_new_tokens"]
        check_nothing_is_held(ranks)


@needs(Feature.RESUMED)
def test_an_interrupted_rollout_resumes(speculative: Engine) -> None:
    sampling = {**SAMPLING, "temperature": 0.0, "max_new_tokens": 24}
    with RolloutClient(speculative.url, kind="sglang") as client:
        (whole,) = client.generate(["Once upon a time"], sampling, top_logprobs_p=0.9)
        (part,) = client.generate(["Once upon a time"], {**sampling, "max_new_tokens": 9}, top_logprobs_p=0.9)
        (rest,) = client.resume([part], sampling, top_logprobs_p=0.9)
    assert rest.output_ids.tolist() == whole.output_ids.tolist()
    assert rest.candidates is not None
    assert rest.candidates.sizes.tolist() == whole.candidates.sizes.tolist()
