"""A seam that moved, or takes other parameters, is found at start."""

from __future__ import annotations

import pytest

from sglang_topp_patches import plugin, seams
from sglang_topp_patches.releases import RELEASES, Seam


def test_every_hook_stands_at_a_checked_seam_and_the_other_way_round() -> None:
    hooked = {target for target, _, _ in (*plugin._REFUSE_AND_REPORT, *plugin._SERVE)}
    for checked in RELEASES.values():
        assert {seam.target for seam in checked if seam.hooked} == hooked


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (Seam("sglang.srt.no_such_module.function", (), ""), "not found"),
        (Seam("sglang.srt.managers.auxiliary_output.no_such_function", (), ""), "not found"),
        (
            Seam("sglang.srt.managers.auxiliary_output.append_auxiliary_output", ("renamed",), ""),
            "expected renamed among them",
        ),
        (
            Seam("sglang.srt.managers.auxiliary_output.append_auxiliary_output", ("output", "current"), ""),
            "expected the order output, current",
        ),
    ],
)
def test_a_seam_that_changed_is_a_problem(monkeypatch: pytest.MonkeyPatch, seam: Seam, problem: str) -> None:
    monkeypatch.setattr(seams, "RELEASES", {"0.5.23": (seam,)})
    found = seams.check_seams()
    assert not found.active
    assert problem in found.problems[0]
    assert seam.target in found.problems[0]
    assert found.to_dict()["seams"] == {seam.target: found.checks[0].problem}
