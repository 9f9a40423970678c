"""Check the seams of a release in the source of its SGLang package, without starting anything."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import sglang_topp_patches
from sglang_topp_patches.hooks import Hook, Seam
from sglang_topp_patches.plugin import all_seams
from sglang_topp_patches.releases import RELEASES, Feature, Internals
from tests.matrix.environment import UV
from tests.matrix.find_definitions import PackageSource
from tests.matrix.releases import Release

__all__ = ["find_problems", "find_seam_problems", "hook_imports", "module_imports"]

# Methods of `Internals` that only one feature calls. A release that refuses the feature never calls them.
_FEATURE_OF_METHOD = {"sampling": Feature.SAMPLER_SOURCE, "weight_version": Feature.WEIGHT_VERSIONS}


def find_problems(release: Release) -> list[str]:
    """Return a sentence for each seam or import of the plugin that does not match the release's package.

    Raises:
        subprocess.CalledProcessError: The package could not be downloaded, or does not match its pinned hash.
    """
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder) / "sglang.txt"
        requirement.write_text(_pinned_lines(release.lock.read_text(), "sglang"))
        into = Path(folder) / "packages"
        command = [UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", into]
        # This Python's package has the same source as the one for the Python that tests the release.
        subprocess.run([*command, "--requirements", requirement], check=True)
        source = PackageSource(into)
        found = find_seam_problems(source, release.version)
        imported = {*module_imports(), *hook_imports(release.version)}
        missing = [name for name in sorted(imported) if not source.has(name)]
    return found + [f"{name}: a hook imports it, and it does not exist" for name in missing]


def find_seam_problems(source: PackageSource, version: str, seams: Iterable[Seam] = all_seams()) -> list[str]:
    """Return a sentence for each seam that is missing in the source or has other parameters.

    Of a missing function, the sentence also names up to three places that define another of its name.
    """
    if version not in RELEASES:
        return [f"the plugin does not list SGLang {version}"]
    found = []
    for seam in seams:
        if not seam.is_in(version) or not seam.target.startswith("sglang."):
            continue
        try:
            differs = seam.difference(source.parameters(seam.target))
        except LookupError as error:
            elsewhere = source.elsewhere(seam.target)[:3]
            differs = f"{error}; that name is at {', '.join(elsewhere)}" if elsewhere else str(error)
        if differs:
            found.append(f"{seam.target}: {differs}")
    return found


def module_imports() -> Iterator[str]:
    """Yield the SGLang names that the plugin's modules import at the top level."""
    (folder,) = sglang_topp_patches.__path__
    for path in sorted(Path(folder).rglob("*.py")):
        yield from _imports(ast.parse(path.read_text()).body)


def hook_imports(version: str) -> Iterator[str]:
    """Yield the SGLang names that the release's hooks and internals import inside functions."""
    release = RELEASES.get(version)
    if release is None:
        return
    called = [name for name in dir(Internals) if _FEATURE_OF_METHOD.get(name) not in release.refused]
    trees = [*_methods(type(release.internals), called)]
    hooks = [seam for seam in all_seams() if isinstance(seam, Hook) and seam.is_in(version)]
    trees += map(_tree, {hook.function for hook in hooks})
    for tree in trees:
        yield from _imports(ast.walk(tree))


def _methods(cls: type, names: Iterable[str]) -> Iterator[ast.AST]:
    """Yield the methods with these names, and the methods that they reach through `self` and `super()`."""
    waiting = [(cls.__mro__, name) for name in names]
    seen = set()
    while waiting:
        order, name = waiting.pop()
        at = next((at for at, each in enumerate(order) if inspect.isfunction(vars(each).get(name))), None)
        if at is None or (order[at], name) in seen:
            continue
        seen.add((order[at], name))
        tree = _tree(vars(order[at])[name])
        yield tree
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                waiting += [(cls.__mro__, node.attr)] if owner == "self" else []
                waiting += [(order[at + 1 :], node.attr)] if owner == "super()" else []


def _tree(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sglang":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] == "sglang")


def _pinned_lines(lock: str, package: str) -> str:
    """Return the lines of a lock file that pin one package: its version and its hashes."""
    found = re.search(rf"^{re.escape(package)}==(?:.*\\\n)*.*$", lock, re.MULTILINE)
    if found is None:
        raise ValueError(f"the lock does not pin {package}")
    return found[0] + "\n"
