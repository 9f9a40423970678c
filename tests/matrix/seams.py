"""Every seam of a release, looked at in its source: SGLang's package is unpacked, and nothing is started."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import sglang_topp_patches
from sglang_topp_patches.internals.interface import Internals
from sglang_topp_patches.package_source import PackageSource
from sglang_topp_patches.releases import RELEASES, Feature
from sglang_topp_patches.seams import difference
from tests.matrix.environment import UV
from tests.matrix.releases import Release

__all__ = ["hook_imports", "problems", "seam_problems", "top_imports"]

# Which of `Internals` is asked for a feature alone: where that is refused, nobody calls it.
_ASKED_FOR = {"sampling": Feature.SAMPLER_SOURCE, "weight_version": Feature.WEIGHT_VERSIONS}


def problems(release: Release) -> list[str]:
    """What of the patch set does not fit the release's package, in words; nothing where all does.

    Raises:
        subprocess.CalledProcessError: the package could not be had, or is not the one that was pinned.
    """
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder) / "sglang.txt"
        requirement.write_text(_pinned(release.lock.read_text(), "sglang"))
        into = Path(folder) / "packages"
        command = [UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", into]
        # An environment of this Python takes what an image with another one would.
        subprocess.run([*command, "--requirements", requirement], check=True)
        source = PackageSource(into)
        found = seam_problems(source, release.version)
        imported = {*top_imports(), *hook_imports(release.version)}
        missing = [name for name in sorted(imported) if not source.has(name)]
    return found + [f"{name}: is imported there, and does not exist" for name in missing]


def seam_problems(source: PackageSource, version: str) -> list[str]:
    """The seams of a listed release that its source does not have, or that take something else."""
    if version not in RELEASES:
        return [f"the patch set does not list SGLang {version}"]
    found = []
    for seam in RELEASES[version].seams:
        try:
            differs = difference(seam, source.parameters(seam.target))
        except LookupError as error:
            differs = str(error)
        if differs:
            found.append(f"{seam.target}: {differs}")
    return found


def top_imports() -> Iterator[str]:
    """The names of SGLang's that modules of the patch set import when they are imported themselves."""
    (folder,) = sglang_topp_patches.__path__
    for path in sorted(Path(folder).rglob("*.py")):
        yield from _imports(ast.parse(path.read_text()).body)


def hook_imports(version: str) -> Iterator[str]:
    """The names of SGLang's that a listed release's hooks, and its internals, import when they are called."""
    release = RELEASES.get(version)
    if release is None:
        return
    called = [name for name in dir(Internals) if _ASKED_FOR.get(name) not in release.refused]
    trees = [*_methods(type(release.internals), called)]
    for seam in release.seams:
        trees += [_tree(pkgutil.resolve_name(f"sglang_topp_patches.{hook.function}")) for hook in seam.hooks]
    for tree in trees:
        yield from _imports(ast.walk(tree))


def _methods(cls: type, names: Iterable[str]) -> Iterator[ast.AST]:
    """The methods of these names, and those that they reach by `self` and by `super()`."""
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


def _pinned(lock: str, package: str) -> str:
    """The lines of one package: its version and its hashes."""
    found = re.search(rf"^{re.escape(package)}==(?:.*\\\n)*.*$", lock, re.MULTILINE)
    if found is None:
        raise ValueError(f"the lock does not pin {package}")
    return found[0] + "\n"
