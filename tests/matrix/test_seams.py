"""The seam check finds missing and changed functions in a release's source."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sglang_topp_patches.hooks import Seam
from sglang_topp_patches.releases import RELEASES
from tests.matrix import releases, seams
from tests.matrix.find_definitions import PackageSource

NEWEST = next(iter(RELEASES))


@pytest.fixture(scope="module")
def source() -> PackageSource:
    """The source of the installed SGLang."""
    return PackageSource.installed()


def test_installed_release_has_all_seams_and_imports(source: PackageSource) -> None:
    assert seams.find_seam_problems(source, NEWEST) == []
    imported = {*seams.module_imports(), *seams.hook_imports(NEWEST)}
    assert "sglang.srt.platforms.interface.SRTPlatform" in imported
    assert "sglang.srt.runtime_context.get_serving" in imported
    assert all(source.has(name) for name in imported)


@pytest.mark.parametrize(
    ("version", "has_context"), [("0.5.20", True), ("0.5.16", True), ("0.5.15", False), ("0.5.12", False)]
)
def test_imports_in_inherited_methods_are_found(version: str, has_context: bool) -> None:
    """0.5.13 overrides a method of the newest release's adapter, and 0.5.12 inherits that."""
    imported = {*seams.hook_imports(version)}
    assert ("sglang.srt.runtime_context.get_parallel" in imported) == has_context
    assert ("sglang.srt.layers.dp_attention.get_attention_tp_rank" in imported) != has_context


def test_changed_moved_and_missing_seams_are_named(source: PackageSource) -> None:
    wrong = (
        Seam("sglang.srt.plugins.load_plugins_by_group", "", ("group", "renamed")),
        Seam("sglang.srt.plugins.Req.reset_for_retract", ""),
        Seam("sglang.srt.plugins.no_such_function", ""),
        Seam("sglang.srt.plugins.not_there_yet", "", since="0.6"),
    )
    changed, moved, gone = seams.find_seam_problems(source, NEWEST, wrong)
    assert changed.startswith("sglang.srt.plugins.load_plugins_by_group: takes (group, excluded_dists)")
    assert moved == (
        "sglang.srt.plugins.Req.reset_for_retract: sglang.srt.plugins has no Req; that name is at"
        " sglang.srt.managers.schedule_batch.Req.reset_for_retract"
    )
    assert gone == "sglang.srt.plugins.no_such_function: sglang.srt.plugins has no no_such_function"
    assert seams.find_seam_problems(source, "0.4.0") == ["the plugin does not list SGLang 0.4.0"]


def test_package_that_differs_from_its_pin_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    release = releases.RELEASES[NEWEST]
    lock = release.lock.read_text()
    monkeypatch.setattr(releases, "FOLDER", tmp_path)
    release.lock.write_text(re.sub(r"(?<=--hash=sha256:)\w{8}", "0" * 8, lock))
    with pytest.raises(subprocess.CalledProcessError):
        seams.find_problems(release)
    assert "Hash mismatch" in capfd.readouterr().err
    release.lock.write_text("torch==2.14.1\n")
    with pytest.raises(ValueError, match="the lock does not pin sglang"):
        seams.find_problems(release)
