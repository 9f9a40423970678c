"""What goes into a buffer comes out once, in parts, as SGLang slices it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp_patches.releases import Feature
from sglang_topp_patches.set_buffer import PackedSet, Problem, SetBuffer
from tests.skip_missing_features import needs


def packed(size: int, seed: int = 0) -> PackedSet:
    return bytes([seed % 256]) * 4 * size, bytes([seed % 251]) * 4 * size


def filled(versions: str) -> SetBuffer:
    buffer = SetBuffer()
    for position, version in enumerate(versions):
        buffer.append(packed(position % 4 + 1, position), version)
    return buffer


@given(
    versions=st.text("abc", min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    is_held_back=st.booleans(),
    has_prompt=st.booleans(),
)
def test_parts_join_to_the_whole(
    versions: str, cuts: list[int], is_held_back: bool, has_prompt: bool
) -> None:
    """SGLang sends up to a cut, whether or not later tokens are in the buffer by then."""
    end = len(versions)
    stops = [*sorted(cut for cut in cuts if cut <= end), end]
    scheduler, received, expected = SetBuffer(), SetBuffer(), filled(versions)
    if is_held_back:
        scheduler = filled(versions)
    if has_prompt:
        scheduler.prompt = filled("aaaa").generated
    start = 0
    for stop in stops:
        for position in range(scheduler.end, stop):
            scheduler.append(packed(position % 4 + 1, position), versions[position])
        for part in pickle.loads(pickle.dumps(scheduler[start:stop])):
            received.extend(part)
        start = stop
    assert received.end == end
    assert received.generated.sets() == expected.generated.sets()
    assert received.prompt.sets() == ([None, *filled("aaa").generated.sets()] if has_prompt else [])
    for num_tokens in range(1, end + 1):
        assert received.weight_versions(num_tokens) == expected.weight_versions(num_tokens)
    assert scheduler.num_held == 0
    assert scheduler[end : end + 1] == []


def test_a_problem_drops_the_sets_and_goes_out_with_the_next_token() -> None:
    buffer = filled("aab")
    buffer[0:1]
    buffer.fail(Problem("why", 413))
    buffer.fail(Problem("another", 500))
    assert buffer.num_held == 0
    (part,) = pickle.loads(pickle.dumps(buffer[1:4]))
    received = filled("a")
    received.extend(part)
    assert received.problem == Problem("why", 413)
    assert received.num_held == 0


@pytest.mark.parametrize(("first", "end"), [(0, 2), (0, 0), (1, 2), (2, 1), (3, 3)])
def test_a_request_that_starts_over_drops_what_it_had(first: int, end: int) -> None:
    buffer = filled("aab")
    buffer[0:first]
    buffer.truncate(end)
    assert buffer.end == end
    assert buffer.generated.sets() == filled("aab").generated.sets()[first:end]
    if end and not first:
        assert buffer.weight_versions(3) == filled("aab").weight_versions(end)


@needs(Feature.WEIGHT_VERSIONS)
@pytest.mark.parametrize("names", ["a", "aaa", "aab", "abba", "abcabc"])
def test_spans_are_written_as_sglang_writes_them(names: str) -> None:
    from sglang.srt.utils.weight_versions import WeightVersionSpan, add_weight_versions_to_meta_info

    spans: list[WeightVersionSpan] = []
    for position, name in enumerate(names):
        if spans and spans[-1].version == name:
            spans[-1].end += 1
        else:
            spans.append(WeightVersionSpan(version=name, start=position, end=position + 1))
    for num_tokens in range(1, len(names) + 1):
        expected: dict[str, Any] = {}
        add_weight_versions_to_meta_info(expected, spans, num_tokens)
        assert filled(names).weight_versions(num_tokens) == expected


@pytest.mark.parametrize("names", ["a", "aaa", "abb", "aba"])
def test_the_first_set_may_come_last(names: str) -> None:
    """A decode server has the first token before the prefill server's set."""
    expected, buffer = filled(names), SetBuffer()
    buffer.append(None)
    for position, name in enumerate(names[1:], 1):
        buffer.append(packed(position % 4 + 1, position), name)
    copied = expected.first_position()
    (first,) = copied.generated.sets()
    buffer.set_first(first, copied.spans[0][0])
    assert buffer.generated.sets() == expected.generated.sets()
    for num_tokens in range(1, len(names) + 1):
        assert buffer.weight_versions(num_tokens) == expected.weight_versions(num_tokens)
