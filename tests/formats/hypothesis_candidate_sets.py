"""Valid candidate sets, in the two forms of `meta_info`, and helpers for malformed input."""

from __future__ import annotations

import base64
import struct

import numpy as np
from hypothesis import strategies as st

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import WireError


@st.composite
def candidate_sets(draw, *, empty_spans=False):
    """Draw valid sets with ids up to the largest int32, ties, the lowest float32, and all sizes from 1."""
    logprob = st.floats(-60, 0, width=32) | st.sampled_from([0.0, -1.0])
    token = st.integers(0, 2**31 - 1) | st.integers(0, 9)
    span = st.dictionaries(token, logprob, min_size=0 if empty_spans else 1, max_size=10)
    spans = [
        sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))
        for entries in draw(st.lists(span, max_size=8))
    ]
    sampled = [draw(st.sampled_from(span))[0] if span else 0 for span in spans]
    for span, drawn in zip(spans, sampled, strict=True):
        if len(span) > 1 and drawn == span[-1][0] and draw(st.booleans()):
            span[-1] = (drawn, float(np.finfo(np.float32).min))
    return CandidateSets(
        [token for span in spans for token, _ in span],
        np.array([logprob for span in spans for _, logprob in span], np.float32),
        np.cumsum([0, *map(len, spans)]),
        sampled,
    )


def encoded(sets, side="output"):
    return formats.encode_top_p(side, sets.token_ids, sets.logprobs, sets.sizes.tolist())


def listed(sets, side="output"):
    return {
        f"{side}_top_p_logprobs": [
            [[logprob, token, None] for logprob, token in zip(values, ids, strict=True)] or None
            for ids, values in zip(*sets.to_lists(), strict=True)
        ]
    }


SETS = CandidateSets([5, 2, 9, 7], [-0.5, -1.0, -1.0, -0.25], [0, 3, 4], [2, 7])


def b64(numbers, code):
    return base64.b64encode(struct.pack(f"<{len(numbers)}{code}", *numbers)).decode()


def outcome(decode, *args):
    """Return the decoded value, or the field that the WireError names."""
    try:
        return decode(*args), None
    except WireError as error:
        return None, error.field
