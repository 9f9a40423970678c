"""What a release's source lacks is found without installing it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_topp_patches.package_source import PackageSource
from sglang_topp_patches.releases import RELEASES
from sglang_topp_patches.seam_groups import Seam
from tests.matrix import releases, seams

NEWEST = next(iter(RELEASES))


@pytest.fixture(scope="module")
def source() -> PackageSource:
    """Of the installed SGLang."""
    return PackageSource.installed()


def test_the_installed_release_has_all_of_it(source: PackageSource) -> None:
    assert seams.seam_problems(source, NEWEST) == []
    imported = {*seams.top_imports(), *seams.hook_imports(NEWEST)}
    assert "sglang.srt.platforms.interface.SRTPlatform" in imported
    assert any("auxiliary_output" in name for name in imported)
    assert all(source.has(name) for name in imported)


@pytest.mark.parametrize(
    ("version", "unpickles", "has_context"),
    [("0.5.20", True, True), ("0.5.15", True, True), ("0.5.14", False, True), ("0.5.13", False, False)],
)
def test_what_a_method_reaches_is_looked_at(version: str, unpickles: bool, has_context: bool) -> None:
    """0.5.20 and 0.5.15 import that by a method of a method, in a class before theirs; 0.5.14 replaces it."""
    imported = {*seams.hook_imports(version)}
    assert ("sglang.srt.managers.io_struct.unwrap_from_pickle" in imported) == unpickles
    assert ("sglang.srt.runtime_context.get_parallel" in imported) == has_context
    assert ("sglang.srt.layers.dp_attention.get_attention_tp_rank" in imported) != has_context


def test_what_it_lacks_is_named(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (
        Seam("sglang.srt.plugins.load_plugins_by_group", ("group", "renamed"), ""),
        Seam("sglang.srt.plugins.no_such_function", (), ""),
    )
    release = replace(RELEASES[NEWEST], seams=wrong)
    monkeypatch.setattr(seams, "RELEASES", {NEWEST: release})
    changed, gone = seams.seam_problems(source, NEWEST)
    assert changed.startswith("sglang.srt.plugins.load_plugins_by_group: takes (group, excluded_dists)")
    assert gone == "sglang.srt.plugins.no_such_function: sglang.srt.plugins has no no_such_function"
    assert seams.seam_problems(source, "0.4.0") == ["the patch set does not list SGLang 0.4.0"]


def test_another_package_than_the_one_that_was_pinned_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    release = releases.RELEASES[NEWEST]
    lock = release.lock.read_text()
    monkeypatch.setattr(releases, "FOLDER", tmp_path)
    release.lock.write_text(re.sub(r"(?<=--hash=sha256:)\w{8}", "0" * 8, lock))
    with pytest.raises(subprocess.CalledProcessError):
        seams.problems(release)
    assert "Hash mismatch" in capfd.readouterr().err
    release.lock.write_text("torch==2.14.1\n")
    with pytest.raises(ValueError, match="the lock does not pin sglang"):
        seams.problems(release)
