"""Requests to SGLang's `/generate`, and its answers: each becomes exact rollouts, or an error."""

import json
import re

import numpy as np
import pytest

from sglang_topp import errors
from sglang_topp_client.protocols.sglang import SglangExchange
from sglang_topp_client.requests import plan


def exchange(n=1, p=0.9, prompt=(5, 6)):
    prompts = prompt if isinstance(prompt, str) else [list(prompt)]
    return SglangExchange(*plan(prompts, {"n": n, "top_p": 0.8}, p), request_id="mine")


def event(chunk):
    return b"data: " + json.dumps(chunk).encode()


def test_the_request_body():
    one = exchange(n=2)
    body = one.body()
    rid = body.pop("rid")
    assert rid.startswith("mine-")
    assert body.pop("sampling_params").pop("stream_interval") > 10**6
    assert body == {
        "input_ids": [5, 6],
        "return_logprob": True,
        "stream": True,
        "top_logprobs_p": 0.9,
        "return_logprobs_in_base64": True,
    }
    assert one.body()["sampling_params"].items() >= {"n": 2, "top_p": 0.8}.items()


def test_text_asks_for_the_prompts_ids_and_no_threshold_for_no_sets():
    body = exchange(p=None, prompt="hi").body()
    assert body["text"] == "hi"
    assert body["return_prompt_token_ids"] is True
    assert "top_logprobs_p" not in body
    assert "return_logprobs_in_base64" not in body


def test_a_request_for_the_sampler_source(fakes):
    one = SglangExchange(*plan([[5, 6]], None, None, "sampler"), request_id="mine")
    body = one.body()
    assert body["top_logprobs_source"] == "sampler"
    assert body["return_logprobs_in_base64"] is True
    assert "top_logprobs_p" not in body
    chunk = fakes.chunk(fakes.sample([5, 6], 0))
    # A server that ignores the field may have read another request for sets.
    with pytest.raises(errors.WireError, match="got 'distribution', expected 'sampler', as requested"):
        one.read(event(chunk))
    chunk["meta_info"]["top_logprobs_source"] = "sampler"
    one = SglangExchange(*plan([[5, 6]], None, None, "sampler"), request_id="mine")
    ((_, rollout),) = one.read(event(chunk))
    assert rollout.top_logprobs_source == "sampler"
    assert rollout.candidates is not None
    with pytest.raises(errors.WireError, match="got 'sampler', expected 'distribution', as requested"):
        exchange().read(event(chunk))


def test_an_answer_without_the_ids_of_a_text_prompt_is_an_error(fakes):
    one = exchange(prompt="text")
    chunk = fakes.chunk(fakes.sample([5, 6], 0))
    del chunk["prompt_token_ids"]
    with pytest.raises(
        errors.WireError, match=r"SGLang before 0\.5\.13 returns no token ids; give token ids"
    ):
        one.read(event(chunk))


def test_ids_are_fresh_and_none_is_the_start_of_another():
    rids = [exchange().body()["rid"] for _ in range(50)]
    assert len(set(rids)) == 50
    assert len({len(rid) for rid in rids}) == 1


def test_a_whole_answer_becomes_a_rollout(fakes):
    made = fakes.sample([5, 6], 0)
    one = exchange()
    assert one.read(event(fakes.chunk(made, first_token_only=True))) == []
    assert one.open_ids() == [made.request_id]
    ((_, rollout),) = one.read(event(fakes.chunk(made)))
    assert one.open_ids() == []
    assert rollout.candidates == made.candidates
    assert np.array_equal(rollout.logprobs, made.logprobs)
    assert (rollout.text, rollout.weight_version, rollout.latency_s) == ("<0>", "step-7", 0.25)
    assert not one.complete
    assert one.read(b"") == one.read(b": ping") == []
    assert one.read(b"data: [DONE]") == []
    assert one.complete


def test_incremental_chunks_are_joined(fakes):
    made = fakes.sample([5, 6], 0, 7)
    one = exchange()
    assert one.read(event(fakes.chunk(made, first_token_only=True))) == []
    middle = fakes.chunk(made, start=1, stop=4)
    middle["meta_info"] |= {"finish_reason": None, "completion_tokens": 4}
    assert one.read(event(middle | {"text": "<"})) == []
    ((_, rollout),) = one.read(event(fakes.chunk(made, start=4) | {"text": "0>"}))
    assert rollout.candidates == made.candidates
    assert np.array_equal(rollout.output_ids, made.output_ids)
    assert np.array_equal(rollout.logprobs, made.logprobs)
    assert rollout.text == made.text


@pytest.mark.parametrize("p", [0.9, None])
def test_a_prompt_that_is_only_scored_may_come_with_the_logprob_of_a_token_that_is_not_there(fakes, p):
    made = fakes.sample([5, 6], 0)
    chunk = fakes.chunk(made, start=0, stop=0)
    chunk["meta_info"] |= {
        "completion_tokens": 0,
        "finish_reason": {"type": "length", "length": 0},
        "output_token_logprobs": [[-0.5, 7, None]],
        "weight_versions": [{"version": "step-7", "start": 0, "end": 0}],
    }
    ((_, rollout),) = exchange(p=p).read(event(chunk))
    assert len(rollout.output_ids) == len(rollout.logprobs) == 0
    assert (rollout.candidates is None) == (p is None)


def test_each_tokens_weights_come_with_the_sets(fakes):
    made = fakes.sample([5, 6], 0)
    ((_, rollout),) = exchange().read(event(fakes.chunk(made)))
    assert rollout.weight_versions == made.weight_versions
    assert rollout.weight_version == rollout.weight_versions[-1] != rollout.weight_versions[0]
    # Without sets, the spans are SGLang's own, which can be off by one token.
    ((_, rollout),) = exchange(p=None).read(event(fakes.chunk(made)))
    assert rollout.weight_versions is None
    # A proxy in front of the engine removed the field.
    chunk = fakes.chunk(made)
    del chunk["meta_info"]["weight_versions"]
    ((_, rollout),) = exchange().read(event(chunk))
    assert rollout.weight_versions is None


def test_a_lost_chunk_is_an_error(fakes):
    made = fakes.sample([5, 6], 0, 7)
    one = exchange()
    one.read(event(fakes.chunk(made, first_token_only=True)))
    with pytest.raises(errors.WireError, match="completion_tokens"):
        one.read(event(fakes.chunk(made, start=4)))


def test_a_single_sample_runs_under_the_id_that_was_sent():
    one = exchange()
    assert one.open_ids() == [one.body()["rid"]]
    assert exchange(n=3).open_ids() == []


def finished(fakes, **changes):
    chunk = fakes.chunk(fakes.sample([5, 6], 0))
    for name, value in changes.items():
        target = chunk if name in chunk else chunk["meta_info"]
        if value is None:
            del target[name]
        else:
            target[name] = value
    return event(chunk)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_ids", [1, 2]),
        ("output_ids", None),
        ("output_ids", [1, 2, "3"]),
        ("text", 5),
        ("meta_info", None),
        ("meta_info", []),
        ("index", 1),
        ("index", "0"),
        ("id", None),
        ("prompt_tokens", None),
        ("prompt_tokens", 3),
        ("completion_tokens", None),
        ("completion_tokens", 2),
        ("cached_tokens", None),
        ("e2e_latency", None),
        ("output_token_logprobs", None),
        ("output_token_logprobs", []),
        ("output_token_logprobs", [1, 2, 3]),
        ("output_token_logprobs", [[None, 1, None]] * 3),
        ("output_token_logprobs", [["x", 1, None]] * 3),
        ("output_token_logprobs", [[-1.0, 99999, None]] * 3),
        ("output_top_p_logprobs_lengths", None),
        ("output_top_p_logprobs_lengths", [1, 1]),
        ("output_top_p_logprobs_val_base64", "%%%"),
        ("finish_reason", "stop"),
        ("weight_versions", [{"version": "7", "start": 0, "end": 2}]),
        ("weight_versions", [{"version": "7", "start": 1, "end": 3}]),
    ],
)
def test_an_inexact_answer_is_an_error(fakes, name, value):
    with pytest.raises(errors.WireError):
        exchange().read(finished(fakes, **{name: value}))


@pytest.mark.parametrize(
    ("column", "change"), [(1, lambda x: x + 0.5), (1, str), (0, str), (0, lambda x: [x])]
)
def test_numbers_of_the_wrong_kind_are_not_read_as_numbers(fakes, column, change):
    entries = fakes.chunk(fakes.sample([5, 6], 0))["meta_info"]["output_token_logprobs"]
    entries[1][column] = change(entries[1][column])
    with pytest.raises(errors.WireError, match="output_token_logprobs"):
        exchange(p=None).read(finished(fakes, output_token_logprobs=entries))


def test_negative_ids_are_errors(fakes):
    entries = fakes.chunk(fakes.sample([5, 6], 0))["meta_info"]["output_token_logprobs"]
    for entry in entries:
        entry[1] = -1
    line = finished(fakes, output_token_logprobs=entries, output_ids=[-1] * len(entries))
    with pytest.raises(errors.WireError, match="got -1"):
        exchange(p=None).read(line)


def test_the_unchanged_answer_passes_these_checks(fakes):
    assert len(exchange().read(finished(fakes))) == 1


@pytest.mark.parametrize(
    "line",
    [b"data: {", b"data: [1]", b"data: 5", b"<html>", b"event: x", b'data: {"text": "x"}'],
)
def test_garbage_is_an_error(line):
    with pytest.raises(errors.WireError):
        exchange().read(line)


def test_missing_sets_are_named(fakes):
    chunk = fakes.chunk(fakes.sample([5, 6], 0))
    for key in [key for key in chunk["meta_info"] if key.startswith("output_top_p")]:
        del chunk["meta_info"][key]
    with pytest.raises(errors.MissingCandidateSetsError):
        exchange().read(event(chunk))
    ((_, rollout),) = exchange(p=None).read(event(chunk))
    assert rollout.candidates is None


def test_a_position_without_a_set_is_named(fakes):
    sizes = fakes.sample([5, 6], 0).candidates.sizes.tolist()
    line = finished(fakes, output_top_p_logprobs_lengths=[*sizes[:2], sizes[2], -1])
    with pytest.raises(errors.WireError):
        exchange().read(line)


def test_a_set_without_its_sampled_token_is_named(fakes):
    made = fakes.sample([5, 6], 0)
    chunk = fakes.chunk(made)
    stranger = next(token for token in range(100) if token not in made.candidates[1][0])
    chunk["output_ids"][1] = chunk["meta_info"]["output_token_logprobs"][1][1] = stranger
    with pytest.raises(errors.SampledTokenMissingError):
        exchange().read(event(chunk))


def test_logprobs_are_compared_to_the_last_bit(fakes):
    chunk = fakes.chunk(fakes.sample([5, 6], 0))
    entry = chunk["meta_info"]["output_token_logprobs"][2]
    entry[0] = float(np.nextafter(np.float32(entry[0]), np.float32(0)))
    with pytest.raises(errors.WireError, match="position 2"):
        exchange().read(event(chunk))


def test_a_second_copy_of_a_sample_is_an_error(fakes):
    one = exchange(n=2)
    one.read(event(fakes.chunk(fakes.sample([5, 6], 1))))
    with pytest.raises(errors.WireError, match="expected an unfinished one of"):
        one.read(event(fakes.chunk(fakes.sample([5, 6], 1))))
    with pytest.raises(errors.WireError, match="1 of 2"):
        one.read(b"data: [DONE]")


@pytest.mark.parametrize(
    ("reason", "kind", "status"),
    [
        ({"type": "abort", "message": "Aborted", "status_code": None}, errors.AbortedError, None),
        ({"type": "abort", "message": "Abort in waiting queue"}, errors.AbortedError, None),
        ({"type": "abort", "message": "queue is full", "status_code": 503}, errors.ServerError, 503),
        ({"type": "abort", "message": "too long", "status_code": 400}, errors.BadRequestError, 400),
        ({"type": "abort", "message": "slow down", "status_code": 429}, errors.OverloadedError, 429),
        ({"type": "something new", "message": "?"}, errors.RolloutError, None),
    ],
)
def test_a_sample_that_did_not_finish_is_an_error(fakes, reason, kind, status):
    with pytest.raises(errors.ResponseError, match=r"gave up|a pause, or a weight update") as caught:
        exchange().read(finished(fakes, finish_reason=reason))
    assert type(caught.value) is kind
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        ({"message": "too long", "type": "invalid_request_error", "code": 400}, errors.BadRequestError, 400),
        ({"message": "down", "code": 503}, errors.ServerError, 503),
        ({"message": "down", "code": "odd"}, errors.ServerError, None),
        ("just words", errors.ServerError, None),
    ],
)
@pytest.mark.parametrize("prefix", [b"data: ", b""])
def test_an_error_inside_the_answer_is_an_error(error, kind, status, prefix):
    with pytest.raises(errors.ResponseError, match="reports an error") as caught:
        exchange().read(prefix + json.dumps({"error": error}).encode())
    assert type(caught.value) is kind
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("The input (70 tokens) is longer than the model's context length (64 tokens).", "prompts: "),
        (
            "Input length (70 tokens) exceeds the maximum allowed length (57 tokens). Use a shorter input or"
            " enable --allow-auto-truncate.",
            "prompts: ",
        ),
        (
            "Requested token count exceeds the model's maximum context length of 64 tokens. You requested",
            "prompts, sampling_params.max_new_tokens: ",
        ),
        ("Another problem", ""),
    ],
)
def test_the_field_that_is_too_long_is_named(fakes, words, field):
    reported = {"message": words, "type": "invalid_request_error", "code": 400}
    with pytest.raises(
        errors.BadRequestError, match=rf"^{field}the engine reports an error: {re.escape(words)}"
    ):
        exchange().read(event({"error": reported}))
    aborted = {"type": "abort", "message": words, "status_code": 400}
    with pytest.raises(errors.BadRequestError, match=rf"^{field}the engine gave up on a sample"):
        exchange().read(finished(fakes, finish_reason=aborted))


def test_weights_without_a_name_have_none(fakes):
    ((_, rollout),) = exchange().read(finished(fakes, weight_version=None))
    assert rollout.weight_version is None
