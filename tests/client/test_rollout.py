"""Rollouts that are extended: exact in ids, and no loss where nobody sampled."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.batch import collate_rl
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError, WireError
from sglang_topp_client import load_rollouts, save_rollouts
from sglang_topp_client.packed_record import PackedRecord, from_packed
from sglang_topp_client.record import from_record, to_record
from sglang_topp_client.request import as_token_ids


@pytest.fixture
def extended(fakes):
    """Three tokens, two of a tool's, and another turn of four that was cut."""
    first = fakes.sample([5], 0)
    middle = first.extend([7, 8])
    second = fakes.sample([5, *middle.output_ids.tolist()], 0, 4)
    return replace(
        middle,
        output_ids=np.concatenate([middle.output_ids, second.output_ids]),
        logprobs=np.concatenate([middle.logprobs, second.logprobs]),
        candidates=CandidateSets.concat([middle.candidates, second.candidates]),
        weight_spans=(*middle.weight_spans, ("step-8", 4)),
        finish_reason="abort",
        text=second.text,
    )


def test_tokens_are_appended_as_they_are(fakes):
    first = fakes.sample([5], 0)
    longer = first.extend(np.array([7, 8], np.int64)).extend([9])
    assert longer.output_ids.tolist() == [*first.output_ids.tolist(), 7, 8, 9]
    assert longer.output_ids.dtype == np.int32
    assert longer.logprobs.dtype == np.float32
    assert longer.logprobs.tolist() == [*first.logprobs.tolist(), 0, 0, 0]
    assert longer.candidates[:3] == first.candidates
    assert longer.candidates.sizes[3:].tolist() == [0, 0, 0]
    assert longer.candidates.sampled_ids.tolist() == longer.output_ids.tolist()
    assert longer.weight_spans == (*first.weight_spans, ("", 3))
    assert longer.weight_versions[-3:] == ("", "", "")
    assert (longer.finish_reason, longer.text, longer.turn_start) == ("extended", "", 6)
    assert longer.loss_mask.tolist() == [1, 1, 1, 0, 0, 0]
    np.testing.assert_array_equal(longer.masked_logprobs[3:], 0)
    assert (first.turn_start, len(first.output_ids), first.loss_mask.tolist()) == (0, 3, [1, 1, 1])


def test_before_anything_was_generated(fakes):
    nothing = replace(
        fakes.sample([5], 0),
        output_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        candidates=CandidateSets.empty(0),
        weight_spans=None,
    )
    longer = nothing.extend([3])
    assert (longer.output_ids.tolist(), longer.turn_start, longer.weight_spans) == ([3], 1, None)


def test_sets_without_logprobs_stay_so(fakes):
    first = fakes.sample([5], 0)
    longer = replace(first, candidates=first.candidates.without_logprobs()).extend([3])
    assert not longer.candidates.has_logprobs
    assert longer.candidates.sizes[-1] == 0


@pytest.mark.parametrize(
    "ids", [[], [-1], [2**31], [True], [[1]], "7", [1.0], None, b"\x01", [1, "2"], 3, [None]], ids=repr
)
def test_what_is_no_id(fakes, ids):
    with pytest.raises(InvalidInputError, match="token_ids: "):
        fakes.sample([5], 0).extend(ids)
    with pytest.raises(InvalidInputError, match="x: "):
        as_token_ids("x", ids)


def test_without_sets_nothing_tells_which_tokens_were_generated(fakes):
    with pytest.raises(InvalidInputError, match="extend: this rollout has no candidate sets"):
        replace(fakes.sample([5], 0), candidates=None).extend([1])


def test_the_loss_mask_comes_out_right(extended, fakes):
    plain = fakes.sample([6], 1)
    rollouts = [extended, plain]
    batch = collate_rl(
        [one.prompt_ids for one in rollouts],
        [one.output_ids for one in rollouts],
        [np.ones(len(one.output_ids), np.float32) for one in rollouts],
        [one.loss_mask for one in rollouts],
        logprobs=[one.logprobs for one in rollouts],
        candidates=[one.candidates for one in rollouts],
        pad_token_id=0,
    )
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 0, 1, 1, 1, 1], [0] * 6 + [1, 1, 1]]
    assert batch["candidates"].sets.sizes[3:5].tolist() == [0, 0]


def test_every_form_carries_it(extended, tmp_path, fakes):
    """JSON, packed frames, files: what was extended and cut comes back, bit for bit."""
    record = json.loads(json.dumps(to_record(extended)))
    forms = [from_record(record, may_be_extended=True)]
    save_rollouts(tmp_path / "file.parquet", [extended])
    forms += load_rollouts(tmp_path / "file.parquet")
    forms.append(from_packed(b"".join(PackedRecord(extended)), may_be_extended=True))
    for back in forms:
        assert to_record(back) == record
        assert back.candidates == extended.candidates
        assert back.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
        assert back.turn_start == 5
    cut = replace(fakes.sample([5], 0), finish_reason="abort")
    assert to_record(from_packed(b"".join(PackedRecord(cut)))) == to_record(cut)
    # The sidecar's answers to our client hold what was generated alone: a missing set is an error there.
    with pytest.raises(MissingCandidateSetsError, match="no candidate set at position 3"):
        from_record(record)
    with pytest.raises(MissingCandidateSetsError, match="no candidate set at position 3"):
        from_packed(b"".join(PackedRecord(extended)))


def test_an_appended_token_has_no_logprob(extended):
    record = to_record(replace(extended, logprobs=np.full(9, -1, np.float32)))
    with pytest.raises(WireError, match="candidates"):
        from_record(record, may_be_extended=True)
