"""Scores and prompt sets around weight pushes that keep the prefix cache: each has one weight version.

The expected values come from a transformers forward pass. The weights differ in every layer, so KV of other
weights changes each position that attends to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import RequestError
from sglang_topp_client import AsyncRolloutClient
from sglang_topp_patches.releases import Feature, refused
from tests.engine.pushed_weights import restore_weights
from tests.engine.requests_during_push import InFlight, Scoring
from tests.engine.start_servers import Engine
from tests.engine.transformers_reference import MODEL_TOLERANCE, is_robust, nucleus, reference_logprobs

P = 0.9
NAMED = pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
WAYS = pytest.mark.parametrize("way", ["score", "log-probs alone", "generate"])


@pytest.fixture(autouse=True)
def weights_for_others(engine: Engine, model_path: Path) -> Iterator[None]:
    """The engine is shared, so restore its weights afterwards, and continue generation."""
    yield
    restore_weights(engine, model_path)


@pytest.fixture
async def requests(engine: Engine) -> AsyncIterator[InFlight]:
    async with InFlight.at(engine.url) as requests:
        yield requests


@dataclass(frozen=True)
class Scored:
    """Return the engine's log-probs and sets of a prompt from position `start` on."""

    start: int
    logprobs: np.ndarray
    sets: CandidateSets | None
    version: str
    cached_tokens: int

    def is_of(self, ids: list[int], model: Any) -> bool:
        """Return whether the log-probs equal those that transformers computes with these weights."""
        expected = reference_logprobs(model, ids[: self.start], ids[self.start :], 1.0)
        of_tokens = expected[np.arange(len(expected)), ids[self.start :]]
        return bool(np.abs(self.logprobs - of_tokens).max() < MODEL_TOLERANCE)

    def check(self, ids: list[int], model: Any) -> None:
        """Check that each position equals what transformers computes with these weights."""
        expected = reference_logprobs(model, ids[: self.start], ids[self.start :], 1.0)
        of_tokens = expected[np.arange(len(expected)), ids[self.start :]]
        np.testing.assert_allclose(self.logprobs, of_tokens, atol=MODEL_TOLERANCE)
        for t, (token_ids, logprobs) in enumerate(self.sets or ()):
            np.testing.assert_allclose(logprobs, expected[t, token_ids], atol=MODEL_TOLERANCE)
            if t % 8 == 0 and is_robust(expected[t], P):
                assert set(token_ids.tolist()) == nucleus(expected[t], P) | {ids[self.start + t]}


async def score(engine: Engine, way: str, ids: list[int], start: int = 1) -> Scored:
    """Score a prompt through our client, or as a part of generation."""
    if way != "generate":
        async with AsyncRolloutClient(engine.url) as client:
            p = P if way == "score" else None
            (one,) = await client.score([ids], top_logprobs_p=p, start=start)
        assert (one.candidates is not None) == (way == "score")
        return Scored(start, one.logprobs, one.candidates, str(one.weight_version), one.cached_tokens)
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_p": P,
        "return_logprobs_in_base64": True,
    }
    answer = await asyncio.to_thread(engine.generate, **body)
    meta_info = answer["meta_info"]
    reported = meta_info["input_token_logprobs"][1:]
    sets = formats.decode_top_p(meta_info, ids[start - 1 :], side="input")[1:]
    assert len(sets) == len(reported) == len(ids) - start
    logprobs = np.array([logprob for logprob, _, _ in reported], np.float32)
    return Scored(start, logprobs, sets, meta_info["weight_version"], meta_info["cached_tokens"])


def ids_of(length: int, seed: int) -> list[int]:
    """Return random token ids of a prompt. (SGLang reports the vocabulary's last id as 0.)"""
    ids: list[int] = np.random.default_rng(seed).integers(0, 511, length).tolist()
    return ids


async def push_in_place(requests: InFlight, path: Path, version: str | None) -> None:
    """Push in a pause that keeps every request and the cache."""
    await requests.pause("in_place")
    named = {} if version is None else {"weight_version": version}
    await requests.order("/update_weights_from_disk", model_path=str(path), flush_cache=False, **named)
    await requests.go_on()


def keep_the_cache_in_use(requests: InFlight) -> None:
    """Run a request through all pushes, as rollouts do."""
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    requests.send("rollout", text="under way", sampling_params=sampling, stream=True)


def check_version(scored: Scored, version: str) -> None:
    if not refused(Feature.WEIGHT_VERSIONS):
        assert scored.version == version


@NAMED
@WAYS
async def test_no_kv_of_older_weights_is_read(
    engine: Engine,
    requests: InFlight,
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    way: str,
    named: bool,
) -> None:
    ids = ids_of(500, seed=len(way) + named)
    (await score(engine, way, ids)).check(ids, reference_models["default"])
    # Ordinary requests leave their KV in the namespace that all others use.
    engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
    keep_the_cache_in_use(requests)
    await requests.arrive()
    for version in ("other-1", "other-2", "default"):
        await push_in_place(requests, weight_folders[version], version if named else None)
        engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
        first = await score(engine, way, ids)
        first.check(ids, reference_models[version])
        # A score uses the KV of an earlier score with the same weights.
        second = await score(engine, way, ids, start=300)
        second.check(ids, reference_models[version])
        assert (first.cached_tokens, second.cached_tokens) == (0, 299)
        for scored in (first, second):
            check_version(scored, version if named else "default")
    await requests.abort("rollout")
    await requests.answers()


@NAMED
@WAYS
@pytest.mark.parametrize("start", [1, 3500])
async def test_a_push_between_two_chunks(
    engine: Engine,
    requests: InFlight,
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    way: str,
    named: bool,
    start: int,
) -> None:
    """A push in mid-prompt is an error, and our client repeats the request.

    Its score has one version. Other callers get an error that tells them to repeat. Positions before `start`
    are not scored, but their KV would be of two versions.
    """
    scoring = Scoring(engine, requests, until=Scoring.LENGTH if start == 1 else start - 100)
    for _ in range(20):
        ids = scoring.ids()
        if way == "generate":
            sampling = {"max_new_tokens": 1}
            body = {"input_ids": ids, "sampling_params": sampling, "logprob_start_len": start - 1}
            body |= {"return_logprob": True, "top_logprobs_p": P}
            work = asyncio.ensure_future(requests.http.post("/generate", json=body))
        else:
            work = asyncio.ensure_future(score(engine, way, ids, start))
        if await scoring.meets_it("in_place", work):
            break
    else:
        pytest.fail("no pause met a prompt while it was scored")
    order = {"model_path": str(weight_folders["other-1"]), "flush_cache": False}
    if named:
        order["weight_version"] = "other-1"
    await requests.order("/update_weights_from_disk", **order)
    await requests.go_on()
    result = await work
    if way == "generate":
        assert result.status_code == 503
        assert "weights were pushed while the prompt was scored" in result.text
        result = await score(engine, way, ids, start)
    result.check(ids, reference_models["other-1"])
    check_version(result, "other-1" if named else "default")


@pytest.mark.parametrize("way", ["score", "log-probs alone"])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_requests_that_wait_through_a_push(
    engine: Engine,
    requests: InFlight,
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    way: str,
    mode: str,
) -> None:
    """Scores read no KV that was cached before the push, and older requests do not read theirs."""
    scoring = Scoring(engine, requests)
    ids = ids_of(500, seed=70 + len(way) + len(mode))
    await score(engine, way, ids)
    before = "default"
    for version in ("other-1", "other-2"):
        for _ in range(20):
            first = scoring.ids()
            starts = (1, 200, 350)
            # The first prompt takes sixty passes, and the others wait for it.
            work = [asyncio.create_task(score(engine, way, first, 1))]
            work += [asyncio.create_task(score(engine, way, ids, start)) for start in starts]
            if await scoring.meets_it(mode, work[0]):
                break
            await asyncio.gather(*work)
        else:
            pytest.fail("no pause met a sequence while it was scored")
        await requests.push(weight_folders[version], version, flush_cache=False)
        await requests.go_on()
        whole, *others = await asyncio.gather(*work)
        whole.check(first, reference_models[version])
        for scored in others:
            if not refused(Feature.WEIGHT_VERSIONS):
                scored.check(ids, reference_models[scored.version])
            elif not scored.is_of(ids, reference_models[version]):  # it was over before the push
                scored.check(ids, reference_models[before])
        before = version


async def test_after_a_flush_all_requests_share_the_cache_again(
    engine: Engine, requests: InFlight, weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    ids = ids_of(500, seed=90)
    await score(engine, "score", ids)
    await requests.push(weight_folders["other-1"], "other-1", flush_cache=False)
    await requests.push(weight_folders["other-2"], "other-2")
    engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
    scored = await score(engine, "score", ids, start=300)
    scored.check(ids, reference_models["other-2"])
    assert scored.cached_tokens == 299
    await requests.push(weight_folders["default"], "default", flush_cache=False)
    await requests.order("/flush_cache")
    engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
    scored = await score(engine, "score", ids, start=300)
    scored.check(ids, reference_models["default"])
    assert scored.cached_tokens == 299


async def test_weights_that_make_nan_are_named(engine: Engine, model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.model.norm.weight.data[0] = float("nan")
    async with AsyncRolloutClient(engine.url) as client:
        await client.push_weights(model, version="nan", via="tensor")
        for p in (P, None):
            with pytest.raises(RequestError, match=r"no candidate set at prompt position 1: .*NaN"):
                await client.score([[5, 6, 7]], top_logprobs_p=p)
        # In a release that does not know its weight version, NaN probabilities end SGLang's own sampler.
        for temperature in (0,) if refused(Feature.WEIGHT_VERSIONS) else (0, 1):
            sampling = {"max_new_tokens": 2, "temperature": temperature}
            with pytest.raises(RequestError, match=r"no candidate set at position 0: .*NaN"):
                await client.generate([[5, 6, 7]], sampling, top_logprobs_p=P)
