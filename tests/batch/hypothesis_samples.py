"""Hypothesis strategies for `sglang_topp.batch`: small, ragged samples with extreme values."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from benchmarks.batch_collate import candidate_sets
from sglang_topp.candidates import CandidateSets

IDS = st.integers(-(2**40), 2**40)
NUMBERS = st.floats(-1e30, 1e30) | st.sampled_from([-0.0, float("inf")])


@st.composite
def rollout_lists(draw: st.DrawFn) -> dict[str, list[list[Any]]]:
    """Draw the columns of 1 to 6 samples as plain lists. Some responses are empty."""
    count = draw(st.integers(1, 6))
    prompts = [draw(st.lists(IDS, min_size=1, max_size=9)) for _ in range(count)]
    responses = [draw(st.lists(st.integers(0, 149_999), max_size=12)) for _ in range(count)]

    def per_token(values: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(values, min_size=len(r), max_size=len(r))) for r in responses]

    return {
        "prompts": prompts,
        "responses": responses,
        "rewards": per_token(NUMBERS),
        "loss_masks": per_token(st.integers(0, 1)),
        "logprobs": per_token(NUMBERS),
    }


def random_sets(responses: list[list[int]], loss_masks: list[list[int]], seed: int) -> list[CandidateSets]:
    """Return candidate sets for the responses: at every token with a loss, and at some of the others.

    One batch in three has sets without log-probs.
    """
    rng = np.random.default_rng(seed)
    out = []
    for ids, mask in zip(responses, loss_masks, strict=True):
        replayed = (np.array(mask, int) == 1) | (rng.random(len(ids)) < 0.3)
        out.append(candidate_sets(rng, np.array(ids, int), replayed, mean_size=3.0))
    return out if rng.random() < 2 / 3 else [sets.without_logprobs() for sets in out]
