"""slime's fields on the real engine, read by a decoder that was written from slime's contract alone.

The truth is SGLang's own distribution: each position is generated once more, from the tokens before it, with
`top_logprobs_num` set to the vocabulary's size. With `SLIME_SOURCE` set to a checkout of slime, its own
`Sample` reads every answer too.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest

from sglang_topp_patches.releases import Feature, refused
from tests.engine.candidate_set_checks import check_nothing_is_held, checked_sets
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.requests_during_push import InFlight
from tests.engine.start_servers import Engine

FLAG = {"return_top_p_token_ids": True}
PROMPT = [7, 8, 9, 300, 41]
# slime writes these into every request of a rollout.
SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.7,
    "top_k": -1,
    "max_new_tokens": 12,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "ignore_eos": True,
    "custom_params": FLAG,
}
# The log-probs of two forward passes differ by this much. A cut that comes this near may fall either way.
ROUNDING = 1e-4


def request(**sampling: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {**SAMPLING, **sampling}}


class Reader(Protocol):
    """A sample as a trainer keeps it."""

    tokens: list[int]

    def read(self, answer: dict[str, Any]) -> None:
        """Append one answer."""

    def arrays(self) -> tuple[list[float], np.ndarray, np.ndarray]:
        """Return the log-probs [T], the kept token ids [n], and the offsets [T + 1]."""


@dataclass
class ContractReader:
    """Reads answers by the contract: what is appended must fit the tokens that are appended."""

    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])

    def read(self, answer: dict[str, Any]) -> None:
        meta_info = answer["meta_info"]
        pairs = [(each[0], each[1]) for each in meta_info.get("output_token_logprobs", [])]
        if not pairs:
            return
        kept, offsets = (
            np.frombuffer(base64.b64decode(meta_info[name], validate=True), "<i4").tolist()
            for name in ("top_p_token_ids", "top_p_token_offsets")
        )
        assert len(offsets) == len(pairs) + 1
        assert (offsets[0], offsets[-1]) == (0, len(kept))
        self.offsets += [self.offsets[-1] + offset for offset in offsets[1:]]
        self.kept += kept
        self.logprobs += [logprob for logprob, _ in pairs]
        self.tokens = self.tokens + [token_id for _, token_id in pairs]

    def arrays(self) -> tuple[list[float], np.ndarray, np.ndarray]:
        return self.logprobs, np.array(self.kept), np.array(self.offsets)


class SlimeReader:
    """Reads answers with slime's own code, as its `generate` does."""

    def __init__(self, tokens: list[int]) -> None:
        self._sample = importlib.import_module("slime.utils.types").Sample(tokens=list(tokens))

    @property
    def tokens(self) -> list[int]:
        return list(self._sample.tokens)

    def read(self, answer: dict[str, Any]) -> None:
        meta_info = answer["meta_info"]
        pairs = meta_info.get("output_token_logprobs", [])
        self._sample.append_response_tokens(
            SimpleNamespace(),
            tokens=[each[1] for each in pairs],
            log_probs=[each[0] for each in pairs],
            trainable=True,
            meta_info=meta_info,
            text=answer["text"],
            update_terminal_info=bool(meta_info.get("finish_reason")),
        )

    def arrays(self) -> tuple[list[float], np.ndarray, np.ndarray]:
        sample = self._sample
        ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        return sample.rollout_log_probs, ids.numpy(), offsets.numpy()


@pytest.fixture(params=["contract", "slime"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Reader]]:
    if request.param == "contract":
        yield ContractReader
        return
    source = os.environ.get("SLIME_SOURCE")
    if not source:
        pytest.skip("SLIME_SOURCE names no checkout of slime")
    monkeypatch.syspath_prepend(source)
    yield SlimeReader
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


def check(engine: Engine, sample: Reader, num_prompt: int = len(PROMPT), **sampling: Any) -> list[set[int]]:
    """Check a sample. Return the kept tokens of each position.

    Args:
        engine: the engine that generated it.
        sample: prompt and answer.
        num_prompt: the length of its prompt.
        sampling: the sampling parameters that differ from `SAMPLING`.
    """
    logprobs, kept, offsets = sample.arrays()
    assert len(sample.tokens) - num_prompt == len(logprobs) == len(offsets) - 1
    params = {**SAMPLING, **sampling, "max_new_tokens": 1}
    del params["custom_params"]
    params.pop("n", None)
    places = range(num_prompt, len(sample.tokens))
    truth = engine.generate(
        input_ids=[sample.tokens[:place] for place in places],
        sampling_params=params,
        return_logprob=True,
        top_logprobs_num=VOCAB_SIZE,
    )
    rows = []
    for t, (place, answer) in enumerate(zip(places, truth, strict=True)):
        q = np.full(VOCAB_SIZE, np.nan)
        for logprob, token_id, _ in answer["meta_info"]["output_top_logprobs"][0]:
            q[token_id] = logprob
        mass = np.exp(q)
        above = (mass > mass[:, None]) @ mass
        row = kept[offsets[t] : offsets[t + 1]].tolist()
        sampled = sample.tokens[place]
        assert len(set(row)) == len(row)
        assert set(np.flatnonzero(above < params["top_p"] - ROUNDING)) | {sampled} <= set(row)
        assert set(row) <= set(np.flatnonzero(above < params["top_p"] + ROUNDING)) | {sampled}
        assert logprobs[t] == pytest.approx(q[sampled] - np.log(mass[row].sum()), abs=1e-3)
        rows.append(set(row))
    return rows


def read(reader: type[Reader], *answers: dict[str, Any]) -> Reader:
    sample = reader(PROMPT)
    for answer in answers:
        sample.read(answer)
    return sample


def test_samples_of_one_prompt(engine: Engine, reader: type[Reader]) -> None:
    answers = engine.generate(**request(n=3))
    rows = [row for answer in answers for row in check(engine, read(reader, answer))]
    sizes = list(map(len, rows))
    assert len(sizes) == 3 * SAMPLING["max_new_tokens"]
    assert len(set(sizes)) > 3
    for answer in answers:
        meta_info = answer["meta_info"]
        assert not [key for key in meta_info if "top_p_logprobs" in key or key.startswith("sglang_topp")]


def test_each_request_of_a_batch_has_its_own_p(engine: Engine, reader: type[Reader]) -> None:
    """Beside requests for sets in our own fields, and for none."""
    others = [{"top_logprobs_p": 0.7}, {}, {"return_top_p_token_ids": False}]
    customs = [*[FLAG] * 4, *others]
    top_ps = [0.1, 0.5, 0.95, 1.0, *[0.7] * len(others)]
    answers = engine.generate(
        input_ids=[PROMPT] * len(customs),
        sampling_params=[
            {**SAMPLING, "top_p": top_p, "custom_params": custom}
            for top_p, custom in zip(top_ps, customs, strict=True)
        ],
        return_logprob=True,
    )
    for answer, top_p in zip(answers[:4], top_ps, strict=False):
        rows = check(engine, read(reader, answer), top_p=top_p)
        assert top_p < 1 or [len(row) for row in rows] == [VOCAB_SIZE] * len(rows)
    checked_sets(answers[4], 0.7)
    for answer in answers[5:]:
        assert "top_p_token_ids" not in answer["meta_info"]
        assert "output_top_p_logprobs" not in answer["meta_info"]


def test_every_chunk_of_a_stream_is_whole(engine: Engine, reader: type[Reader]) -> None:
    chunks = engine.stream(**request())
    assert len(chunks) > 1
    before = 0
    for chunk in chunks:
        sample = read(reader, chunk)
        assert len(sample.tokens) - len(PROMPT) == len(chunk["output_ids"]) >= before
        before = len(chunk["output_ids"])
    assert before == SAMPLING["max_new_tokens"]
    check(engine, read(reader, chunks[-1]))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_continued(engine: Engine, reader: type[Reader], stream: bool) -> None:
    """As slime does it: abort everything, keep what there is, and send prompt and answer again."""
    async with InFlight.at(engine.url) as requests:
        requests.send("cut", stream=stream, **request(max_new_tokens=4000))
        requests.send("watched", stream=True, **request(max_new_tokens=4000))
        await requests.arrive()
        await requests.move("watched", 3)
        await requests.order("/abort_request", rid="", abort_all=True)
        answers = await requests.answers()
    for answer in answers.values():
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    sample = read(reader, answers["cut"])
    num_tokens = len(sample.tokens) - len(PROMPT)
    assert num_tokens == len(answers["cut"]["output_ids"])
    body = {**request(), "input_ids": sample.tokens}
    # An aborted stream is a part of the sample, whatever form the rest comes in.
    sample.read(await asyncio.to_thread(lambda: engine.generate(**body)))
    assert len(sample.tokens) == len(PROMPT) + num_tokens + SAMPLING["max_new_tokens"]
    check(engine, sample)
    check_nothing_is_held(engine)


async def test_answers_that_are_aborted_before_their_first_token(
    engine: Engine, reader: type[Reader]
) -> None:
    """Long prompts that are prefilled one after the other, in chunks: the last ones still wait."""
    first = 1 if reader is ContractReader else 100  # of which nothing is cached
    prompts = [[first + number] * 2500 for number in range(6)]
    async with InFlight.at(engine.url) as requests:
        for number, prompt in enumerate(prompts):
            requests.send(str(number), **{**request(), "input_ids": prompt, "stream": number % 2 == 0})
        while not requests.is_done("0"):
            load = (await requests.http.get("/v1/loads")).json()["loads"][0]
            if load["num_waiting_reqs"] >= 3:
                break
        await requests.order("/abort_request", rid="", abort_all=True)
        answers = await requests.answers()
    waited = []
    for number, prompt in enumerate(prompts):
        answer, sample = answers[str(number)], reader(prompt)
        sample.read(answer)
        assert sample.tokens == prompt + answer["output_ids"]
        if not answer["output_ids"]:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            waited.append((prompt, sample))
    assert len(waited) > 2
    prompt, sample = waited[-1]
    sample.read(await asyncio.to_thread(lambda: engine.generate(**{**request(), "input_ids": prompt})))
    check(engine, sample, len(prompt))


def test_an_answer_without_tokens(engine: Engine, reader: type[Reader]) -> None:
    """SGLang lists one log-prob there, of no token."""
    answer = engine.generate(**request(max_new_tokens=0))
    assert answer["output_ids"] == []
    sample = reader(PROMPT)
    sample.read(answer)
    assert sample.tokens == PROMPT


def test_ties_at_the_cutoff_are_kept(engine: Engine, reader: type[Reader]) -> None:
    """A bias of 1e9 leaves nothing of float32 logits, so these tokens are equally likely."""
    tied = [3, 70, 71, 200, 511]
    bias = {"logit_bias": {str(token_id): 1e9 for token_id in tied}, "top_p": 0.5}
    sample = read(reader, engine.generate(**request(**bias)))
    assert check(engine, sample, **bias) == [set(tied)] * SAMPLING["max_new_tokens"]
    assert sample.arrays()[0] == pytest.approx([-np.log(5)] * SAMPLING["max_new_tokens"])


ALONE = "return_top_p_token_ids returns the nucleus of top_p alone"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling_params": {"top_k": 20}}, f"sampling_params.top_k: got 20, expected -1: {ALONE}"),
        ({"sampling_params": {"min_p": 0.1}}, f"sampling_params.min_p: got 0.1, expected 0: {ALONE}"),
        (
            {"sampling_params": {"temperature": 0}},
            f"sampling_params.temperature: got 0, expected more than 0: {ALONE}",
        ),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p: got 0, expected a number p"),
        ({"return_logprob": False}, "return_top_p_token_ids: needs return_logprob to be true, got False"),
        ({"top_logprobs_p": 0.9}, "return_top_p_token_ids: got it with top_logprobs_p; expected one"),
        ({"top_logprobs_source": "sampler"}, "got it with top_logprobs_source; expected one"),
        ({"top_logprobs_num": 2}, "top_logprobs_num: got 2 with return_top_p_token_ids; expected none"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob: got [1] with return_top_p_token_ids"),
        (
            {"sampling_params": {"custom_params": {"return_top_p_token_ids": "yes"}}},
            "sampling_params.custom_params.return_top_p_token_ids: got 'yes', expected true or false",
        ),
        ({"extra_body": FLAG}, "extra_body.return_top_p_token_ids: /generate ignores the field there"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_a_400_that_reads_well_in_a_log(
    engine: Engine, change: dict[str, Any], words: str, stream: bool
) -> None:
    """slime repeats every failed request 60 times, and logs the body of each answer as it is."""
    change = dict(change)
    sampling = change.pop("sampling_params", {})
    answer = engine.post(**{**request(**sampling), **change, "stream": stream})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]
    assert words in answer.text  # nothing of it is escaped
    if change.keys() <= {"sampling_params"} and sampling.keys() & {"top_k", "min_p"}:
        reason = refused(Feature.SAMPLER_SOURCE) or "'sampler' returns sets of other filters"
        assert reason in answer.text


def test_the_openai_routes_refuse(engine: Engine) -> None:
    body = {"model": "default", "prompt": "hello", "max_tokens": 2}
    for place, extra in (
        ("return_top_p_token_ids", FLAG),
        ("custom_params.return_top_p_token_ids", {"custom_params": FLAG}),
    ):
        answer = engine.http.post("/v1/completions", json={**body, **extra})
        assert answer.status_code == 400
        message = f"{place}: /v1/completions cannot return candidate sets; send the request to /generate"
        assert answer.json()["message"] == message
    assert engine.http.post("/v1/completions", json=body).status_code == 200


def test_an_answer_of_another_request_is_unchanged(engine: Engine) -> None:
    """Its log-probs stay those over the whole vocabulary, beside requests with slime's field."""
    bias = {"logit_bias": {str(token_id): 1e9 for token_id in (3, 70, 71, 200)}, "top_p": 0.5}
    plain = {**SAMPLING, **bias, "custom_params": None}
    flagged = {**SAMPLING, **bias, "top_p": 0.2}
    answers = engine.generate(
        input_ids=[PROMPT] * 2, sampling_params=[plain, flagged], return_logprob=True, stream=False
    )
    for answer in answers:
        logprobs = [each[0] for each in answer["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx([-np.log(4)] * SAMPLING["max_new_tokens"])
    assert [bool(re.search("top_p_token", key)) for key in answers[0]["meta_info"]].count(True) == 0
