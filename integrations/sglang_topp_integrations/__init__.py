"""Adapters for training frameworks, one module each.

An adapter scores the policy over the candidate sets that SGLang returned for a rollout (replay). Import the
module of your framework.
"""

from typing import Any

from sglang_topp.errors import InvalidInputError, describe

__all__ = ["check_options", "check_release"]


def check_options(*options: tuple[str, Any, tuple[Any, ...], str]) -> None:
    """Raise InvalidInputError for an option `(name, value, accepted, reason)` whose value is not accepted."""
    for name, value, accepted, reason in options:
        if value not in accepted:
            raise InvalidInputError(f"{name}: got {describe(value)}, expected {accepted[0]}: {reason}")


def check_release(framework: str, release: str, supported: tuple[str, ...]) -> None:
    """Raise InvalidInputError unless the tests cover this release of the framework."""
    if release not in supported:
        raise InvalidInputError(
            f"{framework}: got release {release}, expected {' or '.join(supported)}; the adapter wraps"
            " internal functions, which change between releases"
        )
