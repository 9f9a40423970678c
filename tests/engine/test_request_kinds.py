"""Every kind of request that SGLang takes: one exact set per visible token, always."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_topp import CandidateSets, formats
from sglang_topp_patches.releases import Feature, installed, refused
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.start_servers import Engine, run_engine
from tests.skip_missing_features import needs_grammars

PROMPT = "The quick brown fox"
WANTED = {"return_logprob": True, "top_logprobs_p": 0.8, "return_logprobs_in_base64": True}
SAMPLING = {"max_new_tokens": 24, "temperature": 1.0, "top_p": 0.8, "ignore_eos": True}


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 1.0},
        {"top_k": 5},
        {"top_p": 1.0, "min_p": 0.1},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.4},
        {"logit_bias": {"65": 6.0, "300": -50.0}},
        {"min_new_tokens": 10, "ignore_eos": False},
    ],
    ids=lambda sampling: "-".join(sampling) or "plain",
)
def test_sampling_parameters(engine: Engine, sampling: dict[str, Any]) -> None:
    answer = engine.generate(text=PROMPT, sampling_params={**SAMPLING, **sampling}, **WANTED)
    sets = checked_sets(answer, 0.8)
    assert len(sets) == 24 or sampling.get("ignore_eos") is False


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.999, 1, 1.0])
def test_thresholds(engine: Engine, p: float) -> None:
    answer = engine.generate(text=PROMPT, sampling_params=SAMPLING, **{**WANTED, "top_logprobs_p": p})
    sets = checked_sets(answer, p)
    if p == 1:
        assert sets.sizes.tolist() == [512] * 24  # a softmax leaves every token some probability
    if p == 1e-6:
        assert sets.sizes.max() <= 2  # the most likely token and the sampled one


def test_list_form_holds_the_same_as_base64(engine: Engine) -> None:
    request = {"text": PROMPT, "sampling_params": {**SAMPLING, "temperature": 0}}
    packed = engine.generate(**request, **WANTED)
    listed = engine.generate(**request, return_logprob=True, top_logprobs_p=0.8, return_text_in_logprobs=True)
    rows = listed["meta_info"]["output_top_p_logprobs"]
    assert all(isinstance(text, str) for row in rows for _, _, text in row)
    assert [[token_id for _, token_id, _ in row] for row in rows] == checked_sets(packed, 0.8).to_lists()[0]
    checked_sets(listed, 0.8)


def test_decoding_with_nothing_of_ours(engine: Engine) -> None:
    meta_info = engine.generate(text=PROMPT, sampling_params=SAMPLING, **WANTED)["meta_info"]
    values = base64.b64decode(meta_info["output_top_p_logprobs_val_base64"])
    ids = base64.b64decode(meta_info["output_top_p_logprobs_idx_base64"])
    lengths = meta_info["output_top_p_logprobs_lengths"]
    count = sum(lengths)
    logprobs, token_ids = struct.unpack(f"<{count}f", values), struct.unpack(f"<{count}i", ids)
    starts = itertools.accumulate(lengths, initial=0)
    for (logprob, sampled, _), start, length in zip(
        meta_info["output_token_logprobs"], starts, lengths, strict=False
    ):
        found = dict(zip(token_ids[start : start + length], logprobs[start : start + length], strict=True))
        assert found[sampled] == logprob


def test_batch_with_one_threshold_each_and_one_without(engine: Engine) -> None:
    prompts = ["one", "two", "three"]
    answers = engine.generate(
        text=prompts, sampling_params=SAMPLING, **{**WANTED, "top_logprobs_p": [0.5, None, 0.9]}
    )
    checked_sets(answers[0], 0.5)
    assert not formats.has_top_p(answers[1]["meta_info"])
    checked_sets(answers[2], 0.9)


def test_input_ids_and_parallel_samples(engine: Engine) -> None:
    answers = engine.generate(
        input_ids=[[70, 71, 72], [80, 81]],
        sampling_params={**SAMPLING, "n": 3},
        **{**WANTED, "top_logprobs_p": [0.5, 0.9]},
    )
    assert len(answers) == 6
    for i, answer in enumerate(answers):
        checked_sets(answer, [0.5, 0.9][i // 3])
    assert len({tuple(answer["output_ids"]) for answer in answers[:3]}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_only_scored_beside_others(engine: Engine, stream: bool) -> None:
    """In one pass with other requests, SGLang samples for it too, and may report that token's log-prob."""
    sampling = [{**SAMPLING, "max_new_tokens": 3 * (i % 2)} for i in range(8)]
    request = {"text": list("abcdefgh"), "sampling_params": sampling, "logprob_start_len": 0, **WANTED}
    if stream:
        last = {chunk["index"]: chunk for chunk in engine.stream(**request)}
        answers = [last[i] for i in range(8)]
    else:
        answers = engine.generate(**request)
    for answer, params in zip(answers, sampling, strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        sets = formats.decode_top_p(answer["meta_info"], answer["output_ids"])
        assert len(sets) == params["max_new_tokens"]


def test_streaming_is_cumulative(engine: Engine) -> None:
    chunks = engine.stream(text=PROMPT, sampling_params=SAMPLING, **WANTED)
    assert len(chunks) > 1  # SGLang merges chunks if its HTTP process falls behind
    for chunk in chunks:
        checked_sets(chunk, 0.8)
    assert len(chunks[-1]["output_ids"]) == 24


def test_stop_string_cuts_the_sets_with_the_tokens(engine: Engine) -> None:
    greedy = {**SAMPLING, "temperature": 0, "max_new_tokens": 40}
    whole = engine.generate(text=PROMPT, sampling_params=greedy, **WANTED)
    stop = whole["text"][6:8]
    answer = engine.generate(text=PROMPT, sampling_params={**greedy, "stop": [stop]}, **WANTED)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert 0 < len(answer["output_ids"]) < 40
    checked_sets(answer, 0.8)


def test_stop_token(engine: Engine) -> None:
    greedy = {**SAMPLING, "temperature": 0, "ignore_eos": False}
    token = engine.generate(text=PROMPT, sampling_params=greedy)["output_ids"][5]
    answer = engine.generate(text=PROMPT, sampling_params={**greedy, "stop_token_ids": [token]}, **WANTED)
    assert answer["output_ids"][-1] == token
    checked_sets(answer, 0.8)


@needs_grammars()
def test_json_schema_keeps_forbidden_tokens_out(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = engine.generate(
        text=PROMPT,
        sampling_params={
            **SAMPLING,
            "ignore_eos": False,
            "json_schema": json.dumps(schema),
            "max_new_tokens": 64,
        },
        **{**WANTED, "top_logprobs_p": 1.0},
    )
    sets = checked_sets(answer, 1.0)
    # The first character of a JSON object is a brace or white space: the grammar forbids the rest.
    assert 1 <= sets.sizes[0] < 20
    assert np.isfinite(sets.logprobs).all()


def test_custom_params_carry_the_same_names(engine: Engine) -> None:
    names = {"top_logprobs_p": 0.8, "return_logprobs_in_base64": True}
    answer = engine.generate(
        text=PROMPT, sampling_params={**SAMPLING, "custom_params": names}, return_logprob=True
    )
    assert "output_top_p_logprobs_val_base64" in answer["meta_info"]
    checked_sets(answer, 0.8)
    batch = engine.generate(
        text=["a", "b"],
        sampling_params=[{**SAMPLING, "custom_params": {"top_logprobs_p": 0.4}}, SAMPLING],
        return_logprob=True,
    )
    checked_sets(batch[0], 0.4)
    assert not formats.has_top_p(batch[1]["meta_info"])


def test_radix_cache_hit_and_chunked_prefill(engine: Engine) -> None:
    prompt = "no other test begins like this: " + "y" * 300
    first = engine.generate(text=prompt, sampling_params=SAMPLING, **WANTED)
    again = engine.generate(text=prompt, sampling_params=SAMPLING, **WANTED)
    checked_sets(first, 0.8)
    checked_sets(again, 0.8)
    assert first["meta_info"]["cached_tokens"] < 64
    assert again["meta_info"]["cached_tokens"] > 200


@pytest.mark.parametrize("start", [0, 1, 90])
@pytest.mark.parametrize("max_new_tokens", [0, 3])
def test_prompt_sets(engine: Engine, start: int, max_new_tokens: int) -> None:
    """The log-probs of a prompt of several chunks equal those that SGLang reports."""
    text = "".join(chr(97 + i % 26) for i in range(200))
    for form in (WANTED, {**WANTED, "return_logprobs_in_base64": False}):
        answer = engine.generate(
            text=text,
            sampling_params={**SAMPLING, "max_new_tokens": max_new_tokens},
            logprob_start_len=start,
            **form,
        )
        reported = answer["meta_info"]["input_token_logprobs"]
        assert len(reported) == 200 - start
        sets = formats.decode_top_p(
            answer["meta_info"], [token_id for _, token_id, _ in reported], side="input"
        )
        assert reported[0][0] is None
        assert sets.sizes[0] == 0
        expected = np.array([logprob for logprob, _, _ in reported[1:]], np.float32)
        np.testing.assert_array_equal(sets.sampled_logprobs[1:], expected)
        assert (np.exp(sets.log_kept_mass[1:]) >= 0.8 - 1e-5).all()
        checked_sets(answer, 0.8)


def test_streamed_prompt_sets_come_with_the_first_chunk(engine: Engine) -> None:
    chunks = engine.stream(text=PROMPT, sampling_params=SAMPLING, logprob_start_len=0, **WANTED)
    for chunk in chunks:
        reported = chunk["meta_info"]["input_token_logprobs"]
        formats.decode_top_p(chunk["meta_info"], [token_id for _, token_id, _ in reported], side="input")


def test_fixed_k_arrays_replace_the_lists(engine: Engine) -> None:
    request = {
        "text": PROMPT,
        "sampling_params": {**SAMPLING, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 4,
        "logprob_start_len": 0,
    }
    listed = engine.generate(**request)["meta_info"]
    packed = engine.generate(**request, return_logprobs_in_base64=True)["meta_info"]
    for side in ("input", "output"):
        rows = listed[f"{side}_top_logprobs"]
        assert f"{side}_top_logprobs" not in packed
        shape = packed[f"{side}_top_logprobs_shape"]
        none = [t for t, row in enumerate(rows) if row is None]
        # The prompt's first position has no distribution, so it has no row, and the answer lists it.
        assert packed[f"{side}_top_logprobs_none_positions"] == none == ([0] if side == "input" else [])
        assert shape == [len(rows) - len(none), 4]
        ids = np.frombuffer(base64.b64decode(packed[f"{side}_top_logprobs_idx_base64"]), "<i4").reshape(shape)
        values = np.frombuffer(base64.b64decode(packed[f"{side}_top_logprobs_val_base64"]), "<f4").reshape(
            shape
        )
        for t, row in enumerate(row for row in rows if row is not None):
            assert ids[t].tolist() == [token_id for _, token_id, _ in row]
            # The two answers come from two forward passes, so they are equal up to rounding.
            np.testing.assert_allclose(values[t], [logprob for logprob, _, _ in row], atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_logprobs_p": "0.9"}, "top_logprobs_p"),
        ({"top_logprobs_p": -0.1}, "top_logprobs_p"),
        ({"top_logprobs_p": 1.01}, "top_logprobs_p"),
        ({"top_logprobs_p": True}, "top_logprobs_p"),
        ({"top_logprobs_p": {"p": 1}}, "top_logprobs_p"),
        ({"top_logprobs_p": [0.5, 0.6]}, "top_logprobs_p"),
        ({"top_logprobs_p": []}, "top_logprobs_p"),
        ({"return_logprob": False}, "return_logprob"),
        ({"return_logprob": None}, "return_logprob"),
        ({"return_logprobs_in_base64": "yes"}, "return_logprobs_in_base64"),
        ({"sampling_params": {"custom_params": {"top_logprobs_p": 2}}}, "custom_params.top_logprobs_p"),
        ({"sampling_params": {"custom_params": {"top_logprobs_p": 0.3}}}, "one place"),
        ({"sampling_params": {"custom_params": "mine"}}, "custom_params"),
        ({"sampling_params": {"custom_params": [1]}}, "custom_params"),
        ({"top_logprobs_p": None, "extra_body": {"top_logprobs_p": 0.5}}, "extra_body.top_logprobs_p"),
        ({"text": ["a", "b"], "sampling_params": [SAMPLING] * 3}, "sampling_params"),
        (
            {
                "text": ["a", "b"],
                "top_logprobs_p": None,
                "sampling_params": [{"custom_params": {"top_logprobs_p": 0.5}}] * 3,
            },
            "sampling_params",
        ),
        ({"sampling_params": {"beam_width": 4}}, "beam"),
        ({"text": None, "input_embeds": [[0.5] * 64], "top_logprobs_p": []}, "top_logprobs_p"),
        ({"text": None, "input_embeds": [[[0.5] * 64]] * 2, "top_logprobs_p": [0.5] * 3}, "top_logprobs_p"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_a_400_that_names_the_field(
    engine: Engine, fields: dict[str, Any], field: str, stream: bool
) -> None:
    answer = engine.post(
        **{"text": PROMPT, "sampling_params": SAMPLING, **WANTED, **fields, "stream": stream}
    )
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]


def test_sampling_params_in_a_list_for_one_prompt(engine: Engine) -> None:
    answer = engine.post(text=PROMPT, sampling_params=[SAMPLING], **WANTED)
    assert answer.status_code == 400, answer.text
    assert "sampling_params" in answer.text


def test_a_route_that_builds_the_request_itself(engine: Engine) -> None:
    answer = engine.http.post(
        "/vertex_generate",
        json={"instances": [{"text": PROMPT}], "parameters": {"sampling_params": SAMPLING, **WANTED}},
    )
    assert answer.status_code == 200, answer.text
    parsed = answer.json()
    # Older releases answer like /generate, without the field's name.
    (prediction,) = parsed["predictions"] if isinstance(parsed, dict) else parsed
    checked_sets(prediction, 0.8)


def test_nan_is_no_json(engine: Engine) -> None:
    body = json.dumps({"text": PROMPT, **WANTED, "top_logprobs_p": float("nan")})
    answer = engine.http.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize("off", [{}, {"top_logprobs_p": None}, {"top_logprobs_p": 0}])
def test_off_means_no_sets(engine: Engine, off: dict[str, Any]) -> None:
    answer = engine.generate(text=PROMPT, sampling_params=SAMPLING, return_logprob=True, **off)
    assert not formats.has_top_p(answer["meta_info"])


def test_server_info_says_that_the_patch_set_holds(engine: Engine) -> None:
    report = engine.http.get("/server_info").json()["sglang_topp"]
    assert report["active"] is True
    assert report["problems"] == []
    assert set(report["seams"].values()) == {"holds"}


def test_what_this_release_is_refused_is_said(engine: Engine) -> None:
    report = engine.http.get("/server_info").json()["sglang_topp"]
    assert report["refused"] == dict(installed()[1].refused)
    body = {"text": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
    if reason := refused(Feature.SAMPLER_SOURCE):
        for stream in (False, True):
            answer = engine.post(**body, top_logprobs_source="sampler", stream=stream)
            assert answer.status_code == 400
            assert answer.json()["error"].endswith(f"candidate sets are not served here: {reason}")
    answer = engine.generate(**body, top_logprobs_p=0.9)
    assert (answer["meta_info"]["weight_versions"] is None) == bool(refused(Feature.WEIGHT_VERSIONS))


def test_sets_of_a_client_side_concatenation(engine: Engine) -> None:
    """Two turns with tool tokens between them: empty spans where nothing was sampled."""
    turns = [
        checked_sets(engine.generate(text=PROMPT, sampling_params=SAMPLING, **WANTED), 0.8) for _ in "ab"
    ]
    whole = CandidateSets.concat([turns[0], CandidateSets.empty(5), turns[1]])
    assert len(whole) == 53
    assert whole.sizes[24:29].tolist() == [0] * 5


def test_prompt_positions_without_a_token_have_no_set(model_path: Path, log_folder: Path) -> None:
    """SGLang makes token ids up for embeddings, and reports a log-prob of each."""
    arguments = ["--dtype", "bfloat16", "--disable-radix-cache"]
    with run_engine(model_path, log_folder / "embeds.log", *arguments) as engine:
        answer = engine.generate(
            input_embeds=[[0.01] * 64] * 5,
            sampling_params={"max_new_tokens": 3, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_p=0.9,
            return_logprobs_in_base64=True,
        )["meta_info"]
    assert len(answer["input_token_logprobs"]) == 5
    assert answer["input_top_p_logprobs_lengths"] == [-1] * 5
    assert min(answer["output_top_p_logprobs_lengths"]) > 0
