"""The spans that replace SGLang's `weight_versions` have SGLang's own form."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_topp_patches.compat.releases import Feature, refused
from sglang_topp_patches.http.weight_spans import WeightSpans

if reason := refused(Feature.WEIGHT_VERSIONS):
    pytest.skip(f"refused on this SGLang: {reason}", allow_module_level=True)

from sglang.srt.utils.weight_versions import WeightVersionSpan, add_weight_versions_to_meta_info


@pytest.mark.parametrize("names", ["a", "aaa", "aab", "abba", "abcabc"])
def test_spans_are_written_as_sglang_writes_them(names: str) -> None:
    versions = WeightSpans()
    spans: list[WeightVersionSpan] = []
    for position, name in enumerate(names):
        versions.add(name)
        if spans and spans[-1].version == name:
            spans[-1].end += 1
        else:
            spans.append(WeightVersionSpan(version=name, start=position, end=position + 1))
    for num_tokens in range(1, len(names) + 1):
        expected: dict[str, Any] = {}
        add_weight_versions_to_meta_info(expected, spans, num_tokens)
        assert versions.meta_info(num_tokens) == expected


@pytest.mark.parametrize("names", ["a", "aaa", "abb", "aba"])
def test_the_first_version_may_come_last(names: str) -> None:
    expected, versions = WeightSpans(), WeightSpans()
    for position, name in enumerate(names):
        expected.add(name)
        versions.add(name if position else "")
    versions.name_first(names[0])
    for num_tokens in range(1, len(names) + 1):
        assert versions.meta_info(num_tokens) == expected.meta_info(num_tokens)
