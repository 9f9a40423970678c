"""`Rollout.extend`: exact ids, and no loss at appended tokens."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.batch import collate_rl
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError, WireError
from sglang_topp.replay import replayed_old_logprobs
from sglang_topp_client.value_checks import as_token_ids
from sglang_topp_client.wire.records import to_record
from tests.client import conftest as fakes


@pytest.fixture
def extended():
    """Return three generated tokens, two tool tokens, and another turn of four that was aborted."""
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


def test_tokens_are_appended_as_they_are():
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


def test_a_prompt_continues_exactly_the_rollout_that_it_begins_with(extended):
    known = [*extended.prompt_ids.tolist(), *extended.output_ids.tolist()]
    assert extended.continue_with(known) is extended
    for ids in ([*known, 7, 8], np.array([*known, 7, 8], np.int64)):
        assert to_record(extended.continue_with(ids)) == to_record(extended.extend([7, 8]))
    for i in range(len(known)):
        assert extended.continue_with(known[:i] or [known[0] + 1]) is None
        assert extended.continue_with([*known[:i], known[i] + 1, *known[i + 1 :], 7]) is None
    for ids in ([], [*known, -1], "7"):
        with pytest.raises(InvalidInputError, match="prompt_ids: "):
            extended.continue_with(ids)


def test_old_logprobs_have_one_definition(extended):
    for rollout in (extended, fakes.sample([5], 0)):
        np.testing.assert_array_equal(
            rollout.masked_logprobs.view(np.int32),
            replayed_old_logprobs(rollout.candidates, output_ids=rollout.output_ids).numpy().view(np.int32),
        )
        np.testing.assert_array_equal(
            rollout.masked_logprobs, rollout.logprobs - rollout.candidates.log_kept_mass
        )


def test_a_rollout_without_output_can_be_extended():
    nothing = replace(fakes.without_tokens(fakes.sample([5], 0)), weight_spans=None)
    longer = nothing.extend([3])
    assert (longer.output_ids.tolist(), longer.turn_start, longer.weight_spans) == ([3], 1, None)


def test_a_generated_token_with_an_empty_set_starts_no_turn():
    first = fakes.sample([5], 0)
    empty = CandidateSets(
        np.empty(0, np.int32), np.empty(0, np.float32), np.zeros(2, np.int64), first.output_ids[1:2]
    )
    sets = CandidateSets.concat([first.candidates[:1], empty, first.candidates[2:]])
    rollout = replace(first, candidates=sets)
    assert (rollout.loss_mask.tolist(), rollout.turn_start) == ([1, 0, 1], 0)
    assert rollout.extend([3]).turn_start == 4


def test_sets_without_logprobs_stay_so():
    first = fakes.sample([5], 0)
    longer = replace(first, candidates=first.candidates.without_logprobs()).extend([3])
    assert not longer.candidates.has_logprobs
    assert longer.candidates.sizes[-1] == 0


@pytest.mark.parametrize(
    "ids", [[], [-1], [2**31], [True], [[1]], "7", [1.0], None, b"\x01", [1, "2"], 3, [None]], ids=repr
)
def test_wrong_token_ids_are_refused(ids):
    with pytest.raises(InvalidInputError, match="token_ids: "):
        fakes.sample([5], 0).extend(ids)
    with pytest.raises(InvalidInputError, match="x: "):
        as_token_ids("x", ids)


def test_without_sets_the_spans_tell_which_tokens_were_generated():
    plain = replace(fakes.sample([5], 0), candidates=None, weight_spans=None, top_logprobs_source=None)
    longer = plain.extend([7]).extend([8])
    longer = replace(
        longer,
        output_ids=np.concatenate([longer.output_ids, plain.output_ids]),
        logprobs=np.concatenate([longer.logprobs, plain.logprobs]),
    ).extend([9])
    assert longer.appended_spans == ((3, 5), (8, 9))
    assert longer.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 0]
    assert longer.turn_start == 9
    assert longer.candidates is longer.weight_spans is None
    for back in (*fakes.through_a_file(longer), fakes.through_json(longer, may_be_extended=True)):
        assert fakes.bits(back) == fakes.bits(longer)
        assert back.loss_mask.tolist() == longer.loss_mask.tolist()
    with pytest.raises(WireError, match=r"appended_spans: got \(\(3, 5\), \(8, 9\)\), expected only"):
        fakes.through_json(longer)


def test_extending_twice_is_one_span_with_sets_too(extended):
    assert extended.appended_spans == ((3, 5),)
    assert extended.extend([1, 2]).appended_spans == ((3, 5), (9, 11))


def test_the_loss_mask_comes_out_right(extended):
    rollouts = [extended, fakes.sample([6], 1)]
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


def test_every_codec_preserves_appended_tokens(extended):
    """Extended rollouts round-trip through JSON and files, bit for bit."""
    for back in (*fakes.through_a_file(extended), fakes.through_json(extended, may_be_extended=True)):
        assert fakes.bits(back) == fakes.bits(extended)
        assert back.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
        assert back.turn_start == 5
    # The sidecar's answers to our client hold generated tokens only, so an empty set is an error there.
    for through in (fakes.through_json, fakes.through_a_frame):
        with pytest.raises(MissingCandidateSetsError, match="no candidate set at position 3"):
            through(extended)


def test_an_appended_token_has_no_logprob(extended):
    with pytest.raises(WireError, match="candidates"):
        fakes.through_json(replace(extended, logprobs=np.full(9, -1, np.float32)), may_be_extended=True)
