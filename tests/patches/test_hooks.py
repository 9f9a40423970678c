"""A hook is described by its decorators, its signature, and its docstring."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from typing import Any

import pytest

import sglang_topp_patches
from sglang_topp_patches.hooks import Hook, Seam, after, around, before, hooks_of, seams_of
from sglang_topp_patches.plugin import all_seams, new_states
from sglang_topp_patches.releases import RELEASES, UNLISTED, Feature

HOOKS = [seam for seam in all_seams() if isinstance(seam, Hook)]
RUN = "sglang.srt.managers.scheduler.Scheduler.run"


@after(RUN, since="0.5.15.post1", until="0.5.19", always=True)
@after(f"{RUN}_now", f"{RUN}_later")
def note(result: int, self: Any, batch: Any, *args: Any, reason: str, **kwargs: Any) -> None:
    """Note that a batch ran.

    More words.
    """


@around("sglang.srt.utils.common.run", state=int)
def count(state: int, original: Any, batch: Any, size: int = 1) -> None: ...


class Owner:
    @before(f"{RUN}_once")
    def choose(self, scheduler: Any, batch: Any) -> None: ...


def test_a_hook_describes_itself() -> None:
    assert list(hooks_of([sys.modules[__name__]])) == [
        *(
            Hook(
                target,
                "Note that a batch ran.",
                ("batch",),
                ("reason",),
                *bounds,
                kind="AFTER",
                function=note,
                always=bool(bounds),
                state=None,
            )
            for target, bounds in (
                (RUN, ("0.5.15.post1", "0.5.19")),
                (f"{RUN}_now", ()),
                (f"{RUN}_later", ()),
            )
        ),
        Hook(
            "sglang.srt.utils.common.run",
            "",
            ("batch", "size"),
            kind="AROUND",
            function=count,
            always=False,
            state=int,
        ),
        Hook(
            f"{RUN}_once",
            "",
            ("batch",),
            kind="BEFORE",
            function=Owner.choose,
            always=False,
            state=Owner,
        ),
    ]


@pytest.mark.parametrize(
    ("since", "until", "inside", "outside"),
    [
        ("", "", ("0.5.12", "0.5.99"), ()),
        ("0.5.13", "", ("0.5.13", "0.5.13.post1", "0.5.24.dev3"), ("0.5.12.post1", "0.5.9")),
        ("", "0.5.15.post1", ("0.5.15", "0.5.9"), ("0.5.15.post1", "0.5.16")),
        ("0.5.15", "0.5.16", ("0.5.15", "0.5.15.post1"), ("0.5.14", "0.5.16")),
    ],
)
def test_the_releases_of_a_hook(
    since: str, until: str, inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    seam = Seam(RUN, "", since=since, until=until)
    assert all(seam.is_in(release) for release in inside)
    assert not any(seam.is_in(release) for release in outside)


def test_the_plugin_lists_every_module() -> None:
    package = sglang_topp_patches
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [importlib.import_module(each.name) for each in found]
    assert Counter(map(repr, seams_of(modules))) == Counter(map(repr, all_seams()))


def test_every_hook_says_its_purpose_and_its_state_exists() -> None:
    states = new_states()
    assert len(HOOKS) > 60
    for seam in all_seams():
        assert seam.purpose.endswith("."), seam.target
    assert {hook.state for hook in HOOKS} - {None} <= states.keys()
    assert all(type(state) is cls for cls, state in states.items())


@pytest.mark.parametrize("name", RELEASES)
def test_no_hook_stands_twice_at_a_function(name: str) -> None:
    standing = Counter((hook.target, hook.function) for hook in HOOKS if hook.is_in(name))
    assert max(standing.values()) == 1


@pytest.mark.parametrize("name", RELEASES)
def test_what_is_refused_has_a_reason(name: str) -> None:
    refused = RELEASES[name].refused
    assert set(refused) <= set(Feature)
    assert all(refused.values())


def test_a_release_that_is_not_listed_refuses_every_feature() -> None:
    assert set(UNLISTED.refused) == set(Feature)
