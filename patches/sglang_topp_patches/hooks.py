"""Decorators for the functions of this package that hook SGLang, and the check of what they depend on.

A decorator says which function of SGLang a hook wraps, how, and in which releases::

    @around("sglang.srt.layers.sampler.Sampler._sample_from_probs", since="0.5.20")
    def sample_from_probs(original, self, probs, sampling_info, *args, **kwargs):
        \"""Record the filtered probabilities of a sampler call.\"""

Everything else is read off the hook. Its docstring's first line is its purpose, and its own parameters are
those that SGLang's function must have. SGLang calls a hook as follows, `*args` and `**kwargs` being the
arguments of its own function:

| decorator | call | a result other than None |
|---|---|---|
| `before` | `hook(*args, **kwargs)` | replaces `(args, kwargs)` |
| `after` | `hook(result, *args, **kwargs)` | replaces `result` |
| `around` | `hook(original, *args, **kwargs)` | is the result |

A hook that shares state with others of its process names the class of that state: with `state=HttpProcess`,
`plugin.register` passes the process's one `HttpProcess` as a further first argument. A hook that is a method
is bound to the process's one object of its class.

SGLang's functions that are called, but not hooked, are in the list `CALLED` of the module that calls them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter
from itertools import accumulate
from types import ModuleType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_DECLARED = "_sglang_topp_hooks"


@dataclass(frozen=True)
class Seam:
    """A function or class of SGLang that this package depends on.

    Attributes:
        target: the dotted path, `module.function`, `module.Class`, or `module.Class.method`.
        purpose: what it is hooked or called for.
        positional: the parameters with which its signature must begin, without `self` and `cls`.
        keywords: further parameters that its signature must have.
        since: the first SGLang release that has it; "" if the oldest supported release does.
        until: the first release that has it no more; "" if the newest has it.
    """

    target: str
    purpose: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    since: str = ""
    until: str = ""

    def is_in(self, release: str) -> bool:
        """Return whether this package depends on the function in an SGLang release."""
        at = release_key(release)
        return release_key(self.since) <= at and (not self.until or at < release_key(self.until))

    def problem(self) -> str:
        """Return how the installed SGLang's function differs from what this package expects, or ""."""
        try:
            target = pkgutil.resolve_name(self.target)
        except Exception as error:  # importing a module of SGLang may raise any error
            cause = _import_error(self.target) or error
            return f"not found ({type(cause).__name__}: {cause})"
        try:
            names = tuple(inspect.signature(target).parameters)
        except (TypeError, ValueError) as error:
            return f"has no signature to check ({error})"
        return self.difference(names)

    def difference(self, names: tuple[str, ...]) -> str:
        """Return how a function with these parameters differs from what this package expects, or ""."""
        given = names[1:] if names[:1] == ("self",) else names
        missing = [name for name in (*self.positional, *self.keywords) if name not in given]
        if missing:
            return f"takes ({', '.join(names)}), expected {', '.join(missing)} among them"
        if given[: len(self.positional)] != self.positional:
            return f"takes ({', '.join(names)}), expected {', '.join(self.positional)} first"
        return ""


@dataclass(frozen=True)
class Hook(Seam):
    """A function of SGLang, and the function of this package that hooks it.

    Attributes:
        kind: BEFORE, AFTER, or AROUND, as in SGLang's `HookType`.
        function: the hook.
        always: whether it also runs where candidate sets are refused, because it refuses or reports.
        state: the class of the object that it gets as its first argument; None if it gets none.
    """

    kind: str = field(kw_only=True)
    function: Callable[..., Any] = field(kw_only=True)
    always: bool = field(kw_only=True, default=False)
    state: type[Any] | None = field(kw_only=True, default=None)


def _declare(kind: str, *targets: str, **options: Any) -> Callable[[_F], _F]:
    """Return a decorator that declares a hook on each target.

    The options are attributes of `Hook`: `since`, `until`, `always`, and `state`.
    """

    def hook(target: str, function: _F) -> Hook:
        is_bound = "state" in options or "." in function.__qualname__.rpartition("<locals>.")[2]
        is_method = target.split(".")[-2][0].isupper()
        # Drop the parameters that SGLang's function does not have: the state, the original function or its
        # result, and the object or class whose method is hooked.
        own = [*inspect.signature(function).parameters.values()][is_bound + (kind != "BEFORE") + is_method :]
        return Hook(
            target,
            (inspect.getdoc(function) or "").partition("\n")[0],
            tuple(each.name for each in own if each.kind is Parameter.POSITIONAL_OR_KEYWORD),
            tuple(each.name for each in own if each.kind is Parameter.KEYWORD_ONLY),
            kind=kind,
            function=function,
            **options,
        )

    def decorate(function: _F) -> _F:
        # Python applies the lowest decorator first.
        declared = (*(hook(target, function) for target in targets), *getattr(function, _DECLARED, ()))
        setattr(function, _DECLARED, declared)
        return function

    return decorate


before = partial(_declare, "BEFORE")
after = partial(_declare, "AFTER")
around = partial(_declare, "AROUND")


def hooks_of(modules: Iterable[ModuleType]) -> Iterator[Hook]:
    """Yield the hooks that modules define, in the order of the modules and of their code."""
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", "") != module.__name__:
                continue
            methods = vars(value).values() if isinstance(value, type) else ()
            for function, of_class in ((value, None), *((method, value) for method in methods)):
                for hook in getattr(function, _DECLARED, ()):
                    yield replace(hook, state=of_class) if of_class else hook


def seams_of(modules: Iterable[ModuleType]) -> Iterator[Seam]:
    """Yield the hooks that modules define, and what they call unhooked."""
    for module in modules:
        yield from hooks_of((module,))
        yield from getattr(module, "CALLED", ())


def release_key(release: str) -> tuple[int, ...]:
    """Return a sort key for release numbers, such as (0, 5, 15, 1) for 0.5.15.post1."""
    return tuple(map(int, re.findall(r"\d+", release)))


def _import_error(target: str) -> ImportError | None:
    """Return the ImportError that a module in the dotted path `target` raises during its import, or None.

    If a dependency of a module is missing, the module raises an ImportError. `pkgutil.resolve_name` ignores
    this ImportError, and raises an AttributeError about the module's parent instead.
    """
    for name in accumulate(target.split("."), "{}.{}".format):
        try:
            importlib.import_module(name)
        except ImportError as error:
            is_no_module = isinstance(error, ModuleNotFoundError) and error.name == name
            return None if is_no_module else error
    return None
