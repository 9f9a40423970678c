"""Scores from the real engine equal the log-probs of generation, and those of transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM

from sglang_topp import CandidateSets
from sglang_topp.errors import BadRequestError, RequestTimeoutError, ServerError
from sglang_topp_client import AsyncRolloutClient, RolloutClient, Score
from tests.engine.candidate_set_checks import check_nucleus
from tests.engine.start_servers import Engine, num_prefilled, run_sidecar
from tests.engine.transformers_reference import MODEL_TOLERANCE, is_robust, nucleus, reference_logprobs

PROMPTS = ["The quick brown fox", "a", "0123456789" * 20, "Zürich, 東京"]
SAMPLING = {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
# The largest difference between two forward passes with equal tokens in different batches.
NOISE = 2 * MODEL_TOLERANCE
CONTEXT = 4096
# A stream of 0.5.12 does not say of every error that the request was wrong.
TOO_LONG = (BadRequestError, *([ServerError] if Version(version("sglang")) < Version("0.5.13") else []))


@pytest.fixture(scope="module")
def reference_model(model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sidecar(engine: Engine) -> Iterator[str]:
    with run_sidecar(engine.url) as url:
        while httpx.get(f"{url}/readyz", timeout=60).status_code != 200:
            time.sleep(0.1)
        yield url


@pytest.fixture(params=["engine", "sidecar"])
def client(request: pytest.FixtureRequest, engine: Engine) -> Iterator[RolloutClient]:
    url = engine.url if request.param == "engine" else request.getfixturevalue("sidecar")
    with RolloutClient(url) as client:
        yield client


def ids_of(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return ids


def check_score(score: Score, p: float) -> CandidateSets:
    """Check what a score alone can show."""
    scored = score.token_ids[score.start :]
    sets = score.candidates
    assert sets is not None
    assert len(sets) == len(score.logprobs) == len(scored)
    np.testing.assert_array_equal(sets.sampled_ids, scored)
    np.testing.assert_array_equal(sets.sampled_logprobs, score.logprobs)
    for t, (token_ids, logprobs) in enumerate(sets):
        assert logprobs is not None
        check_nucleus(token_ids, logprobs, int(scored[t]), p, t)
    return sets


def check_agree(one: CandidateSets, other: CandidateSets, p: float) -> None:
    """Check that the sets are equal up to rounding: a token in only one of them lies at the cutoff."""
    np.testing.assert_array_equal(one.sampled_ids, other.sampled_ids)
    num_equal = 0
    for t in range(len(one)):
        mine, theirs = dict(zip(*one[t], strict=True)), dict(zip(*other[t], strict=True))
        shared = sorted(mine.keys() & theirs.keys())
        np.testing.assert_allclose([mine[i] for i in shared], [theirs[i] for i in shared], atol=NOISE)
        num_equal += mine.keys() == theirs.keys()
        for larger, smaller in ((mine, theirs), (theirs, mine)):
            for token in larger.keys() - smaller.keys():
                above = sum(np.exp(v) for v in larger.values() if v > larger[token] + NOISE)
                level = sum(np.exp(v) for v in larger.values() if v >= larger[token] - NOISE)
                assert above - 1e-4 < p < level + 1e-4, f"position {t}: {token} is in one alone"
    assert num_equal >= 0.95 * len(one)


@pytest.mark.parametrize(
    ("sampling", "p"),
    [({}, 0.9), ({"temperature": 0.0}, 0.99), ({"top_p": 0.8, "top_k": 20}, 0.5), ({"min_p": 0.05}, 1.0)],
    ids=["sampled", "greedy", "filtered", "whole"],
)
def test_scores_equal_what_generation_gave(client: RolloutClient, sampling: dict[str, Any], p: float) -> None:
    rollouts = client.generate(PROMPTS, {**SAMPLING, **sampling, "n": 2}, top_logprobs_p=p)
    scores = client.score(rollouts, top_logprobs_p=p)
    for index, (score, rollout) in enumerate(zip(scores, rollouts, strict=True)):
        assert (score.sequence_index, score.start) == (index, len(rollout.prompt_ids))
        np.testing.assert_array_equal(score.token_ids[: score.start], rollout.prompt_ids)
        np.testing.assert_array_equal(score.token_ids[score.start :], rollout.output_ids)
        np.testing.assert_allclose(score.logprobs, rollout.logprobs, atol=NOISE)
        assert score.weight_version == rollout.weight_version
        assert rollout.candidates is not None
        check_agree(check_score(score, p), rollout.candidates, p)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_scores_are_of_temperature_1_whatever_was_sampled_with(
    engine: Engine, reference_model: Any, temperature: float
) -> None:
    with RolloutClient(engine.url) as client:
        (rollout,) = client.generate(
            PROMPTS[0], {**SAMPLING, "temperature": temperature, "frequency_penalty": 0.5}, top_logprobs_p=0.9
        )
        (score,) = client.score(rollout, top_logprobs_p=0.9)
    whole = reference_logprobs(reference_model, rollout.prompt_ids.tolist(), rollout.output_ids.tolist(), 1.0)
    expected = whole[np.arange(len(whole)), rollout.output_ids]
    np.testing.assert_allclose(score.logprobs, expected, atol=MODEL_TOLERANCE)
    assert np.abs(score.logprobs - rollout.logprobs).max() > 0.1


@pytest.mark.parametrize("p", [0.5, 0.95])
def test_scores_equal_the_definition_on_transformers_logprobs(
    client: RolloutClient, reference_model: Any, p: float
) -> None:
    """Score texts, and ids that no model would generate, from the first position with a distribution."""
    compared = total = 0
    texts = [PROMPTS[0], *PROMPTS[2:]]
    for score in client.score(texts, top_logprobs_p=p) + client.score([ids_of(150)], top_logprobs_p=p):
        sets, ids = check_score(score, p), score.token_ids.tolist()
        assert score.start == 1
        expected = reference_logprobs(reference_model, ids[:1], ids[1:], 1.0)
        np.testing.assert_allclose(
            score.logprobs, expected[np.arange(len(expected)), ids[1:]], atol=MODEL_TOLERANCE
        )
        for t, (token_ids, logprobs) in enumerate(sets):
            np.testing.assert_allclose(logprobs, expected[t, token_ids], atol=MODEL_TOLERANCE)
            total += 1
            if is_robust(expected[t], p):
                compared += 1
                assert set(token_ids.tolist()) == nucleus(expected[t], p) | {ids[1 + t]}
    assert compared > total / 3, f"only {compared} of {total} positions were clear of rounding"


@pytest.mark.parametrize("start", [1, 63, 64, 65, 128, 199, 200])
def test_every_start_is_a_part_of_the_same(client: RolloutClient, start: int) -> None:
    """Lengths around the ends of prefill chunks of 64 tokens."""
    ids = ids_of(200, seed=start)
    (whole,) = client.score([ids], top_logprobs_p=0.9)
    (part,) = client.score([ids], top_logprobs_p=0.9, start=start)
    assert part.start == start
    np.testing.assert_allclose(part.logprobs, whole.logprobs[start - 1 :], atol=NOISE)
    assert whole.candidates is not None
    check_agree(check_score(part, 0.9), whole.candidates[start - 1 :], 0.9)
    # The prefix before the row of the first distribution comes from the cache.
    assert part.cached_tokens == start - 1


def test_a_long_sequence_in_many_chunks_beside_its_cached_prefix(engine: Engine) -> None:
    ids = ids_of(1500, seed=1)
    with RolloutClient(engine.url) as client:
        (first,) = client.score([ids[:700]], top_logprobs_p=0.9)
        (second,) = client.score([ids], top_logprobs_p=0.9, start=600)
        (third,) = client.score([ids], top_logprobs_p=0.9)
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 599, 0)
    assert first.candidates is not None
    assert third.candidates is not None
    check_score(third, 0.9)
    check_agree(third.candidates[:699], first.candidates, 0.9)
    check_agree(third.candidates[599:], check_score(second, 0.9), 0.9)


def test_the_longest_sequence_and_one_that_is_longer(client: RolloutClient) -> None:
    """SGLang keeps six tokens of the context for itself."""
    ids = ids_of(CONTEXT - 6, seed=2)
    (score,) = client.score([ids[:-1]], top_logprobs_p=0.9, start=4000)
    check_score(score, 0.9)
    for longer in (ids, ids_of(CONTEXT), ids_of(CONTEXT + 1)):
        with pytest.raises(TOO_LONG, match=r"(?i)input"):
            client.score([longer], top_logprobs_p=0.9)


def test_ids_at_the_ends_of_the_vocabulary(client: RolloutClient) -> None:
    """SGLang reports the vocabulary's last id as 0, but with the right set and log-prob."""
    (score,) = client.score([[0, 511, 0, 511, 511, 5]], top_logprobs_p=1.0)
    assert check_score(score, 1.0).sizes.tolist() == [512] * 5
    (alone,) = client.score([[511, 0, 511]])
    assert alone.candidates is None
    assert len(alone.logprobs) == 2


def test_nothing_to_score(client: RolloutClient) -> None:
    for score in client.score([[5], [5, 6, 7]], top_logprobs_p=0.9, start=[1, 3]):
        assert score.candidates is not None
        assert len(score.candidates) == len(score.logprobs) == 0


def test_log_probs_alone_are_those_beside_sets(client: RolloutClient) -> None:
    ids = ids_of(100, seed=3)
    with_sets, alone = client.score([ids], top_logprobs_p=0.5) + client.score([ids])
    assert alone.candidates is None
    np.testing.assert_allclose(alone.logprobs, with_sets.logprobs, atol=NOISE)


def test_a_start_behind_a_text(client: RolloutClient) -> None:
    for start in (5, 6, 100):
        with pytest.raises(BadRequestError, match="start"):
            client.score("abcd", top_logprobs_p=0.5, start=start)


async def test_many_at_once_beside_generation(engine: Engine, sidecar: str) -> None:
    """Lengths, thresholds, and starts differ, and some sequences request log-probs only."""
    sequences = [ids_of(20 + 13 * i, seed=100 + i) for i in range(24)]
    thresholds = [(None, 0.3, 0.9, 1.0)[i % 4] for i in range(24)]
    starts = [1 + 5 * (i % 4) for i in range(24)]
    async with AsyncRolloutClient(engine.url) as straight, AsyncRolloutClient(sidecar) as through:
        generated, *answers = await asyncio.gather(
            straight.generate(PROMPTS, {**SAMPLING, "n": 2}, top_logprobs_p=0.9),
            straight.score(sequences, top_logprobs_p=thresholds, start=starts),
            through.score(sequences, top_logprobs_p=thresholds, start=starts),
        )
    assert len(generated) == 8
    for one, other, ids, p, start in zip(*answers, sequences, thresholds, starts, strict=True):
        for score in (one, other):
            assert score.token_ids.tolist() == ids
            assert score.start == start
            if p is None:
                assert score.candidates is None
            else:
                check_score(score, p)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=NOISE)


async def test_what_nobody_waits_for_any_more_is_stopped(engine: Engine, sidecar: str) -> None:
    for seed, url in ((200, engine.url), (300, sidecar)):
        sequences = [ids_of(3000, seed=seed + i) for i in range(20)]
        before = num_prefilled(engine)
        async with AsyncRolloutClient(url) as client:
            with pytest.raises(RequestTimeoutError):
                await client.score(sequences, top_logprobs_p=1.0, timeout_s=0.5)
            # If they still ran, this request would wait for them.
            (score,) = await client.score([ids_of(30, seed=seed)], top_logprobs_p=0.9)
            check_score(score, 0.9)
        assert num_prefilled(engine) - before < 20 * 3000 / 2
