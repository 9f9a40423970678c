"""Fields of consecutive stream chunks merge to the fields of one chunk."""

from __future__ import annotations

import base64
import struct
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import MissingCandidateSetsError
from tests.formats.hypothesis_candidate_sets import SETS, candidate_sets, encoded, listed


@given(st.lists(candidate_sets(), min_size=1, max_size=4))
def test_merged_chunks_equal_one_chunk(parts):
    whole = CandidateSets.concat(parts)
    assert formats.merge_stream_chunks([encoded(part) for part in parts]) == encoded(whole)
    assert formats.merge_stream_chunks([listed(part) for part in parts]) == listed(whole)


def test_merged_chunks_know_where_rows_without_a_distribution_go():
    rows = [[[-0.5, -1.0]], [None, None], [[-0.25, -2.0], None]]
    ids = [[[5, 2]], [None, None], [[7, 1], None]]
    chunks = [formats.encode_top_k("output", *chunk) for chunk in zip(rows, ids, strict=True)]
    whole = formats.encode_top_k("output", [*chain(*rows)], [*chain(*ids)])
    assert whole["output_top_logprobs_none_positions"] == [1, 2, 4]
    assert formats.merge_stream_chunks(chunks) == whole


def test_a_chunk_that_lacks_a_field_leaves_the_merge_without_it():
    merged = formats.merge_stream_chunks([encoded(SETS), {"id": "x"}])
    assert merged == {}
    with pytest.raises(MissingCandidateSetsError):
        formats.decode_top_p(merged, [2, 7])


def test_top_k_fields_leave_out_rows_without_a_distribution():
    fields = formats.encode_top_k(
        "output", [[-0.5, -1.0], None, [-0.25, -2.0], []], [[5, 2], None, [7, 1], []]
    )
    assert fields["output_top_logprobs_shape"] == [2, 2]
    assert fields["output_top_logprobs_none_positions"] == [1, 3]
    values = struct.unpack("<4f", base64.b64decode(fields["output_top_logprobs_val_base64"]))
    ids = struct.unpack("<4i", base64.b64decode(fields["output_top_logprobs_idx_base64"]))
    assert values == (-0.5, -1.0, -0.25, -2.0)
    assert ids == (5, 2, 7, 1)
    for rows, none in (([None], [0]), ([], [])):
        nothing = formats.encode_top_k("input", rows, rows)
        assert nothing["input_top_logprobs_shape"] == [0, 0]
        assert nothing["input_top_logprobs_none_positions"] == none
        assert nothing["input_top_logprobs_val_base64"] == nothing["input_top_logprobs_idx_base64"] == ""
