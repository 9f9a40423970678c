"""Names and signatures read from source equal those that Python imports."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

from sglang_topp_patches.plugin import all_seams
from tests.matrix.find_definitions import PackageSource

PACKAGE = {
    "__init__.py": "from pkg.inner import moved as here\nfrom .plain import Base\nimport json\n",
    # Some of SGLang's files begin with a byte order mark.
    "inner/__init__.py": "\ufefffrom .deep import moved\n"
    "from ..plain import outer as renamed\nalias = renamed\n",
    "inner/deep.py": """
try:
    import no_such_module
except ImportError:
    async def moved(first, /, second, *rest, third=1, **others): ...
limit = 3
""",
    "plain.py": """
from dataclasses import dataclass, field
from typing import ClassVar
import elsewhere
from elsewhere import Foreign
if True:
    def outer(value): ...
class Base(Foreign):
    def method(self, one): ...
    @classmethod
    def made(cls, two): ...
    @staticmethod
    def free(three): ...
    class Nested:
        def method(self): ...
class Child(Base):
    method_of_child = Base.method
    def __init__(self, four, *, five=None): ...
class Grandchild(Child): ...
@dataclass(kw_only=True)
class Options:
    level: int = 0
@dataclass
class Request(Options):
    shared: ClassVar[int] = 1
    text: str
    made: int = field(default=0, init=False)
    rid: str = field(default="", kw_only=True)
    ids: list = field(default_factory=list)
class Nothing: ...
""",
}


@pytest.fixture
def source(tmp_path: Path) -> PackageSource:
    for name, text in PACKAGE.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return PackageSource(tmp_path, "pkg")


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("pkg.here", ("first", "second", "rest", "third", "others")),
        ("pkg.inner.moved", ("first", "second", "rest", "third", "others")),
        ("pkg.inner.alias", ("value",)),
        ("pkg.plain.outer", ("value",)),
        ("pkg.Base.method", ("self", "one")),
        ("pkg.plain.Grandchild.method", ("self", "one")),
        ("pkg.plain.Grandchild", ("four", "five")),
        ("pkg.plain.Child.made", ("two",)),
        ("pkg.plain.Child.free", ("three",)),
        ("pkg.plain.Base.Nested.method", ("self",)),
        ("pkg.plain.Request", ("text", "ids", "level", "rid")),
    ],
)
def test_parameters(source: PackageSource, target: str, parameters: tuple[str, ...]) -> None:
    assert source.parameters(target) == parameters
    assert source.has(target)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("other.function", "there is no module other"),
        ("pkg.no_such", "pkg has no no_such"),
        ("pkg.plain.no_such.method", "pkg.plain has no no_such"),
        ("pkg.plain.Base.no_such", "pkg.plain.Base has no no_such"),
        ("pkg.plain.outer.inner", "pkg.plain.outer has no inner"),
        ("pkg.inner.deep.limit", "is neither a function nor a class"),
        ("pkg.plain.Foreign", "is neither a function nor a class"),
        ("pkg.plain", "is neither a function nor a class"),
        ("pkg.plain.Nothing", "shows neither a constructor nor fields"),
    ],
)
def test_what_is_not_there_is_told(source: PackageSource, target: str, words: str) -> None:
    with pytest.raises(LookupError, match=words):
        source.parameters(target)


def test_modules_and_values_are_there_too(source: PackageSource) -> None:
    assert source.has("pkg.inner.deep")
    assert source.has("pkg.inner.deep.limit")
    assert source.has("pkg.json")
    assert not source.has("pkg.inner.shallow")


def test_where_else_a_name_is_defined(source: PackageSource) -> None:
    assert source.elsewhere("pkg.old.moved") == ("pkg.inner.deep.moved",)
    assert source.elsewhere("pkg.plain.Base.method") == ("pkg.plain.Base.Nested.method",)
    assert source.elsewhere("pkg.old.unheard_of") == ()


def test_one_that_is_not_installed_is_named() -> None:
    with pytest.raises(LookupError, match="no_such_package is not installed"):
        PackageSource.installed("no_such_package")


def test_every_seam_reads_as_python_has_it() -> None:
    """Compare the installed SGLang, once imported and once read."""
    source = PackageSource.installed()
    seams = [seam for seam in all_seams() if seam.is_in(version("sglang"))]
    assert len(seams) > 30
    for seam in seams:
        if not seam.target.startswith("sglang."):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang's own warning on a machine without an accelerator
            found = inspect.signature(pkgutil.resolve_name(seam.target))
        assert source.parameters(seam.target) == tuple(found.parameters), seam.target
