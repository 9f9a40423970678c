"""The report of `doctor` is short where sets are served, and names whatever keeps them from being served."""

from __future__ import annotations

import pytest
import sglang.srt.plugins

from sglang_topp_patches import capabilities, plugin, releases
from sglang_topp_patches.capabilities import SeamCheck, Status
from sglang_topp_patches.hooks import Seam
from sglang_topp_patches.plugin import all_seams
from sglang_topp_patches.releases import RELEASES, UNLISTED, Release

CHANGED = SeamCheck(Seam("sglang.changed", "Do it."), "takes (self), expected req among them")


@pytest.fixture(autouse=True)
def _not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the SGLang of this process as it is."""
    monkeypatch.setattr(sglang.srt.plugins, "load_plugins", lambda: None)
    for name in ("SGLANG_RUST_SERVER", "SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_ENABLE_GRAPH_POOL_BORROW"):
        monkeypatch.delenv(name, raising=False)


def _report(
    monkeypatch: pytest.MonkeyPatch, status: Status, release: Release, *, verbose: bool
) -> tuple[bool, list[str]]:
    monkeypatch.setattr(capabilities, "status", lambda: status)
    monkeypatch.setattr(releases, "installed", lambda: (status.sglang_version, release))
    return plugin.report(verbose)


@pytest.mark.parametrize("release", RELEASES)
def test_five_lines_are_enough_where_sets_are_served(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    checks = tuple(SeamCheck(seam) for seam in all_seams() if seam.is_in(release))
    status = Status(release, checks, ())
    holds, lines = _report(monkeypatch, status, RELEASES[release], verbose=False)
    assert holds
    assert len(lines) <= 5
    count = len(checks)
    assert lines[0] == (
        f"SGLang {release}: {count} of the {count} functions that are hooked or called are as expected"
    )
    assert lines[-1] == "the plugin holds"
    assert all(feature in "".join(lines) for feature in RELEASES[release].refused)
    assert any(line.startswith("note: requests at a temperature") for line in lines)

    holds, lines = _report(monkeypatch, status, RELEASES[release], verbose=True)
    assert holds
    for check in checks:
        at = lines.index(f"  holds  {check.seam.target}")
        assert lines[at + 1].startswith("         ")
    for feature, reason in RELEASES[release].refused.items():
        assert f"refused: {feature}: {reason}" in lines


@pytest.mark.parametrize("verbose", [True, False])
def test_what_is_changed_is_named(monkeypatch: pytest.MonkeyPatch, verbose: bool) -> None:
    status = Status("0.5.23", (CHANGED,), ("sglang.changed: takes (self)",))
    holds, lines = _report(monkeypatch, status, RELEASES["0.5.23"], verbose=verbose)
    assert not holds
    assert lines[0].startswith("SGLang 0.5.23: 0 of the 1 functions")
    assert lines[1:3] == ["  FAILS  sglang.changed", f"         {CHANGED.problem}"]
    assert "problem: sglang.changed: takes (self)" in lines
    assert lines[-1] == "the plugin does NOT hold: requests are refused"


@pytest.mark.filterwarnings("ignore")  # SGLang warns if it is imported without an accelerator
def test_an_unsupported_release_shows_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Seam("sglang.srt.managers.utils.gone", "Do it.", since="0.5.20")
    older = Seam("sglang.srt.managers.utils.older", "Do it.", until="0.5.20")
    seams = (gone, older, Seam("sglang.srt.plugins.load_plugins", "Do it."))
    monkeypatch.setattr(plugin, "all_seams", lambda: seams)
    status = Status("0.5.99", (), ("SGLang 0.5.99 is not supported",))
    holds, lines = _report(monkeypatch, status, UNLISTED, verbose=False)
    assert not holds
    assert lines[0].startswith("SGLang 0.5.99: 1 of the 2 functions")
    assert lines[1] == "  FAILS  sglang.srt.managers.utils.gone"
    assert "problem: SGLang 0.5.99 is not supported" in lines


def test_an_environment_that_rules_sets_out_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    holds, lines = _report(
        monkeypatch, Status("0.5.23", (SeamCheck(CHANGED.seam),), ()), RELEASES["0.5.23"], verbose=False
    )
    assert not holds
    assert any(line.startswith("problem: SGLANG_RUST_SERVER") for line in lines)
