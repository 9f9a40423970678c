"""A function of SGLang that moved or changed is found at start, and then no set is served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang.srt.plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_topp_patches import capabilities, plugin, releases
from sglang_topp_patches.capabilities import check_seams, status
from sglang_topp_patches.hooks import Hook, Seam
from sglang_topp_patches.plugin import all_seams
from sglang_topp_patches.releases import RELEASES, UNLISTED, installed

# SGLang warns if it is imported without an accelerator.
pytestmark = pytest.mark.filterwarnings("ignore")

HOOKS = [seam for seam in all_seams() if isinstance(seam, Hook)]
BY_GROUP = "sglang.srt.plugins.load_plugins_by_group"
BROKEN = [
    (Seam("sglang.srt.no_such_module.function", ""), "not found"),
    (Seam("sglang.srt.managers.utils.no_such_function", ""), "not found"),
    (Seam(BY_GROUP, "", ("renamed",)), "expected renamed among them"),
    (Seam(BY_GROUP, "", keywords=("renamed",)), "expected renamed among them"),
    (Seam(BY_GROUP, "", ("excluded_dists", "group")), "expected excluded_dists, group first"),
    # The hook would take `group` for `excluded_dists`.
    (Seam(BY_GROUP, "", ("excluded_dists",)), "expected excluded_dists first"),
]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[object]]]:
    """Return SGLang's registered hooks, by target. SGLang installs none of them."""
    hooks: dict[str, list[object]] = defaultdict(list)
    monkeypatch.setattr(HookRegistry, "_hooks", hooks)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(capabilities, "_found", None)
    status.cache_clear()
    yield hooks
    status.cache_clear()


@pytest.mark.parametrize(("seam", "problem"), BROKEN)
def test_a_changed_function_is_a_problem(seam: Seam, problem: str) -> None:
    found = check_seams([seam])
    assert not found.active
    assert problem in found.problems[0]
    assert seam.target in found.problems[0]
    assert found.to_dict()["seams"] == {seam.target: found.checks[0].problem}


def test_one_of_several_hooks_that_does_not_fit_shows() -> None:
    for seams in ((BROKEN[2][0], Seam(BY_GROUP, "")), (Seam(BY_GROUP, ""), BROKEN[2][0])):
        assert "expected renamed" in check_seams(seams).to_dict()["seams"][BY_GROUP]


def test_other_releases_are_not_checked() -> None:
    assert check_seams([Seam("sglang.gone", "", until="0.5.12"), Seam("sglang.new", "", since="0.6")]).active


@pytest.mark.parametrize("seam", [seam for seam, _ in BROKEN])
def test_with_a_problem_only_hooks_that_refuse_and_report_run(
    registered: dict[str, list[object]], seam: Seam
) -> None:
    plugin._register([*all_seams(), seam])
    name = installed()[0]
    refusing = [hook.target for hook in HOOKS if hook.always and hook.is_in(name)]
    assert sorted(registered) == sorted(set(refusing))
    assert sum(map(len, registered.values())) == len(refusing)
    assert seam.target in status().problems[0]


def test_without_a_problem_all_hooks_of_the_release_run(registered: dict[str, list[object]]) -> None:
    plugin._register(all_seams())
    name = installed()[0]
    assert sum(map(len, registered.values())) == sum(hook.is_in(name) for hook in HOOKS)
    HookRegistry._patched |= registered.keys()
    assert status().problems == ()


def test_on_an_unlisted_release_every_hook_that_refuses_is_tried(
    registered: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (releases, capabilities):
        monkeypatch.setattr(module, "installed", lambda: ("0.0.3", UNLISTED))
    plugin._register(all_seams())
    assert set(registered) == {hook.target for hook in HOOKS if hook.always}
    supported = ", ".join(RELEASES)
    assert status().problems == (f"SGLang 0.0.3 is not supported; supported: {supported}",)


def test_a_hook_that_is_not_in_place_is_a_problem(registered: dict[str, list[object]]) -> None:
    plugin._register(all_seams())
    missing = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
    HookRegistry._patched |= registered.keys() - {missing}
    (problem,) = status().problems
    assert problem.startswith(f"{missing}: its hook is not in place")


def test_a_plugin_that_was_not_loaded_is_a_problem(registered: dict[str, list[object]]) -> None:
    assert not registered
    (problem,) = status().problems
    assert problem.startswith("the plugin was not loaded in this process; do SGLANG_PLUGINS")


def test_a_failed_import_is_reported_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_more").mkdir()
    (tmp_path / "needs_more" / "scheduler.py").write_text("import a_library_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_seams([Seam("needs_more.scheduler.Scheduler.run", "")]).problems == (
        "needs_more.scheduler.Scheduler.run: not found (ModuleNotFoundError: No module named"
        " 'a_library_that_is_missing')",
    )


def test_sglang_does_not_serve_without_hooks_that_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang swallows every other error of a plugin."""
    monkeypatch.setattr(sglang.srt.plugins, "_plugins_loaded", False)
    monkeypatch.setattr(plugin, "all_seams", lambda: 1 / 0)
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "sglang_topp_patches.plugin:app")
    with pytest.raises(SystemExit, match="sglang-topp cannot patch SGLang: ZeroDivisionError: "):
        sglang.srt.plugins.load_plugins()
