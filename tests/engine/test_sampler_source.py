"""`top_logprobs_source="sampler"`: the sets are what the running sampler could draw.

The sets are compared with three references: SGLang's own mask of the same draw, the filters applied to the
whole distribution that SGLang reports, and the tokens of tens of thousands of draws at one position.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from sglang_topp import CandidateSets, formats
from sglang_topp.replay import replayed_old_logprobs, score
from sglang_topp_client import RolloutClient
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import checked_sets, distributions
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.start_servers import Engine, run_sidecar
from tests.skip_missing_features import skip_without, takes

skip_without(Feature.SAMPLER_SOURCE)

SAMPLING = {"max_new_tokens": 12, "ignore_eos": True}
ASKED = {"return_logprob": True, "return_logprobs_in_base64": True, "top_logprobs_source": "sampler"}
GRID = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    for top_k, top_p, min_p, temperature in itertools.product(
        (1, 20, 511), (0.5, 0.95, 1.0), (0.0, 0.05), (0.6, 1.0, 1.4)
    )
]
# Each request of a batch has its own parameters. Some are greedy, and some have no filter.
GRID += [{"temperature": 0, "top_k": 50}, {"top_k": 512, "top_p": 0.999, "temperature": 2.0}]
# Sums of probabilities are rounded. If a cutoff is this near, both neighboring sets are correct.
ROUNDING = 1e-5


def sets_of(answer: dict[str, Any]) -> CandidateSets:
    meta_info = answer["meta_info"]
    assert meta_info["top_logprobs_source"] == "sampler"
    sets = formats.decode_top_p(meta_info, answer["output_ids"], vocab_size=VOCAB_SIZE)
    reported = [each[0] for each in meta_info["output_token_logprobs"]]
    np.testing.assert_array_equal(sets.sampled_logprobs, np.array(reported, np.float32))
    return sets


def test_sets_are_sglangs_own_mask_on_every_row(engine: Engine) -> None:
    """The same batch has requests without sets, and requests by threshold."""
    prompts = [f"prompt {i}" for i in range(len(GRID))]
    answers = engine.generate(
        text=prompts,
        sampling_params=[{**SAMPLING, **filters} for filters in GRID],
        return_sampling_mask=True,
        sampling_logprobs_mode="support",
        **ASKED,
    )
    sizes = []
    for answer, filters in zip(answers, GRID, strict=True):
        sets, meta_info = sets_of(answer), answer["meta_info"]
        native = meta_info["output_token_sampling_mask"]
        renormalized = meta_info["output_token_sampling_logprobs"]
        assert len(native) == len(sets) == SAMPLING["max_new_tokens"]
        for t, (token_ids, logprobs) in enumerate(sets):
            assert sorted(token_ids.tolist()) == sorted(native[t]), f"position {t} of {filters}"
            if takes("sampling_logprobs_mode"):
                drawn_with = dict(zip(native[t], renormalized[t], strict=True))
                expected = [drawn_with[i] for i in token_ids.tolist()]
                found = logprobs - sets.log_kept_mass[t]
            else:  # in 0.5.20, of the sampled token alone
                expected, found = renormalized[t], sets.sampled_logprobs[t] - sets.log_kept_mass[t]
            np.testing.assert_allclose(found, expected, atol=2e-5)
        sizes += sets.sizes.tolist()
    assert min(sizes) == 1
    assert max(sizes) > 100


def test_sets_are_the_filters_applied_to_the_whole_distribution(engine: Engine) -> None:
    """No request of the batch asks for SGLang's mask, and some ask for other sets."""
    grid = [*GRID, {"top_p": 0.9}, {"min_p": 0.1}, {}]
    answers = engine.generate(
        text=[f"prompt {i}" for i in range(len(grid))] + ["a threshold", "nothing"],
        sampling_params=[{**SAMPLING, **filters} for filters in grid] + [{**SAMPLING, "top_p": 0.8}] * 2,
        return_logprob=True,
        return_logprobs_in_base64=True,
        top_logprobs_source=["sampler"] * len(grid) + ["distribution", None],
        top_logprobs_p=[None] * len(grid) + [0.8, None],
        top_logprobs_num=VOCAB_SIZE,
    )
    assert "output_top_p_logprobs_lengths" not in answers[-1]["meta_info"]
    assert answers[-2]["meta_info"]["top_logprobs_source"] == "distribution"
    checked_sets(answers[-2], 0.8)
    decided = total = 0
    for answer, filters in zip(answers, grid, strict=False):
        sets = sets_of(answer)
        whole = distributions(answer["meta_info"], "output", len(sets))
        for t, (token_ids, logprobs) in enumerate(sets):
            every_id, every_logprob = whole[t]
            at = {int(i): float(logprob) for i, logprob in zip(every_id, every_logprob, strict=True)}
            assert [at[i] for i in token_ids.tolist()] == logprobs.tolist()
            total += 1
            certain, possible = by_definition(every_id, np.exp(every_logprob.astype(np.float64)), filters)
            assert certain <= set(token_ids.tolist()) <= possible, f"position {t} of {filters}"
            decided += certain == possible
    assert decided > 0.6 * total


def by_definition(ids: np.ndarray, probs: np.ndarray, filters: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Return the tokens that top_k, top_p, and min_p leave of a row, highest first.

    The first value has the certain tokens. The second adds those that rounding or the order of a tie may add.
    """
    if filters.get("temperature") == 0:
        return {int(ids[0])}, {int(ids[0])}
    top_k, top_p = filters.get("top_k", len(ids)), filters.get("top_p", 1.0)
    least = filters.get("min_p", 0.0) * probs[0]
    mass = np.concatenate([[0.0], np.cumsum(probs)])
    # The number of tokens before each one, with and without those that are equally likely up to rounding.
    most = np.searchsorted(-probs, -probs * (1 - ROUNDING), side="right") - 1
    fewest = np.searchsorted(-probs, -probs * (1 + ROUNDING), side="left")
    certain = (
        (most < top_k) & (mass[most + 1] - probs <= top_p - ROUNDING) & (probs >= least * (1 + ROUNDING))
    )
    possible = (fewest < top_k) & (mass[fewest] <= top_p + ROUNDING) & (probs >= least * (1 - ROUNDING))
    certain[0] = True
    return set(ids[certain].tolist()), set(ids[possible].tolist())


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 0.6},
        {"top_p": 0.7},
        {"top_k": 5, "temperature": 1.3},
    ],
    ids=str,
)
def test_nothing_outside_is_ever_drawn_and_what_is_inside_is(engine: Engine, filters: dict[str, Any]) -> None:
    drawn: dict[int, int] = {}
    one: CandidateSets | None = None
    for _ in range(10):
        answers = engine.generate(
            text=["the same position"] * 8,
            sampling_params={"max_new_tokens": 1, "ignore_eos": True, "n": 128, **filters},
            **ASKED,
        )
        for answer in answers:
            sets = sets_of(answer)
            one = one or sets
            assert sets.token_ids.tolist() == one.token_ids.tolist()
            (token,) = answer["output_ids"]
            drawn[token] = drawn.get(token, 0) + 1
    assert one is not None
    count = sum(drawn.values())
    assert count == 10_240
    token_ids, logprobs = one[0]
    assert set(drawn) <= set(token_ids.tolist())
    probs = np.exp(logprobs.astype(np.float64) - one.log_kept_mass[0])
    for token, prob in zip(token_ids.tolist(), probs, strict=True):
        # Five standard deviations. Every token with a probability above 0.001 is drawn.
        spread = 5 * np.sqrt(prob * (1 - prob) / count)
        assert abs(drawn.get(token, 0) / count - prob) <= max(spread, 1 / count)
        assert token in drawn or prob < 1e-3


def test_the_replayed_ratio_is_one(engine: Engine, model_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    sampling = {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 0.6, "n": 4, "ignore_eos": True}
    with run_sidecar(engine.url) as sidecar, RolloutClient(sidecar) as client:
        rollouts = client.generate(
            ["Once upon a time", "The answer is"],
            {**sampling, "max_new_tokens": 32},
            top_logprobs_source="sampler",
        )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    assert len(rollouts) == 8
    sizes = []
    for rollout in rollouts:
        assert rollout.top_logprobs_source == "sampler"
        sets = rollout.candidates
        assert sets is not None
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.output_ids])).long()
        with torch.no_grad():
            states = model.model(ids[None]).last_hidden_state[0, len(rollout.prompt_ids) - 1 : -1]
            new = score(
                states, model.lm_head.weight, ids[len(rollout.prompt_ids) :], sets, temperature=0.6
            ).logprobs
        old = replayed_old_logprobs(sets, output_ids=torch.from_numpy(rollout.output_ids.copy()))
        np.testing.assert_allclose((new - old).exp().numpy(), 1, atol=1e-3)
        np.testing.assert_allclose(rollout.masked_logprobs, old.numpy(), atol=1e-6)
        sizes += sets.sizes.tolist()
    assert 1 < max(sizes) <= 20


@pytest.mark.parametrize("base64", [True, False])
@pytest.mark.parametrize("place", ["top level", "custom_params"])
def test_every_form_of_the_answer(engine: Engine, base64: bool, place: str) -> None:
    params = {**SAMPLING, "top_k": 9}
    asked: dict[str, Any] = {"return_logprob": True}
    fields = {"top_logprobs_source": "sampler", "return_logprobs_in_base64": base64}
    if place == "custom_params":
        params["custom_params"] = fields
    else:
        asked |= fields
    whole = engine.generate(text="a form", sampling_params=params, **asked)
    last = engine.stream(text="a form", sampling_params=params, **asked)[-1]
    for answer in (whole, last):
        assert ("output_top_p_logprobs" in answer["meta_info"]) is not base64
        sets = sets_of(answer)
        assert sets.sizes.tolist() == [9] * len(sets)


def test_prompt_positions_have_no_sampler(engine: Engine) -> None:
    answer = engine.generate(
        text="a prompt", sampling_params=SAMPLING | {"top_k": 3}, logprob_start_len=0, **ASKED
    )
    assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]
    assert not [key for key in answer["meta_info"] if key.startswith("input_top_p")]
    assert sets_of(answer).sizes.max() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"top_logprobs_p": 0.9},
            "top_logprobs_source: got 'sampler' and top_logprobs_p; expected one of them",
        ),
        (
            {"top_logprobs_source": "nucleus"},
            "top_logprobs_source: got 'nucleus', expected 'distribution' or",
        ),
        ({"top_logprobs_source": 1}, "top_logprobs_source: got 1, expected"),
        ({"top_logprobs_source": ["sampler"] * 2}, "top_logprobs_source: got 2 values for 1 prompts"),
        ({"return_logprob": False}, "top_logprobs_source: needs return_logprob"),
        (
            {"sampling_params": {"custom_params": {"top_logprobs_p": 0.5}}},
            "top_logprobs_source: got 'sampler' and top_logprobs_p",
        ),
        (
            {"sampling_params": {"custom_params": {"top_logprobs_source": "distribution"}}},
            "top_logprobs_source: got 'sampler' and 'distribution' in sampling_params.custom_params",
        ),
        (
            {"top_logprobs_source": None, "sampling_params": {"custom_params": {"top_logprobs_source": "x"}}},
            "sampling_params.custom_params.top_logprobs_source: got 'x'",
        ),
    ],
)
def test_what_makes_no_sense_is_a_400(engine: Engine, change: dict[str, Any], message: str) -> None:
    answer = engine.post(**({"text": "a", "sampling_params": SAMPLING} | ASKED | change))
    assert answer.status_code == 400
    assert message in json.dumps(answer.json(), ensure_ascii=False).replace('\\"', '"')
    assert (
        sets_of(engine.generate(text="a", sampling_params=SAMPLING | {"top_k": 4}, **ASKED)).sizes.max() == 4
    )
