"""A seam that moved, or takes other parameters, is found at start."""

from __future__ import annotations

import pkgutil
from collections import Counter
from pathlib import Path

import pytest

from sglang_topp_patches.compat import seam_check
from sglang_topp_patches.compat.releases import RELEASES, UNLISTED, Feature, Release, installed
from sglang_topp_patches.compat.seams import Hook, Seam


def test_every_hook_is_a_function_of_this_package() -> None:
    hooks = {hook for release in RELEASES.values() for seam in release.seams for hook in seam.hooks}
    assert hooks
    for hook in hooks:
        assert callable(pkgutil.resolve_name(f"sglang_topp_patches.{hook.function}"))
        assert hook.kind in ("BEFORE", "AFTER", "AROUND")


@pytest.mark.parametrize("name", [*RELEASES, "unlisted"])
def test_no_hook_stands_twice_at_a_seam(name: str) -> None:
    release = RELEASES.get(name, UNLISTED)
    standing = Counter((seam.target, hook.function) for seam in release.seams for hook in seam.hooks)
    assert max(standing.values()) == 1


@pytest.mark.parametrize("name", RELEASES)
def test_what_is_refused_has_a_reason(name: str) -> None:
    refused = RELEASES[name].refused
    assert set(refused) <= set(Feature)
    assert all(refused.values())


def test_a_release_that_is_not_listed_only_refuses_and_reports() -> None:
    refusing = {hook for seam in UNLISTED.seams for hook in seam.hooks if hook.always}
    for release in RELEASES.values():
        assert {hook for seam in release.seams for hook in seam.hooks if hook.always} <= refusing
    assert set(UNLISTED.refused) == set(Feature)


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (Seam("sglang.srt.no_such_module.function", (), ""), "not found"),
        (Seam("sglang.srt.managers.utils.no_such_function", (), ""), "not found"),
        (Seam("sglang.srt.plugins.load_plugins_by_group", ("renamed",), ""), "expected renamed among them"),
        (
            Seam("sglang.srt.plugins.load_plugins_by_group", ("excluded_dists", "group"), ""),
            "expected the order excluded_dists, group",
        ),
    ],
)
def test_a_seam_that_changed_is_a_problem(monkeypatch: pytest.MonkeyPatch, seam: Seam, problem: str) -> None:
    name, release = installed()
    monkeypatch.setattr(seam_check, "installed", lambda: (name, Release(release.internals, (seam,))))
    found = seam_check.check_seams()
    assert not found.active
    assert problem in found.problems[0]
    assert seam.target in found.problems[0]
    assert found.to_dict()["seams"] == {seam.target: found.checks[0].problem}


def test_a_failed_import_is_reported_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_more").mkdir()
    (tmp_path / "needs_more" / "scheduler.py").write_text("import a_library_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    seam = Seam("needs_more.scheduler.Scheduler.run", ("self",), "")
    name, release = installed()
    monkeypatch.setattr(seam_check, "installed", lambda: (name, Release(release.internals, (seam,))))
    problems = seam_check.check_seams().problems
    assert problems == (
        "needs_more.scheduler.Scheduler.run: not found (ModuleNotFoundError: No module named"
        " 'a_library_that_is_missing')",
    )


@pytest.mark.filterwarnings("ignore")  # SGLang warns if it is imported without an accelerator
def test_a_release_that_is_not_listed_is_compared_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    name, release = installed()
    changed = Seam("sglang.srt.no_such_module.function", (), "", (Hook("AFTER", "rows.note_rows"),))
    other = Release(release.internals, (*release.seams, changed))
    monkeypatch.setattr(seam_check, "RELEASES", {"0.0.1": other, name: release, "0.0.2": other})
    monkeypatch.setattr(seam_check, "installed", lambda: ("0.0.3", UNLISTED))
    found = seam_check.check_seams()
    assert found.problems == (f"SGLang 0.0.3 is not supported; supported: 0.0.1, {name}, 0.0.2",)
    assert seam_check.nearest()[0] == name
    assert [check.problem for check in seam_check.nearest()[1]] == [""] * len(release.seams)
