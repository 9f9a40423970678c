"""Check that an answer is the requested one. A wrong answer raises AssertionError, or the client's error."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from sglang_topp import CandidateSets, formats
from sglang_topp_client import Rollout
from sglang_topp_client.wire.error_json import error_from_json
from sglang_topp_client.wire.records import from_record
from tests.engine.candidate_set_checks import ROUNDING, check_rollout, checked_sets
from tests.soak.random_requests import VOCAB_SIZE, Ask

__all__ = ["check_chunk", "check_lines", "check_support", "check_whole", "events", "samples_of"]


def check_whole(rollouts: list[Rollout], ask: Ask) -> None:
    """Check every sample of one prompt, as a client or the sidecar returned it."""
    assert sorted(rollout.sample_index for rollout in rollouts) == list(range(ask.n))
    for rollout in rollouts:
        if not isinstance(ask.prompt, str):
            assert rollout.prompt_ids.tolist() == ask.prompt
        if ask.from_sampler:
            assert rollout.top_logprobs_source == "sampler"
            assert rollout.candidates is not None
            np.testing.assert_array_equal(rollout.candidates.sampled_ids, rollout.output_ids)
            np.testing.assert_array_equal(rollout.candidates.sampled_logprobs, rollout.logprobs)
            check_support(rollout.candidates, ask.sampling)
        elif ask.p:
            check_rollout(rollout, ask.p)
        else:
            assert rollout.candidates is None
        _check_length(len(rollout.output_ids), rollout.finish_reason, ask)


def check_chunk(chunk: dict[str, Any], ask: Ask) -> bool:
    """Check one JSON answer of `/generate`, complete or not. Return whether the sample is finished."""
    meta_info = chunk["meta_info"]
    if not ask.wants_sets:
        assert not formats.has_top_p(meta_info)
    elif ask.sampling["max_new_tokens"] and ask.p:
        checked_sets(chunk, ask.p)
    elif ask.sampling["max_new_tokens"]:
        assert meta_info["top_logprobs_source"] == "sampler"
        sets = formats.decode_top_p(meta_info, chunk["output_ids"], vocab_size=VOCAB_SIZE)
        reported = [logprob for logprob, _, _ in meta_info["output_token_logprobs"]]
        np.testing.assert_array_equal(sets.sampled_logprobs, np.array(reported, np.float32))
        check_support(sets, ask.sampling)
    else:
        # SGLang may report the log-prob of a token that is not part of the sample.
        assert len(formats.decode_top_p(meta_info, chunk["output_ids"])) == 0
    if ask.p and ask.scores_prompt:
        reported = meta_info["input_token_logprobs"]
        # SGLang reports the last id of the vocabulary as 0, so compare with the ids that were sent.
        sent = None if isinstance(ask.prompt, str) else ask.prompt
        sets = formats.decode_top_p(
            meta_info, sent or [token_id for _, token_id, _ in reported], side="input"
        )
        expected = np.array([logprob for logprob, _, _ in reported[1:]], np.float32)
        np.testing.assert_array_equal(sets.sampled_logprobs[1:], expected)
    reason = meta_info["finish_reason"]
    if reason is None:
        return False
    _check_length(len(chunk["output_ids"]), reason["type"], ask)
    return True


def check_support(sets: CandidateSets, sampling: dict[str, Any]) -> None:
    """Check what sets alone can show: each holds exactly the tokens that the request's filters keep."""
    top_k = 1 if sampling["temperature"] == 0 else sampling.get("top_k", VOCAB_SIZE)
    top_p, min_p = sampling["top_p"], sampling.get("min_p", 0.0)
    for t, (_, logprobs) in enumerate(sets):
        mass = np.exp(logprobs.astype(np.float64))
        assert len(mass) <= top_k, f"position {t}: {len(mass)} candidates for top_k {top_k}"
        above = mass.sum() - mass[-1]
        assert above <= top_p + ROUNDING, f"position {t}: kept mass {above} above the last one, top_p {top_p}"
        assert mass[-1] >= min_p * mass[0] - ROUNDING, f"position {t}: below min_p {min_p}"
        is_whole = len(mass) == top_k or min_p > 0 or mass.sum() >= top_p - ROUNDING
        assert is_whole, f"position {t}: kept mass {mass.sum()} for top_p {top_p}"


def check_lines(text: str, ask: Ask) -> None:
    """Check the NDJSON of `/rollouts`."""
    *records, end = map(json.loads, filter(None, text.split("\n")))
    for record in records:
        if "error" in record:  # the error of one prompt, whose sample was aborted with all others
            raise error_from_json(record["error"])
    assert end == {"done": True, "rollouts": ask.n}, end
    check_whole([from_record(Rollout, record) for record in records], ask)


def events(text: str) -> list[dict[str, Any]]:
    """Check the server-sent events of all samples."""
    # Not `splitlines`, because a generated text may contain Unicode's other line ends.
    lines = [line for line in text.split("\n") if line]
    assert lines[-1] == "data: [DONE]", "the stream was cut off"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def samples_of(answer: Any) -> list[dict[str, Any]]:
    """Return the JSON of `/generate` as a list, for one sample or several."""
    return answer if isinstance(answer, list) else [answer]


def _check_length(num_tokens: int, reason: str, ask: Ask) -> None:
    wanted = ask.sampling["max_new_tokens"]
    assert reason in ("stop", "length"), reason
    assert num_tokens <= wanted
    assert num_tokens == wanted or reason == "stop", f"{num_tokens} tokens of {wanted}"
