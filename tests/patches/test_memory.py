"""The budget's limits: defaults, environment variables, and refused values."""

from __future__ import annotations

import pytest

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.memory import Budget

PER_SAMPLE, IN_FLIGHT = "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE", "SGLANG_TOPP_MAX_CANDIDATES_IN_FLIGHT"


def test_limits_come_from_the_environment_or_from_the_memory() -> None:
    assert Budget.of({}, 1 << 50) == Budget(1 << 25, 1 << 42)
    assert Budget.of({}, 1 << 30) == Budget(1 << 22, 1 << 22)
    assert Budget.of({PER_SAMPLE: "7", IN_FLIGHT: " 9 "}, 1 << 30) == Budget(7, 9)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e6", "many", "9" * 400, "٣"])
@pytest.mark.parametrize("name", [PER_SAMPLE, IN_FLIGHT])
def test_limits_that_are_none_are_named(name: str, text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: got .*, expected a positive integer"):
        Budget.of({name: text}, 1 << 30)


def test_a_limit_that_cannot_be_read_turns_the_feature_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_topp_patches.capabilities import check_seams

    monkeypatch.setenv(PER_SAMPLE, "lots")
    assert any(PER_SAMPLE in problem for problem in check_seams([]).problems)
