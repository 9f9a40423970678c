"""Checks of the candidate sets of one answer."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np

from sglang_topp import CandidateSets, formats
from sglang_topp_client import Rollout
from tests.engine.start_servers import Engine

# If the mass above a cutoff is this near to p, both neighboring sets are correct.
ROUNDING = 1e-5


def check_nothing_is_held(*engines: Engine) -> None:
    """Check that the budgets of all processes become free, with no request in flight.

    Garbage collection of whole heaps is rarer than this limit, so nothing may wait for it.
    """
    deadline = time.monotonic() + 10
    while any(held := [count for engine in engines for count in _held(engine)]):
        assert time.monotonic() < deadline, held
        time.sleep(0.2)


def _held(engine: Engine) -> list[int]:
    info = engine.http.get("/server_info").json()
    held = [info["sglang_topp"]["budget"]["candidates_in_flight"]]
    return held + [state["sglang_topp"]["candidates_in_flight"] for state in info["internal_states"]]


def checked_sets(answer: dict[str, Any], p: float) -> CandidateSets:
    """Return the answer's sets. Check that there is one per token, complete, with SGLang's own log-probs."""
    meta_info, output_ids = answer["meta_info"], answer["output_ids"]
    reported = meta_info["output_token_logprobs"]
    assert [token_id for _, token_id, _ in reported] == output_ids
    assert meta_info["completion_tokens"] == len(output_ids)
    sets = formats.decode_top_p(meta_info, output_ids, vocab_size=512)
    np.testing.assert_array_equal(sets.sampled_logprobs, np.array([each[0] for each in reported], np.float32))
    for t in range(len(sets)):
        check_nucleus(*sets[t], output_ids[t], p, t)
    return sets


def check_whole(answer: dict[str, Any], p: float, prompt_ids: list[int] | None = None) -> CandidateSets:
    """Check that the sets equal the definition on SGLang's own distribution.

    The request asks for that distribution with `top_logprobs_num`, set to the vocabulary's size. If
    `prompt_ids` are given, the prompt's sets are checked too.
    """
    sets, meta_info = checked_sets(answer, p), answer["meta_info"]
    # With `max_new_tokens` 0, SGLang may list a distribution although there is no token.
    whole = distributions(meta_info, "output", max(len(sets), 1))[: len(sets)]
    check_definition(sets, whole, answer["output_ids"], p)
    if prompt_ids is not None:
        whole = distributions(meta_info, "input", len(prompt_ids))
        check_definition(formats.decode_top_p(meta_info, prompt_ids, side="input"), whole, prompt_ids, p)
    return sets


def check_definition(
    sets: CandidateSets, whole: list[tuple[np.ndarray, np.ndarray]], sampled_ids: list[int], p: float
) -> None:
    """Check each set's ids and log-probs against the definition on its position's distribution."""
    assert len(sets) == len(whole) == len(sampled_ids)
    for t, (ids, logprobs) in enumerate(whole):
        token_ids, kept = sets[t]
        assert len(ids) in (0, 512)
        by_id = np.full(512, np.nan, np.float32)
        by_id[ids] = logprobs
        np.testing.assert_array_equal(kept, by_id[token_ids])
        mass = np.exp(logprobs.astype(np.float64))
        above = (mass > mass[:, None]) @ mass
        certain, possible = ids[above < p - ROUNDING], ids[above < p + ROUNDING]
        forced = {sampled_ids[t]} if len(ids) else set()
        assert set(certain) <= set(token_ids) <= set(possible) | forced, f"position {t}"
        assert forced <= set(token_ids)


def distributions(meta_info: dict[str, Any], side: str, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each position's ids and log-probs as SGLang lists them, empty where it has no distribution."""
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
    shape = meta_info[f"{side}_top_logprobs_shape"]
    rows = list(zip(ids.reshape(shape), logprobs.reshape(shape), strict=True))
    none = meta_info[f"{side}_top_logprobs_none_positions"]
    if len(rows) == count:
        rows = [row for t, row in enumerate(rows) if t not in none]
    for t in none:
        rows.insert(t, (ids[:0], logprobs[:0]))
    return rows


def check_rollout(rollout: Rollout, p: float) -> None:
    """Check the sets of a rollout that a client has decoded."""
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
    """Check what a set alone can show: it has no token below the cutoff, and its mass reaches p.

    Only the sampled token may be below the cutoff.
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
