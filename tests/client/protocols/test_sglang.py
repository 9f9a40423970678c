"""Requests to SGLang's `/generate`, and its answers: each becomes exact rollouts or scores, or an error."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import errors
from sglang_topp.errors import BadRequestError, MissingCandidateSetsError, RolloutError, WireError
from sglang_topp_client.protocols.sglang import SglangExchange
from sglang_topp_client.requests import build_sample_requests, build_score_requests
from tests.client.conftest import bits, changed, chunk, events_of, sample, score, score_chunk, without_sets

IDS = [5, 6, 7, 8, 9]
MADE = sample([5, 6], 0)
SET_KEYS = ("val_base64", "idx_base64", "lengths")
VAL, IDX, LENGTHS = (f"input_top_p_logprobs_{part}" for part in SET_KEYS)
DONE = b"data: [DONE]"


def exchange(prompts=((5, 6),), n=1, p=0.9, source=None):
    return SglangExchange(
        *build_sample_requests(prompts, {"n": n, "top_p": 0.8}, p, source), request_id="mine"
    )


def score_exchange(sequence=IDS, p=0.5, start=2):
    sequences = sequence if isinstance(sequence, str) else [sequence]
    return SglangExchange(*build_score_requests(sequences, p, start), request_id="mine")


def read(one, answer):
    """Return the only result that an answer's line finishes."""
    ((_, result),) = one.read(events_of(answer).strip())
    return result


def spoiled(answer, *path, new):
    """Change a field of the answer or of its `meta_info`."""
    return changed(answer, path if path[0] in answer else ("meta_info", *path), new)


# -- requests --------------------------------------------------------------------------------------


def test_a_request_for_rollouts():
    one = exchange(n=2)
    body = one.body()
    assert body.pop("rid").startswith("mine-")
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
    body = exchange("hi", p=None).body()
    assert body["text"] == "hi"
    assert body["return_prompt_token_ids"] is True
    assert not {"top_logprobs_p", "return_logprobs_in_base64"} & body.keys()


def test_a_score_asks_for_no_token():
    body = score_exchange().body()
    assert body.pop("rid").startswith("mine-")
    assert body.pop("sampling_params").items() >= {"max_new_tokens": 0, "temperature": 1.0, "n": 1}.items()
    assert body == {
        "input_ids": IDS,
        "logprob_start_len": 1,
        "return_logprob": True,
        "return_logprobs_in_base64": True,
        "stream": True,
        "top_logprobs_p": 0.5,
    }
    body = score_exchange("text", None, 1).body()
    assert (body["text"], body["return_prompt_token_ids"], body["logprob_start_len"]) == ("text", True, 0)
    # Log-probs alone are checked with sets that are as small as possible.
    assert 0 < body["top_logprobs_p"] < 1e-6
    assert body["return_logprobs_in_base64"] is True


def test_a_request_for_the_sampler_source():
    body = exchange(p=None, source="sampler").body()
    assert body["top_logprobs_source"] == "sampler"
    assert body["return_logprobs_in_base64"] is True
    assert "top_logprobs_p" not in body
    # A server that ignores the field may have read another request for sets.
    with pytest.raises(WireError, match="got 'distribution', expected 'sampler', as requested"):
        read(exchange(p=None, source="sampler"), chunk(MADE))
    answer = chunk(MADE, top_logprobs_source="sampler")
    rollout = read(exchange(p=None, source="sampler"), answer)
    assert rollout.top_logprobs_source == "sampler"
    assert rollout.candidates is not None
    with pytest.raises(WireError, match="got 'sampler', expected 'distribution', as requested"):
        read(exchange(), answer)


def test_ids_are_fresh_and_none_is_the_start_of_another():
    rids = [exchange().body()["rid"] for _ in range(50)]
    assert len(set(rids)) == 50
    assert len({len(rid) for rid in rids}) == 1


def test_a_single_sample_runs_under_the_id_that_was_sent():
    one = exchange()
    assert one.open_ids == {0: one.body()["rid"]}
    assert exchange(n=3).open_ids == {}


# -- rollouts --------------------------------------------------------------------------------------


def test_a_whole_answer_becomes_a_rollout():
    one = exchange()
    assert one.read(events_of(chunk(MADE, first_token_only=True)).strip()) == []
    assert one.open_ids == {0: MADE.request_id}
    assert bits(read(one, chunk(MADE))) == bits(MADE)
    assert one.open_ids == {}
    assert not one.complete
    assert one.read(b"") == one.read(b": ping") == one.read(DONE) == []
    assert one.complete


def test_incremental_chunks_are_joined():
    made = sample([5, 6], 0, 7)
    one = exchange()
    middle = chunk(made, start=1, stop=4, finish_reason=None, completion_tokens=4) | {"text": "<"}
    for part in (chunk(made, first_token_only=True), middle):
        assert one.read(events_of(part).strip()) == []
    assert bits(read(one, chunk(made, start=4) | {"text": "0>"})) == bits(made)


def test_a_lost_chunk_is_an_error():
    made = sample([5, 6], 0, 7)
    one = exchange()
    one.read(events_of(chunk(made, first_token_only=True)).strip())
    with pytest.raises(WireError, match="completion_tokens"):
        read(one, chunk(made, start=4))


@pytest.mark.parametrize("p", [0.9, None])
def test_a_prompt_that_is_only_scored_may_come_with_the_logprob_of_a_token_that_is_not_there(p):
    answer = chunk(
        MADE,
        stop=0,
        completion_tokens=0,
        finish_reason={"type": "length", "length": 0},
        output_token_logprobs=[[-0.5, 7, None]],
        weight_versions=[{"version": "step-7", "start": 0, "end": 0}],
    )
    rollout = read(exchange(p=p), answer)
    assert len(rollout.output_ids) == len(rollout.logprobs) == 0
    assert (rollout.candidates is None) == (p is None)


def test_each_tokens_weights_come_with_the_sets():
    rollout = read(exchange(), chunk(MADE))
    assert rollout.weight_versions == MADE.weight_versions
    assert rollout.weight_version == rollout.weight_versions[-1] != rollout.weight_versions[0]
    # Without sets, the spans are SGLang's own, which can be off by one token.
    assert read(exchange(p=None), chunk(MADE)).weight_versions is None
    # A proxy in front of the engine removed the field.
    assert read(exchange(), spoiled(chunk(MADE), "weight_versions", new=...)).weight_versions is None
    assert read(exchange(), spoiled(chunk(MADE), "weight_version", new=...)).weight_version is None


def test_sets_are_missing():
    with pytest.raises(MissingCandidateSetsError):
        read(exchange(), without_sets(chunk(MADE)))
    assert read(exchange(p=None), without_sets(chunk(MADE))).candidates is None


def test_an_answer_without_the_ids_of_a_text_prompt_is_an_error():
    with pytest.raises(WireError, match=r"SGLang before 0\.5\.13 returns no token ids; give token ids"):
        read(exchange("text"), spoiled(chunk(MADE), "prompt_token_ids", new=...))


STRANGER = next(token for token in range(100) if token not in MADE.candidates[1][0])


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (["output_ids"], [1, 2]),
        (["output_ids"], ...),
        (["output_ids"], [1, 2, "3"]),
        (["text"], 5),
        (["meta_info"], ...),
        (["meta_info"], []),
        (["index"], 1),
        (["index"], "0"),
        (["id"], ...),
        (["prompt_tokens"], ...),
        (["prompt_tokens"], 3),
        (["completion_tokens"], ...),
        (["completion_tokens"], 2),
        (["cached_tokens"], ...),
        (["e2e_latency"], ...),
        (["output_token_logprobs"], ...),
        (["output_token_logprobs"], []),
        (["output_token_logprobs"], [1, 2, 3]),
        (["output_token_logprobs"], [[None, 1, None]] * 3),
        (["output_token_logprobs"], [["x", 1, None]] * 3),
        (["output_token_logprobs"], [[-1.0, 99999, None]] * 3),
        (["output_top_p_logprobs_lengths"], ...),
        (["output_top_p_logprobs_lengths"], [1, 1]),
        (["output_top_p_logprobs_lengths"], lambda lengths: [*lengths, -1]),
        (["output_top_p_logprobs_val_base64"], "%%%"),
        (["finish_reason"], "stop"),
        (["weight_versions"], [{"version": "7", "start": 0, "end": 2}]),
        (["weight_versions"], [{"version": "7", "start": 1, "end": 3}]),
    ],
)
def test_an_inexact_answer_is_an_error(path, new):
    assert read(exchange(), chunk(MADE)).output_ids.tolist() == MADE.output_ids.tolist()
    with pytest.raises(WireError):
        exchange().read(events_of(spoiled(chunk(MADE), *path, new=new)).strip())


@pytest.mark.parametrize(
    ("column", "change"), [(1, lambda x: x + 0.5), (1, str), (0, str), (0, lambda x: [x])]
)
def test_numbers_of_the_wrong_kind_are_not_read_as_numbers(column, change):
    with pytest.raises(WireError, match="output_token_logprobs"):
        read(exchange(p=None), spoiled(chunk(MADE), "output_token_logprobs", 1, column, new=change))


@pytest.mark.parametrize(
    ("p", "ids", "kind", "words"),
    [
        (None, [-1] * 3, WireError, "got -1"),
        (
            0.9,
            [MADE.output_ids[0], STRANGER, MADE.output_ids[2]],
            errors.SampledTokenMissingError,
            "not among",
        ),
    ],
)
def test_other_ids_are_errors(p, ids, kind, words):
    ids = list(map(int, ids))
    entries = [[float(logprob), token, None] for logprob, token in zip(MADE.logprobs, ids, strict=True)]
    with pytest.raises(kind, match=words):
        read(exchange(p=p), chunk(MADE, output_token_logprobs=entries) | {"output_ids": ids})


def test_logprobs_are_compared_to_the_last_bit():
    def nudged(logprob):
        return float(np.nextafter(np.float32(logprob), np.float32(0)))

    with pytest.raises(WireError, match="position 2"):
        read(exchange(), spoiled(chunk(MADE), "output_token_logprobs", 2, 0, new=nudged))


def test_a_second_copy_of_a_sample_is_an_error():
    one = exchange(n=2)
    read(one, chunk(sample([5, 6], 1)))
    with pytest.raises(WireError, match="expected an unfinished one of"):
        read(one, chunk(sample([5, 6], 1)))
    with pytest.raises(WireError, match="1 of 2"):
        one.read(DONE)


# -- reported errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", [b"data: {", b"data: [1]", b"data: 5", b"<html>", b"event: x", b'data: {"text": "x"}']
)
def test_garbage_is_an_error(line):
    with pytest.raises(WireError):
        exchange().read(line)


def aborted(message, **fields):
    return {"type": "abort", "message": message, **fields}


@pytest.mark.parametrize(
    ("reason", "kind", "status"),
    [
        (aborted("Aborted", status_code=None), errors.AbortedError, None),
        (aborted("Abort in waiting queue"), errors.AbortedError, None),
        (aborted("queue is full", status_code=503), errors.ServerError, 503),
        (aborted("too long", status_code=400), BadRequestError, 400),
        (aborted("slow down", status_code=429), errors.OverloadedError, 429),
        ({"type": "something new", "message": "?"}, RolloutError, None),
    ],
)
@pytest.mark.parametrize(
    ("make", "answer"), [(exchange, chunk(MADE)), (score_exchange, score_chunk(score(IDS, 2)))]
)
def test_a_sample_that_did_not_finish_is_an_error(make, answer, reason, kind, status):
    with pytest.raises(errors.ResponseError, match=r"gave up|a pause, or a weight update") as caught:
        read(make(), spoiled(answer, "finish_reason", new=reason))
    assert type(caught.value) is kind
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        ({"message": "too long", "type": "invalid_request_error", "code": 400}, BadRequestError, 400),
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
        ("Input length (70 tokens) exceeds the maximum allowed length (57 tokens). Use a", "prompts: "),
        (
            "Requested token count exceeds the model's maximum context length of 64 tokens. You requested",
            "prompts, sampling_params.max_new_tokens: ",
        ),
        ("Another problem", ""),
    ],
)
def test_the_field_that_is_too_long_is_named(words, field):
    reported = {"error": {"message": words, "type": "invalid_request_error", "code": 400}}
    with pytest.raises(BadRequestError, match=rf"^{field}the engine reports an error: {re.escape(words)}"):
        read(exchange(), reported)
    with pytest.raises(BadRequestError, match=rf"^{field}the engine gave up on a sample"):
        read(exchange(), chunk(MADE, finish_reason=aborted(words, status_code=400)))


# -- scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sequence", "start"), [(IDS, 2), (IDS, 5), ("abc", 1)])
def test_an_answer_becomes_a_score(sequence, start):
    made = score(sequence, start)
    assert bits(read(score_exchange(sequence, start=start), score_chunk(made))) == bits(made)
    # A request without a threshold returns log-probs only.
    bare = read(score_exchange(sequence, None, start), score_chunk(made))
    assert bits(bare) == bits(replace(made, candidates=None))


def no_set_at_the_second(lengths):
    first, second, third, fourth = lengths
    return [first, second, 0, third + fourth]


ENTRIES = "input_token_logprobs"


@pytest.mark.parametrize(
    ("path", "new", "kind", "words"),
    [
        ([ENTRIES], ..., WireError, "input_token_logprobs: missing"),
        ([ENTRIES], [], WireError, "expected a first entry without a log-prob"),
        ([ENTRIES], [5], WireError, r"input_token_logprobs\[0\]: got 5, expected array"),
        ([ENTRIES], lambda each: each[1:], WireError, "for position 1"),
        ([ENTRIES], lambda each: each[:-1], WireError, "got 2 entries for 3 sequence_ids"),
        ([ENTRIES], lambda each: [*each, each[-1]], WireError, "got 4 entries for 3"),
        ([ENTRIES], lambda each: [each[0], each[1], *each[1:]], WireError, "got 4 entries for 3"),
        ([ENTRIES, 2, 1], 99, WireError, "got token 99 at position 1"),
        ([ENTRIES, 2, 1], 0, WireError, "got token 0 at position 1, expected 8, as in the sequence"),
        ([ENTRIES, 2, 0], None, WireError, "no log-prob at position 1"),
        ([ENTRIES, 2, 0], -0.5, WireError, "1 of 3 positions differ"),
        ([ENTRIES, 2], None, WireError, r"input_token_logprobs\[2\]: got None, expected array"),
        ([ENTRIES, 2, 0], "x", WireError, r"logprobs\[2\]\[0\]: got 'x', expected float . null"),
        ([VAL], ..., WireError, "missing beside"),
        ([LENGTHS], lambda each: each[:-1], WireError, "got 3 positions for 4 tokens"),
        ([LENGTHS], lambda each: [*each, -1], WireError, "got 5 positions for 4 tokens"),
        ([LENGTHS], no_set_at_the_second, (MissingCandidateSetsError, WireError), "position"),
        (["top_logprobs_source"], "sampler", WireError, "expected 'distribution', as requested"),
        (["prompt_tokens"], 4, WireError, "--allow-auto-truncate"),
        (["completion_tokens"], 1, WireError, "expected 0, as requested"),
        (["cached_tokens"], None, WireError, "cached_tokens"),
        (["weight_version"], [], WireError, "weight_version"),
        (["finish_reason"], aborted("by hand"), RolloutError, "by hand"),
    ],
)
def test_an_incomplete_score_is_an_error(path, new, kind, words):
    with pytest.raises(kind, match=words):
        read(score_exchange(), spoiled(score_chunk(score(IDS, 2)), *path, new=new))


@pytest.mark.parametrize("p", [0.5, None])
def test_a_score_without_sets_is_an_error(p):
    with pytest.raises(MissingCandidateSetsError):
        read(score_exchange(p=p), without_sets(score_chunk(score(IDS, 2))))


def test_a_set_without_its_token_is_an_error():
    answer, other = (score_chunk(score(ids, 2)) for ids in (IDS, [5, 6, 7, 8, 10]))
    answer["meta_info"] |= {name: other["meta_info"][name] for name in (VAL, IDX, LENGTHS)}
    with pytest.raises((errors.SampledTokenMissingError, WireError)):
        read(score_exchange(), answer)


def test_sets_from_another_start_are_an_error():
    """The sets start one position early, where SGLang has no distribution."""
    answer = spoiled(score_chunk(score(IDS, 1)), LENGTHS, new=lambda lengths: lengths[1:])
    answer = spoiled(answer, ENTRIES, new=lambda entries: [[None, 6, None], *entries[2:]])
    with pytest.raises(WireError, match="got a set before position 2"):
        read(score_exchange(), answer)


def test_sets_of_a_smaller_threshold_are_an_error():
    with pytest.raises(WireError, match="expected at least 1, the p that was asked for"):
        read(score_exchange(p=1.0), score_chunk(score(IDS, 2)))


def test_a_second_score_is_an_error():
    one = score_exchange()
    read(one, score_chunk(score(IDS, 2)))
    with pytest.raises(WireError, match="expected an unfinished one of"):
        read(one, score_chunk(score(IDS, 2)))
    assert one.read(DONE) == []
    assert one.complete
    with pytest.raises(WireError, match="ended after 0 of 1 samples"):
        score_exchange().read(DONE)
