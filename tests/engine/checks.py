"""What must hold of every answer, whatever was asked."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from sglang_topp import CandidateSets, wire
from sglang_topp_client import Rollout

# Where the mass above a cutoff lies this near to p, both neighbours are right answers.
ROUNDING = 1e-5


def checked_sets(answer: dict[str, Any], p: float) -> CandidateSets:
    """The answer's sets, after checking that they are one per token, complete, and SGLang's own."""
    meta_info, output_ids = answer["meta_info"], answer["output_ids"]
    reported = meta_info["output_token_logprobs"]
    assert [token_id for _, token_id, _ in reported] == output_ids
    assert meta_info["completion_tokens"] == len(output_ids)
    sets = CandidateSets.from_meta_info(meta_info, output_ids, vocab_size=512)
    np.testing.assert_array_equal(sets.sampled_logprobs, np.array([each[0] for each in reported], np.float32))
    for t in range(len(sets)):
        check_nucleus(*sets[t], output_ids[t], p, t)
    return sets


def check_whole(answer: dict[str, Any], p: float, prompt_ids: list[int] | None = None) -> CandidateSets:
    """Equality with the definition on SGLang's own distribution, which the same request asks for
    (`top_logprobs_num`: the vocabulary); the prompt's sets too, where `prompt_ids` are those scored."""
    sets, meta_info = checked_sets(answer, p), answer["meta_info"]
    # SGLang may list a distribution where `max_new_tokens` 0 keeps its token from being one.
    whole = _distributions(meta_info, "output", max(len(sets), 1))[: len(sets)]
    check_definition(sets, whole, answer["output_ids"], p)
    if prompt_ids is not None:
        whole = _distributions(meta_info, "input", len(prompt_ids))
        check_definition(wire.decode_input_sets(meta_info, prompt_ids), whole, prompt_ids, p)
    return sets


def check_definition(
    sets: CandidateSets, whole: list[tuple[np.ndarray, np.ndarray]], sampled_ids: list[int], p: float
) -> None:
    """Every set is what the definition gives on the whole distribution of its position: ids, log-probs."""
    assert len(sets) == len(whole) == len(sampled_ids)
    for t, (ids, logprobs) in enumerate(whole):
        token_ids, kept = sets[t]
        assert len(ids) in (0, 512)
        by_id = np.full(512, np.nan, np.float32)
        by_id[ids] = logprobs
        np.testing.assert_array_equal(kept, by_id[token_ids])
        mass = np.exp(logprobs.astype(np.float64))
        above = np.array([mass[mass > each].sum() for each in mass])
        certain, possible = ids[above < p - ROUNDING], ids[above < p + ROUNDING]
        forced = {sampled_ids[t]} if len(ids) else set()
        assert set(certain) <= set(token_ids) <= set(possible) | forced, f"position {t}"
        assert forced <= set(token_ids)


def _distributions(meta_info: dict[str, Any], side: str, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and log-probs of each position, as SGLang lists them; nothing where it has no distribution."""
    if f"{side}_top_logprobs" in meta_info:
        return [
            (
                np.array([each[1] for each in row or ()], np.int32),
                np.array([each[0] for each in row or ()], np.float32),
            )
            for row in meta_info[f"{side}_top_logprobs"]
        ]
    ids = np.frombuffer(base64.b64decode(meta_info[f"{side}_top_logprobs_idx_base64"]), "<i4")
    logprobs = np.frombuffer(base64.b64decode(meta_info[f"{side}_top_logprobs_val_base64"]), "<f4")
    rows = list(zip(ids.reshape(-1, 512), logprobs.reshape(-1, 512), strict=True))
    none = meta_info[f"{side}_top_logprobs_none_positions"]
    if len(rows) == count:
        rows = [row for t, row in enumerate(rows) if t not in none]
    for t in none:
        rows.insert(t, (ids[:0], logprobs[:0]))
    return rows


def check_rollout(rollout: Rollout, p: float) -> None:
    """The same of a rollout that a client has decoded."""
    assert rollout.candidates is not None
    assert len(rollout.candidates) == len(rollout.output_ids) == len(rollout.logprobs)
    np.testing.assert_array_equal(rollout.candidates.sampled_ids, rollout.output_ids)
    np.testing.assert_array_equal(rollout.candidates.sampled_logprobs, rollout.logprobs)
    for t, (token_ids, logprobs) in enumerate(rollout.candidates):
        check_nucleus(token_ids, logprobs, int(rollout.output_ids[t]), p, t)
    assert (rollout.masked_logprobs <= 1e-6).all()


def check_nucleus(
    token_ids: np.ndarray, logprobs: np.ndarray, sampled_id: int, p: float, position: int
) -> None:
    """As far as a set alone can show: nothing in it lies below the cutoff, and nothing above is missing.

    Only the sampled token may stand where the mass above it has already reached p.
    """
    assert (np.diff(logprobs) <= 0).all(), f"position {position}: not in order"
    mass = np.exp(logprobs.astype(np.float64))
    above = np.concatenate(([0.0], np.cumsum(mass)))[np.searchsorted(-logprobs, -logprobs)]
    forced = above >= p + ROUNDING
    assert set(token_ids[forced]) <= {sampled_id}, (
        f"position {position}: {token_ids[forced]} below the cutoff"
    )
    assert mass[~forced].sum() >= p - ROUNDING, (
        f"position {position}: kept mass {mass[~forced].sum()} for p {p}"
    )
