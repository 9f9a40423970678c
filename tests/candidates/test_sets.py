"""CandidateSets: derived values, invalid arrays, equality, and pickling."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets
from sglang_topp.candidates import NO_TOKEN, csr_operations
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError

LOWEST = np.finfo(np.float32).min


def of(*spans, sampled=None):
    """Return sets from `{token_id: logprob}` per position, in the given order. The first id is sampled."""
    sizes = [len(span) for span in spans]
    return CandidateSets(
        [token for span in spans for token in span],
        np.array([logprob for span in spans for logprob in span.values()], np.float32),
        np.cumsum([0, *sizes]),
        sampled if sampled is not None else [next(iter(span), NO_TOKEN) for span in spans],
    )


@st.composite
def spans_and_sampled(draw, max_positions=8):
    """Draw `[{token_id: logprob}]` in contract order, and one sampled id per position (NO_TOKEN if empty)."""
    logprob = st.floats(-50, 0, width=32) | st.sampled_from([0.0, -1.0, -2.0])
    span = st.dictionaries(st.integers(0, 300_000) | st.integers(0, 9), logprob, max_size=12)
    spans, sampled = [], []
    for entries in draw(st.lists(span, max_size=max_positions)):
        ordered = dict(sorted(entries.items(), key=lambda entry: (-entry[1], entry[0])))
        drawn = draw(st.sampled_from(list(ordered))) if ordered else NO_TOKEN
        if len(ordered) > 1 and drawn == list(ordered)[-1]:
            ordered[drawn] = draw(st.sampled_from([ordered[drawn], float(LOWEST), -np.inf]))
        spans.append(ordered)
        sampled.append(drawn)
    return spans, sampled


candidate_sets = spans_and_sampled().map(lambda made: of(*made[0], sampled=made[1]))

A = {5: -0.5, 2: -1.0, 9: -1.0}
B = {7: -0.25}
C = {1: -0.75, 4: -1.5}


# -- reading ---------------------------------------------------------------------------------------


def test_fields_and_their_types():
    sets = of(A, {}, B)
    assert (sets.token_ids.dtype, sets.logprobs.dtype) == (np.int32, np.float32)
    assert (sets.offsets.dtype, sets.sampled_ids.dtype) == (np.int64, np.int32)
    assert sets.token_ids.tolist() == [5, 2, 9, 7]
    assert sets.offsets.tolist() == [0, 3, 3, 4]
    assert sets.sampled_ids.tolist() == [5, NO_TOKEN, 7]
    assert len(sets) == 3
    assert (sets.sizes.dtype, sets.sizes.tolist()) == (np.int64, [3, 0, 1])
    assert repr(sets) == "CandidateSets(positions=3, candidates=4, mean_size=1.3)"
    assert repr(of()) == "CandidateSets(positions=0, candidates=0, mean_size=0.0)"


def test_positions_and_slices():
    sets = of(A, {}, B, C)
    ids, logprobs = sets[0]
    assert (ids.tolist(), logprobs.tolist()) == ([5, 2, 9], [-0.5, -1.0, -1.0])
    assert sets[1][0].tolist() == []
    assert sets[-1][0].tolist() == [1, 4]
    assert [ids.tolist() for ids, _ in sets] == [[5, 2, 9], [], [7], [1, 4]]
    assert sets[1:3] == of({}, B)
    assert sets[2:] == of(B, C)
    assert sets[-1:] == of(C)
    assert sets[3:1] == of()
    assert sets[:100] == sets
    assert np.shares_memory(sets[2:].token_ids, sets.token_ids)
    for outside in (4, -5):
        with pytest.raises(IndexError):
            sets[outside]
    with pytest.raises(InvalidInputError, match="slice step: got 2, expected 1"):
        sets[::2]


@given(candidate_sets)
def test_derived_values_match_their_formulas(sets):
    for t, (ids, logprobs) in enumerate(sets):
        if not len(ids):
            assert sets.log_kept_mass[t] == 0
            assert sets.sampled_logprobs[t] == 0
            continue
        expected = np.logaddexp.reduce(logprobs.astype(np.float64))
        np.testing.assert_allclose(sets.log_kept_mass[t], expected, rtol=1e-6, atol=1e-6)
        assert sets.sampled_logprobs[t] == logprobs[ids.tolist().index(sets.sampled_ids[t])]
    for values in (sets.log_kept_mass, sets.sampled_logprobs):
        assert values.dtype == np.float32
        assert values.shape == (len(sets),)


def test_a_set_of_one_has_its_own_logprob_as_sum():
    logprobs = np.linspace(-40, 0, 50, dtype=np.float32)
    sets = CandidateSets(np.arange(50), logprobs, np.arange(51), np.arange(50))
    assert np.array_equal(sets.log_kept_mass, logprobs)


def test_sums_far_below_zero_and_over_impossible_tokens():
    sets = of({3: -2000.0, 4: -2000.0}, {1: -1.0, 2: -np.inf}, {1: -1.0, 2: LOWEST}, sampled=[4, 2, 2])
    np.testing.assert_allclose(sets.log_kept_mass, [-2000 + np.log(2), -1, -1], rtol=1e-6)
    assert sets.sampled_logprobs.tolist() == [-2000.0, -np.inf, LOWEST]


def test_arrays_are_views_and_read_only():
    ids, logprobs = np.array([5, 2], np.int32), np.array([-0.5, -1.0], np.float32)
    offsets, sampled = np.array([0, 2]), np.array([2], np.int32)
    sets = CandidateSets(ids, logprobs, offsets, sampled)
    for mine, given_ in (
        (sets.token_ids, ids),
        (sets.logprobs, logprobs),
        (sets.offsets, offsets),
        (sets.sampled_ids, sampled),
    ):
        assert np.shares_memory(mine, given_)
        assert given_.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            mine[0] = 0
    for derived in (sets.sizes, sets.log_kept_mass, sets.sampled_logprobs, sets[0][0], sets[0:1].token_ids):
        with pytest.raises(ValueError, match="read-only"):
            derived[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        sets.token_ids = ids


def test_read_only_and_strided_arrays_are_taken():
    ids = np.array([5, 0, 2, 0], np.int32)[::2]
    ids.flags.writeable = False
    sets = CandidateSets(ids, np.array([-0.5, -1.0]), (0, 2), [2])
    assert sets == of({5: -0.5, 2: -1.0}, sampled=[2])


# -- construction ----------------------------------------------------------------------------------------


def test_empty():
    sets = CandidateSets.empty(3)
    assert sets == of({}, {}, {})
    assert sets.sampled_ids.tolist() == [NO_TOKEN] * 3
    assert CandidateSets.empty(0) == of()
    with pytest.raises(InvalidInputError, match="num_positions: got -1"):
        CandidateSets.empty(-1)


def test_a_tool_token_may_be_named_where_the_span_is_empty():
    assert of({}, B, sampled=[123, 7]).sampled_ids.tolist() == [123, 7]


@given(st.lists(candidate_sets, max_size=4))
def test_concat_is_undone_by_slices(parts):
    whole = CandidateSets.concat(parts)
    assert len(whole) == sum(map(len, parts))
    start = 0
    for part in parts:
        assert whole[start : start + len(part)] == part
        start += len(part)
    assert CandidateSets(*whole._arrays()) == whole


@given(candidate_sets, st.data())
def test_take_is_one_position_after_the_other(sets, data):
    positions = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=10) if len(sets) else st.just([]))
    taken = sets.take(positions)
    assert taken == CandidateSets.concat([sets[t : t + 1] for t in positions])
    assert sets.take(np.array(positions, np.uint8)) == taken


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 3], "got 3, expected 0 to 2"),
        ([-1], "got -1, expected 0 to 2"),
        (np.array([2**63], np.uint64), f"got {2**63}, expected 0 to 2"),
        ([0.0], r"got float64 of shape \(1,\), expected integers"),
        ([True, False, True], "got bool"),
        (1, r"of shape \(\), expected integers \[any\]"),
    ],
)
def test_take_refuses(positions, message):
    with pytest.raises(InvalidInputError, match=f"positions: {message}" if message[:3] == "got" else message):
        of(A, {}, B).take(positions)


@given(candidate_sets, st.integers(1, 5), st.data())
def test_place_puts_the_sets_where_the_mask_is_true(sets, width, data):
    mask = np.zeros((len(sets) // width + 2, width), bool)
    at = sorted(data.draw(st.permutations(range(mask.size)))[: len(sets)])
    mask.flat[at] = True
    placed = sets.place(mask)
    one = [CandidateSets.empty(1)] * mask.size
    for t, place in enumerate(at):
        one[place] = sets[t : t + 1]
    assert placed == CandidateSets.concat(one)
    assert CandidateSets(*placed._arrays()) == placed


@pytest.mark.parametrize("mask", [np.ones((2, 2), bool), np.eye(3), np.zeros(3, bool)])
def test_place_refuses_a_mask_that_does_not_fit(mask):
    with pytest.raises(
        InvalidInputError,
        match=r"mask: got (4 true|float64|0 true).*, expected booleans with 3 true elements",
    ):
        of(A, {}, B).place(mask)


def test_intersection_keeps_this_ones_values_and_the_sampled_token():
    top_p, top_k = of(A, {}, B, C), of({5: -0.6, 9: -1.2, 8: -3.0}, {}, B, {1: -0.8})
    both = top_p.intersect(top_k)
    assert both == of({5: -0.5, 9: -1.0}, {}, B, {1: -0.75})
    assert both.log_kept_mass[3] == np.float32(-0.75)
    assert CandidateSets.empty(2).intersect(CandidateSets.empty(2)) == CandidateSets.empty(2)


@pytest.mark.parametrize("lowest", [-np.inf, LOWEST])
def test_an_intersection_without_mass_is_refused(lowest):
    mine, theirs = ({token: -0.5, 4: lowest} for token in (1, 2))
    mine, theirs = of(B, {}, mine, sampled=[7, -1, 4]), of(B, {}, theirs, sampled=[7, -1, 4])
    assert mine.intersect(mine) == mine
    with pytest.raises(InvalidInputError, match=r"other: .* zero probability at position 2"):
        mine.intersect(theirs)


@given(spans_and_sampled(), st.randoms(use_true_random=False))
def test_intersection_is_that_of_sets(made, random):
    spans, sampled = made
    other = []
    for span, s in zip(spans, sampled, strict=True):
        # Keep the most likely token too if the sampled one is impossible, or the set would have no mass.
        keep = {s, next(iter(span))} if span and span[s] <= LOWEST else {s}
        other.append({i: logprob for i, logprob in span.items() if i in keep or random.random() < 0.6})
    one, two = of(*spans, sampled=sampled), of(*other, sampled=sampled)
    assert one.intersect(two) == two
    assert two.intersect(one) == two
    assert CandidateSets(*one.intersect(two)._arrays()) == two


def test_intersection_refuses_sets_of_other_tokens():
    with pytest.raises(InvalidInputError, match="other: got 1 positions, expected 2"):
        of(A, B).intersect(of(A))
    with pytest.raises(InvalidInputError, match="sampled_ids differ at position 0: 2 and 5"):
        of(A, B).intersect(of(A, B, sampled=[2, 7]))
    with pytest.raises(InvalidInputError, match="empty spans differ at position 1"):
        of(A, B).intersect(of(A, {}, sampled=[5, 7]))


@given(candidate_sets)
def test_to_lists(sets):
    ids, logprobs = sets.to_lists()
    assert ids == [row.tolist() for row, _ in sets]
    assert logprobs == [row.tolist() for _, row in sets]


# -- without log-probs -----------------------------------------------------------------------------


def masks(*spans, sampled=None):
    """Return sets without log-probs from lists of ids. The first id is sampled."""
    sizes = [len(span) for span in spans]
    return CandidateSets(
        [token for span in spans for token in span],
        None,
        np.cumsum([0, *sizes]),
        sampled if sampled is not None else [next(iter(span), NO_TOKEN) for span in spans],
    )


@given(spans_and_sampled())
def test_sets_without_logprobs_support_all_other_operations(made):
    spans, sampled = made
    sets = of(*spans, sampled=sampled)
    ids_only = sets.without_logprobs()
    assert ids_only == masks(*map(sorted, spans), sampled=sampled)
    assert ids_only.has_logprobs == (not any(spans))
    assert ids_only.without_logprobs() == ids_only
    assert len(ids_only) == len(sets)
    assert ids_only.sizes.tolist() == sets.sizes.tolist()
    assert [ids.tolist() for ids, _ in ids_only] == list(map(sorted, spans))
    half = len(sets) // 2
    assert ids_only[half:] == sets[half:].without_logprobs()
    assert CandidateSets.concat([ids_only[:half], ids_only[half:]]) == ids_only
    order = np.arange(len(sets))[::-1]
    assert ids_only.take(order) == sets.take(order).without_logprobs()
    for again in (pickle.loads(pickle.dumps(ids_only)), copy.deepcopy(ids_only)):
        assert again == ids_only
    assert (ids_only == sets) == (not any(spans))
    assert ids_only.intersect(sets) == ids_only
    assert sets.intersect(ids_only) == sets
    assert CandidateSets(*ids_only._arrays()) == ids_only


def test_reading_unknown_logprobs_raises():
    sets = masks([2, 5], [], [7])
    assert not sets.has_logprobs
    assert repr(sets) == "CandidateSets(positions=3, candidates=3, mean_size=1.0, no log-probs)"
    for name in ("logprobs", "log_kept_mass", "sampled_logprobs"):
        with pytest.raises(InvalidInputError, match="logprobs: these candidate sets have none, because"):
            getattr(sets, name)
    assert [logprobs for _, logprobs in sets] == [None] * 3
    assert sets.to_lists() == ([[2, 5], [], [7]], None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sets.logprobs = np.zeros(3, np.float32)


def test_without_a_candidate_nothing_is_unknown():
    assert masks([], []) == CandidateSets.empty(2)
    nothing = masks([2, 5], [], [7])[1:2]
    assert nothing.has_logprobs
    assert nothing.log_kept_mass.tolist() == [0.0]
    assert nothing.to_lists() == ([[]], [[]])


def test_concat_takes_one_kind_or_the_other():
    known, ids_only = of(A, B), masks([2, 5])
    with pytest.raises(InvalidInputError, match=r"parts\[2\]: has no log-probs, and parts\[1\] has;"):
        CandidateSets.concat([CandidateSets.empty(1), known, ids_only])
    with pytest.raises(InvalidInputError, match=r"parts\[0\]: has no log-probs, and parts\[1\] has;"):
        CandidateSets.concat([ids_only, known])
    alike = CandidateSets.concat([known.without_logprobs(), CandidateSets.empty(2), ids_only])
    assert alike == masks([2, 5, 9], [7], [], [], [2, 5], sampled=[5, 7, -1, -1, 2])


def test_intersection_has_logprobs_where_this_value_has():
    known, ids_only = of(A, {}, B, C), masks([2, 5], [], [3, 7], [1], sampled=[5, -1, 7, 1])
    assert known.intersect(ids_only) == of({5: -0.5, 2: -1.0}, {}, B, {1: -0.75}, sampled=[5, -1, 7, 1])
    assert ids_only.intersect(known) == masks([2, 5], [], [7], [1], sampled=[5, -1, 7, 1])
    assert ids_only.intersect(ids_only) == ids_only


@pytest.mark.parametrize(
    ("ids", "sampled", "message"),
    [
        (
            [5, 2, 7],
            [2, 7],
            "token_ids: 5 then 2 at position 0; without log-probs, expected ids lowest first",
        ),
        ([5, 5, 7], [5, 7], "token_ids: 5 then 5 at position 0"),
        ([-2, 5, 7], [5, 7], "token_ids: got -2 at position 0"),
        ([2, 5, 7], [3, 7], "sampled_ids: 3 is not among the 2 candidates at position 0"),
        ([2, 5, 7], [2, -1], "sampled_ids: -1 is not among the 1 candidates at position 1"),
    ],
)
def test_invalid_ids_alone_are_named(ids, sampled, message):
    with pytest.raises(InvalidCandidateSetsError, match=f"^{message}"):
        CandidateSets(ids, None, [0, 2, 3], sampled)


# -- equality, hashing, pickling --------------------------------------------------------------------------


def test_equality_is_by_content():
    assert of(A, B) == of(A, B)
    for other in (
        of(A),
        of(A, B, sampled=[2, 7]),
        of(A, {7: -0.5}),
        of(A, {8: -0.25}),
        of({5: -0.5}, {2: -1.0, 9: -1.0, 7: -2.0}),
    ):
        assert of(A, B) != other
    assert of(A) != "CandidateSets"
    with pytest.raises(TypeError, match="unhashable"):
        hash(of(A))


@given(candidate_sets, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_pickle_and_copies(sets, protocol):
    for again in (pickle.loads(pickle.dumps(sets, protocol)), copy.copy(sets), copy.deepcopy(sets)):
        assert again == sets
        assert not again.token_ids.flags.writeable


def test_pickle_5_moves_the_arrays_out_of_band():
    n = 50_000
    sets = CandidateSets(np.arange(n), np.zeros(n, np.float32), np.arange(n + 1), np.arange(n))
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(sets, protocol=5, buffer_callback=buffers.append)
    assert len(header) < 2_000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 4 * n + 4 * n + 8 * (n + 1) + 4 * n
    assert all(buffer.raw().readonly for buffer in buffers)
    again = pickle.loads(header, buffers=buffers)
    assert again == sets
    assert np.shares_memory(again.token_ids, sets.token_ids)
    received = [bytearray(buffer.raw()) for buffer in buffers]
    again = pickle.loads(header, buffers=received)
    assert again == sets
    assert not again.token_ids.flags.writeable


# -- invalid arrays -------------------------------------------------------------------------------

GOOD = {
    "token_ids": np.array([5, 2, 9, 7], np.int32),
    "logprobs": np.array([-0.5, -1.0, -1.0, -0.25], np.float32),
    "offsets": np.array([0, 3, 3, 4]),
    "sampled_ids": np.array([2, -1, 7], np.int32),
}
WRAPPING = 2**63 - 1


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("token_ids", {"token_ids": [5, 2, 9, -7]}, "got -7 at position 2, expected 0 or more"),
        ("token_ids", {"token_ids": [5, 9, 2, 7]}, "9 then 2 .* at position 0"),
        ("token_ids", {"token_ids": [5, 2, 2, 7]}, "2 then 2 .* at position 0"),
        ("token_ids", {"token_ids": [9, 2, 9, 7]}, "9 occurs twice at position 0"),
        ("token_ids", {"token_ids": [[5, 2, 9, 7]]}, "got 2 dimensions"),
        ("token_ids", {"token_ids": [[5], [2, 9]]}, "one number per entry"),
        ("token_ids", {"token_ids": [5.0, 2.0, 9.0, 7.0]}, "got dtype float64, expected integers"),
        ("token_ids", {"token_ids": [5, 2, 2**31, 7]}, "that int32 can hold"),
        ("token_ids", {"token_ids": np.array([5, 2, 2**63, 7], np.uint64)}, "that int32 can hold"),
        ("token_ids", {"token_ids": [5, 2, 2**70, 7]}, "got dtype object"),
        ("token_ids", {"token_ids": ["5", "2", "9", "7"]}, "got dtype <U1"),
        ("token_ids", {"token_ids": [True, False, True, True]}, "got dtype bool"),
        ("logprobs", {"logprobs": [-0.5, -1.0, -1.0]}, "got 3 entries for 4 token_ids"),
        ("logprobs", {"logprobs": [-0.5, -1.0, np.nan, -1.0]}, "got nan at position 0"),
        ("logprobs", {"logprobs": [-0.5, -1.0, -1.0, 0.25]}, "got 0.25 at position 2, expected at most 0"),
        ("logprobs", {"logprobs": [np.inf, -1.0, -1.0, -1.0]}, "got inf at position 0"),
        (
            "logprobs",
            {"logprobs": [-0.5, -1.0, -np.inf, -1.0]},
            "got -inf at position 0 for a token that was",
        ),
        (
            "logprobs",
            {"logprobs": [-0.5, -1.0, LOWEST, -1.0]},
            "at position 0 for a token that was not sampled",
        ),
        ("logprobs", {"logprobs": [-0.5, -1.0, -1.0, -np.inf]}, "nothing but a token of zero probability"),
        ("logprobs", {"logprobs": [-0.5, -1.0, -1.0, LOWEST]}, "zero probability at position 2"),
        ("logprobs", {"logprobs": [-0.5, -1.0, -1e39, -1.0]}, "got -1e.39, expected values that float32"),
        ("logprobs", {"logprobs": [-1, -1, -1, -1]}, "got dtype int64, expected floats"),
        ("logprobs", {"logprobs": 0.5}, "got 0 dimensions"),
        ("token_ids", {"logprobs": [-1.0, -0.5, -1.0, -1.0]}, "5 then 2 .* expected log-probs highest first"),
        ("offsets", {"offsets": [0, 3, 4]}, "got 3 entries for 3 sampled_ids, expected one more"),
        ("offsets", {"offsets": []}, "got 0 entries"),
        ("offsets", {"offsets": [1, 3, 3, 4]}, "run from 1 to 4, expected from 0 to 4"),
        ("offsets", {"offsets": [0, 3, 3, 5]}, "run from 0 to 5"),
        ("offsets", {"offsets": [0, 3, 2, 4]}, "decrease after position 1"),
        ("offsets", {"offsets": [0, 5, 3, 4]}, "decrease after position 1"),
        ("offsets", {"offsets": [0, WRAPPING, -2, 4]}, "decrease after position 1"),
        ("offsets", {"offsets": [0.0, 3.0, 3.0, 4.0]}, "got dtype float64"),
        ("sampled_ids", {"sampled_ids": [8, -1, 7]}, "8 is not among the 3 candidates at position 0"),
        ("sampled_ids", {"sampled_ids": [2, -1, 5]}, "5 is not among the 1 candidates at position 2"),
        ("sampled_ids", {"sampled_ids": [2, -1, NO_TOKEN]}, "-1 is not among the 1 candidates"),
        ("sampled_ids", {"sampled_ids": [2, -2, 7]}, "got -2 at position 1, expected a token id"),
        ("sampled_ids", {"sampled_ids": [2, 2**40, 7]}, "that int32 can hold"),
    ],
)
def test_invalid_arrays_are_named(field, change, message):
    assert CandidateSets(**GOOD).sampled_ids.tolist() == [2, -1, 7]
    with pytest.raises(InvalidCandidateSetsError, match=message) as caught:
        CandidateSets(**(GOOD | change))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_tensors_that_numpy_cannot_read_are_named():
    import torch

    logprobs = torch.tensor([-0.5, -1.0, -1.0, -0.25])
    assert CandidateSets(**(GOOD | {"logprobs": logprobs})) == CandidateSets(**GOOD)
    for unreadable in (logprobs.bfloat16(), logprobs.clone().requires_grad_(), logprobs.to("meta")):
        with pytest.raises(InvalidCandidateSetsError, match="logprobs: cannot be read"):
            CandidateSets(**(GOOD | {"logprobs": unreadable}))


def test_logprobs_that_round_to_just_above_zero_are_taken():
    assert of({3: 1e-7}).logprobs[0] > 0


@given(candidate_sets, st.data())
def test_duplicate_is_found_at_any_position(sets, data):
    rows = np.flatnonzero(sets.sizes)
    if not len(rows):
        return
    t = int(data.draw(st.sampled_from(rows.tolist())))
    twice = data.draw(st.sampled_from(sets[t][0].tolist()))
    # Append one entry to the span, with the lowest log-prob.
    at = int(sets.offsets[t + 1])
    offsets = sets.offsets + (np.arange(len(sets) + 1) > t)
    logprobs = np.insert(np.maximum(sets.logprobs, -1e30), at, -2e30)
    with pytest.raises(InvalidCandidateSetsError, match=f"token_ids: {twice} occurs twice at position {t}"):
        CandidateSets(np.insert(sets.token_ids, at, twice), logprobs, offsets, sets.sampled_ids)


@given(st.sampled_from([1, 2, 7, 64]), st.integers(0, 39), st.data())
def test_errors_name_the_position_for_any_block_size(at_once, t, data):
    """The check runs on blocks of positions, and the message names the position in the whole array."""
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=40, max_size=40))
    sizes[t] = max(sizes[t], 2)
    offsets = np.cumsum([0, *sizes])
    ids = np.concatenate([np.arange(size) for size in sizes]).astype(np.int32)
    logprobs = np.full(len(ids), -1.0, np.float32)
    sampled = np.where(np.array(sizes) > 0, 0, NO_TOKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csr_operations, "_AT_ONCE", at_once)
        CandidateSets(ids, logprobs, offsets, sampled)
        for wrong in ("token_ids", "logprobs", "sampled_ids"):
            arrays = {"token_ids": ids.copy(), "logprobs": logprobs.copy(), "sampled_ids": sampled.copy()}
            if wrong == "sampled_ids":
                arrays[wrong][t] = 77
            else:
                arrays[wrong][offsets[t] + 1] = 0 if wrong == "token_ids" else np.nan
            with pytest.raises(InvalidCandidateSetsError, match=rf"^{wrong}: .*at position {t}\b"):
                CandidateSets(arrays["token_ids"], arrays["logprobs"], offsets, arrays["sampled_ids"])
