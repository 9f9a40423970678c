"""OpenAI's routes with the real `openai` client: one exact set per token of every choice, or an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from sglang_topp import CandidateSets, formats
from tests.documentation_blocks import block_with
from tests.engine.candidate_set_checks import check_nucleus
from tests.engine.start_servers import Engine

P = 0.8
ASKED = {"top_logprobs_p": P, "return_logprobs_in_base64": True}
PROMPT = "The quick brown fox"
MESSAGES: Any = [{"role": "user", "content": "Say something."}]
TOKENS = 16
# The largest difference between two forward passes with equal tokens.
TOLERANCE = 2e-5

BOTH_FORMS = pytest.mark.parametrize("base64", [True, False], ids=["base64", "list"])


def _takes(field: str) -> bool:
    """Return whether SGLang's own chat requests have a field."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    return field in ChatCompletionRequest.model_fields


SHOWS_IDS = {"return_token_ids": True} if _takes("return_token_ids") else {}
BOTH_PLACES = pytest.mark.parametrize("place", ["body", "custom_params"])


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=180
    ) as openai_client:
        yield openai_client


def complete(client: openai.OpenAI, extra: Mapping[str, Any], **request: Any) -> Any:
    request = {"prompt": PROMPT, "max_tokens": TOKENS, "top_p": P, **request}
    return client.completions.create(model="default", extra_body={"ignore_eos": True, **extra}, **request)


def chat(client: openai.OpenAI, extra: Mapping[str, Any], **request: Any) -> Any:
    request = {"messages": MESSAGES, "max_completion_tokens": TOKENS, "top_p": P, **request}
    return client.chat.completions.create(
        model="default", extra_body={"ignore_eos": True, **extra}, **request
    )


def decode(entry: Mapping[str, Any], p: float = P) -> CandidateSets:
    """Return one choice's sets. Check what a set alone can show."""
    sets = formats.decode_top_p(entry, entry["output_ids"], vocab_size=512)
    for t, (token_ids, logprobs) in enumerate(sets):
        check_nucleus(token_ids, logprobs, entry["output_ids"][t], p, t)
    return sets


def check_against_the_engine(engine: Engine, prompt_ids: list[int], entry: Any, p: float = P) -> None:
    """Check the sets against SGLang's log-probs over the whole vocabulary, from scoring the same tokens."""
    output_ids = entry["output_ids"]
    meta_info = engine.generate(
        input_ids=prompt_ids + output_ids,
        sampling_params={"max_new_tokens": 1, "temperature": 1.0},
        return_logprob=True,
        logprob_start_len=len(prompt_ids) - 1,
        top_logprobs_num=512,
    )["meta_info"]
    rows = meta_info["input_top_logprobs"][-len(output_ids) :]
    for (token_ids, logprobs), sampled_id, row in zip(decode(entry, p), output_ids, rows, strict=True):
        full = np.full(512, -np.inf)
        full[[token_id for _, token_id, _ in row]] = [logprob for logprob, _, _ in row]
        np.testing.assert_allclose(logprobs, full[token_ids], atol=TOLERANCE)
        mass = np.exp(full)
        surely_above = np.array([mass[full > each + TOLERANCE].sum() for each in full])
        maybe_above = np.array([mass[full > each - TOLERANCE].sum() for each in full]) - mass
        kept = set(token_ids.tolist())
        assert set(np.flatnonzero(maybe_above < p - 1e-4).tolist()) <= kept
        assert kept <= set(np.flatnonzero(surely_above < p + 1e-4).tolist()) | {sampled_id}


def asked(place: str, base64: bool) -> dict[str, Any]:
    fields = {"top_logprobs_p": P, "return_logprobs_in_base64": base64}
    return fields if place == "body" else {"custom_params": fields}


# -- whole answers -----------------------------------------------------------------------------------


@BOTH_FORMS
@BOTH_PLACES
def test_completions_have_the_sets_of_every_choice(
    engine: Engine, client: openai.OpenAI, tokenizer: Any, place: str, base64: bool
) -> None:
    prompts = [PROMPT, "0123456789"]
    extra = {**asked(place, base64), **SHOWS_IDS}
    answer = complete(client, extra, prompt=prompts, n=2)
    entries = answer.sglext["candidate_sets"]
    assert len(answer.choices) == len(entries) == 4
    assert ("output_top_p_logprobs_val_base64" in entries[0]) is base64
    for choice, entry in zip(answer.choices, entries, strict=True):
        assert choice.logprobs is None
        prompt_ids = tokenizer(prompts[choice.index // 2]).input_ids
        if SHOWS_IDS:
            assert choice.token_ids == entry["output_ids"]
            assert choice.prompt_token_ids == prompt_ids
        assert len(entry["output_ids"]) == TOKENS
        check_against_the_engine(engine, prompt_ids, entry)
    assert len({tuple(entry["output_ids"]) for entry in entries}) == 4


@BOTH_FORMS
@BOTH_PLACES
def test_chats_have_the_sets_of_every_choice(
    engine: Engine, client: openai.OpenAI, tokenizer: Any, place: str, base64: bool
) -> None:
    answer = chat(client, {**asked(place, base64), **SHOWS_IDS}, n=3)
    prompt_ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    entries = answer.sglext["candidate_sets"]
    assert len(answer.choices) == len(entries) == 3
    for choice, entry in zip(answer.choices, entries, strict=True):
        assert choice.logprobs is None
        if SHOWS_IDS:
            assert choice.response_token_ids == entry["output_ids"]
            assert choice.prompt_token_ids == prompt_ids
        check_against_the_engine(engine, prompt_ids, entry)


def test_everything_else_is_answered_as_without_sets(client: openai.OpenAI) -> None:
    for ask in (complete, chat):
        logprobs = {"logprobs": 4} if ask is complete else {"logprobs": True, "top_logprobs": 4}
        for request in ({}, logprobs, {"stop": ["e"]}):
            plain = ask(client, {}, temperature=0, **request).model_dump()
            with_sets = ask(client, ASKED, temperature=0, **request).model_dump()
            (entry,) = with_sets.pop("sglext")["candidate_sets"]
            assert decode(entry).sizes.min() >= 1
            assert len(entry["output_ids"]) == with_sets["usage"]["completion_tokens"]
            for answer in (plain, with_sets):
                for varies in ("id", "created"):
                    del answer[varies]
            assert with_sets == plain


def test_openais_own_logprobs_stay_beside_the_sets(client: openai.OpenAI) -> None:
    completion = complete(client, ASKED, logprobs=4)
    sets = decode(completion.sglext["candidate_sets"][0])
    shown = completion.choices[0].logprobs
    np.testing.assert_allclose(shown.token_logprobs, sets.sampled_logprobs, rtol=1e-6)
    # These log-probs are keyed by text, and several ids of this model have no text.
    assert all(0 < len(top) <= 4 for top in shown.top_logprobs)
    answer = chat(client, ASKED, logprobs=True, top_logprobs=4)
    sets = decode(answer.sglext["candidate_sets"][0])
    content = answer.choices[0].logprobs.content
    np.testing.assert_allclose([token.logprob for token in content], sets.sampled_logprobs, rtol=1e-6)
    assert all(0 < len(token.top_logprobs) <= 4 for token in content)
    assert len(content) == TOKENS


@pytest.mark.skipif(not _takes("return_output_ids_in_sglext"), reason="this SGLang has no such fields")
def test_sglangs_own_additions_stay_beside_the_sets(client: openai.OpenAI) -> None:
    extra = {"return_output_ids_in_sglext": True, "return_input_ids_in_sglext": True}
    answer = chat(client, {**ASKED, **extra, "return_meta_info": True})
    (entry,) = answer.sglext["candidate_sets"]
    assert answer.sglext["output_ids"] == [entry["output_ids"]]
    assert answer.sglext["input_ids"]
    meta_info = answer.choices[0].meta_info
    assert meta_info["completion_tokens"] == TOKENS
    assert not [key for key in meta_info if "top_p" in key or "sglang_topp" in key]


@pytest.mark.skipif(not _takes("input_ids"), reason="this SGLang's chats have no input_ids")
def test_a_chat_whose_token_ids_are_given_has_its_sets(engine: Engine, client: openai.OpenAI) -> None:
    """As Miles' session server asks."""
    extra = {**ASKED, "input_ids": [5, 6, 7], "return_meta_info": True}
    answer = chat(client, extra, logprobs=True)
    (entry,) = answer.sglext["candidate_sets"]
    assert answer.usage.prompt_tokens == 3
    check_against_the_engine(engine, [5, 6, 7], entry)


def test_sagemakers_name_of_the_chat_route_serves_them_too(engine: Engine) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "top_p": P, "ignore_eos": True, **ASKED}
    answer = engine.http.post("/invocations", json=body)
    (entry,) = answer.json()["sglext"]["candidate_sets"]
    assert len(decode(entry)) == 4


def test_a_threshold_for_each_prompt(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "without", "0123456789"]
    answer = complete(client, {**ASKED, "top_logprobs_p": [0.9, None, 0.3]}, prompt=prompts, n=2)
    entries = answer.sglext["candidate_sets"]
    assert [entry is None for entry in entries] == [False, False, True, True, False, False]
    for entry, p in zip(entries, [0.9, 0.9, 0, 0, 0.3, 0.3], strict=True):
        if entry:
            decode(entry, p)


def test_an_echoed_prompt_that_is_scored_has_its_sets(client: openai.OpenAI) -> None:
    answer = complete(client, {**ASKED, "top_logprobs_p": 1}, echo=True, logprobs=1)
    (entry,) = answer.sglext["candidate_sets"]
    assert entry["input_top_p_logprobs_lengths"] == [-1] + [512] * (len(PROMPT) - 1)


# -- streams -----------------------------------------------------------------------------------------


@BOTH_FORMS
@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stream_ends_with_the_sets_of_every_choice(client: openai.OpenAI, ask: Any, base64: bool) -> None:
    extra = {**asked("body", base64), "stream_options": {"include_usage": True}}
    *others, last = ask(client, extra, n=2, stream=True)
    assert len(others) > 2  # SGLang merges chunks if its HTTP process falls behind
    assert not any(getattr(chunk, "sglext", None) for chunk in others)
    assert others[-1].usage.completion_tokens == 2 * TOKENS
    assert last.choices == []
    assert (last.object, last.model, last.created) == (
        others[0].object,
        others[0].model,
        others[0].created,
    )
    entries = last.sglext["candidate_sets"]
    assert len(entries) == 2
    for entry in entries:
        assert len(decode(entry)) == TOKENS


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stream_holds_what_the_whole_answer_does(client: openai.OpenAI, ask: Any) -> None:
    whole = ask(client, ASKED, temperature=0)
    *others, last = ask(client, ASKED, temperature=0, stream=True)
    choices = [choice for chunk in others for choice in chunk.choices]
    if ask is complete:
        assert "".join(choice.text for choice in choices) == whole.choices[0].text
    else:
        text = "".join(choice.delta.content or "" for choice in choices)
        assert text == whole.choices[0].message.content
    (streamed,), (entry,) = last.sglext["candidate_sets"], whole.sglext["candidate_sets"]
    assert streamed["output_ids"] == entry["output_ids"]
    np.testing.assert_allclose(decode(streamed).logprobs, decode(entry).logprobs, atol=TOLERANCE)


# -- early ends, and wrong requests --------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [complete, chat])
def test_an_aborted_answer_has_the_sets_of_the_tokens_that_it_shows(
    engine: Engine, client: openai.OpenAI, ask: Any, stream: bool
) -> None:
    many = {"max_tokens": 3000} if ask is complete else {"max_completion_tokens": 3000}
    extra = {**ASKED, "return_token_ids": ask is complete, "top_logprobs_p": 0.3}
    if stream:
        chunks = ask(client, extra, stream=True, **many)
        shown = [next(chunks) for _ in range(5)]
        httpx.post(f"{engine.url}/abort_request", json={"abort_all": True}, timeout=60)
        *others, last = [*shown, *chunks]
        reasons = [choice.finish_reason for chunk in others for choice in chunk.choices]
        assert reasons[-1] == "abort"
    else:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, client, extra, **many)
            while not answer.done():
                httpx.post(f"{engine.url}/abort_request", json={"abort_all": True}, timeout=60)
            last = answer.result()
        assert last.choices[0].finish_reason == "abort"
    (entry,) = last.sglext["candidate_sets"]
    sets = decode(entry, 0.3)
    assert len(sets) == len(entry["output_ids"]) < 3000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"top_logprobs_p": 7}, "top_logprobs_p: got 7"),
        ({"top_logprobs_p": "0.9"}, "top_logprobs_p: got '0.9'"),
        ({"top_logprobs_p": [0.9, 0.9]}, "top_logprobs_p: got 2 values for 1 prompts"),
        ({"top_logprobs_p": 0.9, "return_logprobs_in_base64": "yes"}, "return_logprobs_in_base64: got 'yes'"),
        ({"return_logprobs_in_base64": True}, "return_logprobs_in_base64: sets the form of candidate sets"),
        ({"custom_params": {"top_logprobs_p": -1}}, "custom_params.top_logprobs_p: got -1"),
        ({"sampling_params": {"top_logprobs_p": 0.9}}, "sampling_params.top_logprobs_p: /v1/"),
        ({"top_logprobs_p": 0.9, "logit_bias": {"100000": 1.0}}, "logit_bias"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_bad_input_is_a_400_in_openais_words(
    client: openai.OpenAI, ask: Any, stream: bool, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"^Error code: 400") as error:
        ask(client, extra, stream=stream)
    assert words in error.value.message


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("extra", [{"top_logprobs_p": None}, {"top_logprobs_p": 0}, {}])
def test_who_does_not_ask_is_answered_without(client: openai.OpenAI, ask: Any, extra: dict[str, Any]) -> None:
    assert not hasattr(ask(client, extra), "sglext")


def test_the_documented_lines(client: openai.OpenAI) -> None:
    names: dict[str, Any] = {"openai_client": client, "messages": MESSAGES}
    exec(block_with("how-to/other-callers.md", "chat.completions.create("), names)
    assert len(names["sets"]) == len(names["entry"]["output_ids"]) > 0
