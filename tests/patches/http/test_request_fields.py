"""The checks of `resumed_tokens`, and of fields that stand in two places."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.capabilities import Capabilities
from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.http.request_fields import parse
from tests.patches.make_http_process import http_process

PROCESS = http_process()


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProcess, "capabilities", Capabilities((), "", "", "", ""))


@pytest.mark.usefixtures("holds")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [1], RESUMED: "1"}, "got '1'"),
        ({"input_ids": [1], RESUMED: 1.0}, "got 1.0"),
        ({"input_ids": [1], RESUMED: 2}, "got 2 with a prompt of 1 token ids"),
        ({"text": "a", RESUMED: 1}, "got 1 with a prompt of no token ids"),
        ({"input_ids": [[1, 2], [3]], RESUMED: [1, 2]}, "got 2 with a prompt of 1 token ids"),
        ({"input_ids": [[1, 2], [3]], RESUMED: [1]}, "got 1 values for 2 prompts"),
        (
            {"input_ids": [1], RESUMED: 1, "sampling_params": {"presence_penalty": 1}},
            "sampling_params.presence_penalty: got 1",
        ),
        (
            {"input_ids": [[1], [2]], RESUMED: [0, 1], "sampling_params": [{}, {"ebnf": "a"}]},
            "sampling_params.ebnf: got 'a'",
        ),
        (
            {"input_ids": [1], RESUMED: 1, "sampling_params": {"custom_params": {"thinking_budget": 4}}},
            "sampling_params.custom_params: got",
        ),
    ],
)
def test_what_the_field_does_not_take(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        parse(PROCESS, body.get)
    assert words in str(raised.value)


@pytest.mark.usefixtures("holds")
def test_what_it_takes() -> None:
    ours = {"custom_params": {"return_logprobs_in_base64": True}}
    for body, counts in (
        ({"text": "a", RESUMED: 0}, [0]),
        ({"text": "a", "sampling_params": {"regex": "a"}, RESUMED: 0}, [0]),
        ({"text": ["a", "b"]}, []),
        (
            {"input_ids": [[1, 2], [3]], RESUMED: [2, None], "sampling_params": [ours, {"regex": "a"}]},
            [2, None],
        ),
    ):
        assert [one.resumed_tokens for one in parse(PROCESS, body.get)] == counts


def test_where_the_plugin_does_not_hold_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProcess, "capabilities", Capabilities(("gone",), "", "a seam is gone", "", ""))
    with pytest.raises(InvalidInputError, match="answers are not resumed here: a seam is gone"):
        parse(PROCESS, {"text": "a", RESUMED: 0}.get)
    assert parse(PROCESS, {"text": "a"}.get) == ()
