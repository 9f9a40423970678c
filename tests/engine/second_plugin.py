"""Another SGLang plugin that hooks the same functions, and has an output of its own.

`install` writes it to a package on a server's PYTHONPATH, so that it loads before or after ours. In each
process of that server, the plugin records which of its hooks were called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["KEY", "install", "register"]

KEY = "second_plugin"
_CALLS = "SECOND_PLUGIN_CALLS"
_METADATA = "Metadata-Version: 2.1\nName: second-plugin\nVersion: 1.0\n"
_ENTRY_POINTS = "[sglang.srt.plugins]\nsecond_plugin = tests.engine.second_plugin:register\n"
# The folder is at the end of the path, so installed packages are found first.
_LAST = "import sys\nsys.path.append({!r})\n"


def install(folder: Path, *, first: bool) -> dict[str, str]:
    """Write the plugin to an empty folder.

    Returns:
        The environment variables with which a server loads the plugin, before or after ours. The plugin
    records its calls in `folder / "calls"`.
    """
    package = folder / "package"
    information = package / "second_plugin-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(_METADATA)
    (information / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "sitecustomize.py").write_text(_LAST.format(str(package)))
    root = Path(__file__).parents[2]
    path = [*([package] if first else [folder]), root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, path)), _CALLS: str(folder / "calls")}


def register() -> None:
    """Register the plugin: a hook of each kind at every function that ours hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tests.skip_missing_features import hooks_here

    ours = any(HookRegistry._hooks.values())
    _note("loaded after ours" if ours else "loaded before ours")
    for target in {hook.target for hook in hooks_here()}:
        for kind, hook in _passing_through(target).items():
            HookRegistry.register(target, hook, HookType[kind])
    try:
        from sglang.srt.managers.auxiliary_output import append_auxiliary_output
    except ImportError:
        return

    def add_output(result: Any, self: Any, logits_output: Any, *rest: Any, **others: Any) -> None:
        current = logits_output.auxiliary_device_output
        logits_output.auxiliary_device_output = append_auxiliary_output(current, _Output())

    target = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
    HookRegistry.register(target, add_output, HookType.AFTER)


class _Output:
    """Return one entry for each token that becomes visible: its id plus one."""

    def copy_to_host(self, copy: Callable[[Any], Any]) -> _Output:
        return self

    def consume(self, batch: Any, commits: Any) -> None:
        for req, commit in zip(batch.reqs, commits, strict=True):
            if commit is not None:
                if req.customized_info is None:
                    req.customized_info = {}
                req.customized_info.setdefault(KEY, []).extend(each + 1 for each in commit.token_ids)


def _passing_through(target: str) -> dict[str, Callable[..., Any]]:
    def before(*args: Any, **kwargs: Any) -> None:
        _note(f"before {target}")

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _note(f"around {target}")
        return original(*args, **kwargs)

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        _note(f"after {target}")

    return {"BEFORE": before, "AROUND": around, "AFTER": after}


_noted: set[str] = set()


def _note(line: str) -> None:
    """Record a call once in each process. Short appended lines do not mix."""
    if line not in _noted:
        _noted.add(line)
        with open(os.environ[_CALLS], "a") as calls:
            calls.write(f"{line}\n")
