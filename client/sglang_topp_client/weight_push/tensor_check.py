"""TensorCheck: compare the names and shapes of a push with the tensors that each engine loads.

SGLang ignores tensors with unknown names, and notices no missing tensor. A shape that does not fit can end
its scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_topp.errors import InvalidInputError, WireError, describe

__all__ = ["CheckpointTensors", "TensorCheck"]


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint.

    Attributes:
        shapes: the shape of each tensor, by name.
        optional: the names of the tensors that the engine's model does not load, such as a tied LM head.
    """

    shapes: Mapping[str, Sequence[int]]
    optional: frozenset[str]

    @classmethod
    def from_json(cls, answer: Any) -> CheckpointTensors:
        """Read the answer of an engine.

        Raises:
            WireError: a key is missing, or has the wrong type.
        """
        for key, kind in (("tensors", dict), ("optional", list)):
            if not isinstance(answer, dict) or not isinstance(answer.get(key), kind):
                raise WireError(key, f"got {describe(answer)}, expected the tensors of a checkpoint")
        return cls(answer["tensors"], frozenset(answer["optional"]))


class TensorCheck:
    """The comparison of one push with the engines' checkpoints.

    Args:
        engines: the tensors that each engine loads, by its address.
        is_partial: whether the push may leave out tensors.
    """

    def __init__(self, engines: Mapping[str, CheckpointTensors], *, is_partial: bool) -> None:
        # The engines of a fleet usually load the same tensors, which need only one comparison.
        self._engines: list[tuple[str, CheckpointTensors]] = []
        for url, tensors in engines.items():
            if all(tensors != other for _, other in self._engines):
                self._engines.append((url, tensors))
        self._is_partial = is_partial
        self._seen: set[str] = set()

    def add(self, tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Check the names and shapes of some of the push's tensors.

        Raises:
            InvalidInputError: an engine does not load a tensor of this name and shape, or a name comes twice.
        """
        for name, shape in tensors:
            if name in self._seen:
                raise InvalidInputError(f"weights: got the tensor {name!r} twice, expected it once")
            self._seen.add(name)
            for url, known in self._engines:
                expected = known.shapes.get(name)
                if expected is None:
                    raise InvalidInputError(
                        f"weights: got the tensor {name!r}, but {url} loads none of this name; expected the"
                        f" names of the checkpoint that it was started with, such as"
                        f" {_similar(name, known.shapes)!r}"
                    )
                if list(shape) != list(expected):
                    raise InvalidInputError(
                        f"weights: got {name!r} of shape {list(shape)}, expected {list(expected)}, which"
                        f" {url} loads"
                    )

    def finish(self) -> None:
        """Check that the tensors so far are all that the engines load, unless the push is partial.

        Raises:
            InvalidInputError: tensors are missing.
        """
        for url, known in () if self._is_partial else self._engines:
            required = known.shapes.keys() - known.optional
            if missing := sorted(required - self._seen):
                raise InvalidInputError(
                    f"weights: got {len(self._seen)} tensors without {len(missing)} of the {len(required)}"
                    f" that {url} loads, such as {missing[0]!r}; push the whole model, or pass partial=True"
                    " to keep the engine's values of the others"
                )


def _similar(name: str, known: Mapping[str, Any]) -> str:
    """Return a known name that differs from `name` by a prefix, else any known name."""
    rest = name
    while rest := rest.partition(".")[2]:
        if rest in known:
            return rest
    return next((other for other in known if other.endswith("." + name)), next(iter(known)))
