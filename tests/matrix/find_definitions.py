"""Find a package's functions, classes, and signatures in its source code, without importing the package.

It checks SGLang releases that are not installed, and finds the new place of a function that moved.

The package griffe 2.4.1 cannot replace this module. In a test with SGLang 0.5.23, griffe loaded the package
`sglang`, and found none of the names that the plugin uses. All these names are in the folder `sglang/srt`.
This folder has no `__init__.py`, so griffe does not treat the folder as a part of the package `sglang`.
griffe can load `sglang/srt` as a package of its own. But this load took 30 s of CPU time, and griffe did not
resolve SGLang's own imports from `sglang.srt`. This module finds the same names in 1.3 s.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PackageSource"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Found = tuple[str, ast.AST]
"""The module in which a name is defined, and the syntax node of the definition."""


class PackageSource:
    """The source code of one Python package. The source code of other packages is not read.

    Args:
        root: the folder that contains the package's own folder.
        name: the package's name.
    """

    def __init__(self, root: Path, name: str = "sglang") -> None:
        self._root = root
        self._name = name

    @classmethod
    def installed(cls, name: str = "sglang") -> PackageSource:
        """Return the `PackageSource` of an installed package.

        Raises:
            LookupError: the package is not installed.
        """
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise LookupError(f"{name} is not installed")
        return cls(Path(spec.submodule_search_locations[0]).parent, name)

    def parameters(self, target: str) -> tuple[str, ...]:
        """Return the parameter names of `module.function`, `module.Class`, or `module.Class.method`.

        The parameters have the same names and order as in `inspect.signature`. `self` is included, but the
        class argument of a classmethod is not. For a class, the result is the constructor's parameters, or
        the fields of a dataclass or struct.

        Raises:
            LookupError: `target` does not exist, is neither a function nor a class, or is a class with
                neither a constructor nor fields. The error message names the part of `target` that does not
                exist.
        """
        module, node = self._resolve(target)
        if isinstance(node, ast.ClassDef):
            return self._of_class(module, node)
        if isinstance(node, _Function):
            return _of_function(node)
        raise LookupError(f"{target} is neither a function nor a class")

    def has(self, target: str) -> bool:
        """Return whether `target`, a module or a name in a module, exists."""
        try:
            self._resolve(target)
        except LookupError:
            return False
        return True

    def elsewhere(self, target: str) -> tuple[str, ...]:
        """Return the dotted paths of all other definitions with the name of `target`, sorted by file.

        The name of `target` is the part after the last dot. The search covers functions and classes at a
        module's top level and within a class.
        """
        name = target.rpartition(".")[2]
        found = []
        for path in sorted((self._root / self._name).rglob("*.py")):
            text = path.read_text(encoding="utf-8-sig", errors="replace")
            if f"def {name}(" not in text and f"class {name}" not in text:
                continue
            module = ".".join(path.relative_to(self._root).with_suffix("").parts).removesuffix(".__init__")
            for where, node in _definitions(ast.parse(text)):
                if where.rpartition(".")[2] == name and isinstance(node, _Function | ast.ClassDef):
                    found.append(f"{module}.{where}")
        return tuple(each for each in found if each != target)

    def _resolve(self, target: str) -> _Found:
        parts = target.split(".")
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if self._path(module) is not None:
                return self._within(module, parts[count:])
        raise LookupError(f"there is no module {parts[0]}")

    def _within(self, module: str, names: list[str]) -> _Found:
        node: ast.AST = self._tree(module)
        where = module
        for name in names:
            if isinstance(node, ast.Module):
                module, node = self._in_module(module, name)
            elif isinstance(node, ast.ClassDef):
                module, node = self._in_class(module, node, name)
            else:
                raise LookupError(f"{where} has no {name}")
            where = f"{where}.{name}"
        return module, node

    def _in_module(self, module: str, name: str) -> _Found:
        if self._path(f"{module}.{name}") is not None:
            return f"{module}.{name}", self._tree(f"{module}.{name}")
        if (found := self._names(module).get(name)) is None:
            raise LookupError(f"{module} has no {name}")
        if isinstance(found, ast.ImportFrom):
            (original,) = (each.name for each in found.names if (each.asname or each.name) == name)
            source = self._imported_from(module, found)
            if source.partition(".")[0] != self._name:
                return module, found
            return self._in_module(source, original)
        if isinstance(found, ast.Assign) and isinstance(found.value, ast.Name) and found.value.id != name:
            return self._in_module(module, found.value.id)
        return module, found

    def _in_class(self, module: str, node: ast.ClassDef, name: str) -> _Found:
        for home, each in self._lineage(module, node):
            for where, found in _definitions(each):
                if where == name:
                    return home, found
        raise LookupError(f"{module}.{node.name} has no {name}")

    def _lineage(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield the class and its base classes, except base classes from other packages."""
        yield module, node
        for base in node.bases:
            try:
                home, found = self._within(module, ast.unparse(base).split("."))
            except LookupError:
                continue
            if isinstance(found, ast.ClassDef):
                yield from self._lineage(home, found)

    def _of_class(self, module: str, node: ast.ClassDef) -> tuple[str, ...]:
        lineage = list(self._lineage(module, node))
        for _, each in lineage:
            for where, found in _definitions(each):
                if where == "__init__" and isinstance(found, _Function):
                    return _of_function(found)[1:]
        fields: dict[str, bool] = {}
        for _, each in reversed(lineage):
            by_keyword = _says(each, "kw_only")
            for statement in each.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if "ClassVar" in ast.unparse(statement.annotation):
                        continue
                    value = "" if statement.value is None else ast.unparse(statement.value)
                    if value.startswith("field(") and "init=False" in value:
                        continue
                    alone = value.startswith("field(") and "kw_only=True" in value
                    fields.setdefault(statement.target.id, by_keyword or alone)
        if not fields:
            raise LookupError(f"{module}.{node.name} shows neither a constructor nor fields")
        # Move keyword-only fields to the end, as `inspect.signature` does. `sorted` is stable, so all other
        # fields stay in order.
        return tuple(sorted(fields, key=fields.__getitem__))

    def _imported_from(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        path = self._path(module)
        package = module.split(".")
        drop = statement.level - (1 if path is not None and path.name == "__init__.py" else 0)
        base = package[: len(package) - drop]
        return ".".join([*base, *([statement.module] if statement.module else [])])

    @functools.cache  # noqa: B019  # few PackageSource objects exist, each read many times
    def _names(self, module: str) -> dict[str, ast.AST]:
        return dict(_definitions(self._tree(module), nested=False))

    @functools.cache  # noqa: B019  # few PackageSource objects exist, each read many times
    def _tree(self, module: str) -> ast.Module:
        path = self._path(module)
        if path is None:
            raise LookupError(f"there is no module {module}")
        # A folder without an __init__.py is a package too.
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else ""
        return ast.parse(text)

    def _path(self, module: str) -> Path | None:
        folder = self._root.joinpath(*module.split("."))
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path.is_file():
                return path
        return folder if folder.is_dir() else None


def _definitions(tree: ast.AST, *, nested: bool = True) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that a module or class defines, with the syntax node of the definition.

    A definition may also be in an `if`, `try`, or `with` statement. If `nested` is True, names of the form
    `Class.name` are included.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function | ast.ClassDef):
            yield node.name, node
            if nested and isinstance(node, ast.ClassDef):
                for where, inner in _definitions(node):
                    yield f"{node.name}.{where}", inner
        elif isinstance(node, ast.ImportFrom):
            yield from ((each.asname or each.name, node) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.asname or each.name.partition(".")[0], node) for each in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((each.id, node) for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _definitions(node, nested=nested)


def _of_function(node: _Function) -> tuple[str, ...]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args]
    if any(isinstance(each, ast.Name) and each.id == "classmethod" for each in node.decorator_list):
        named = named[1:]
    if arguments.vararg:
        named.append(arguments.vararg)
    named += arguments.kwonlyargs
    if arguments.kwarg:
        named.append(arguments.kwarg)
    return tuple(each.arg for each in named)


def _says(node: ast.ClassDef, name: str) -> bool:
    """Return whether a class statement or a class decorator sets the keyword argument `name` to True."""
    words = [*node.keywords]
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            words += decorator.keywords
    return any(
        word.arg == name and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in words
    )
