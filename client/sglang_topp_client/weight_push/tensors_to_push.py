"""The weights of a push: check them, and group a model's tensors, under their checkpoint names, in buckets.

SGLang ignores tensors with unknown names, and notices no missing tensor. A shape that does not fit can end
its scheduler. A push is therefore compared with the tensors that each engine loads (`TensorCheck`).
"""

from __future__ import annotations

import asyncio
import difflib
import os
import tempfile
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from sglang_topp.errors import InvalidInputError, describe

if TYPE_CHECKING:
    import torch

NamedTensor: TypeAlias = "tuple[str, torch.Tensor]"
Bucket: TypeAlias = tuple[list[NamedTensor], bool]
"""`(tensors, is_last)`: consecutive tensors of a model, and whether they are the model's last tensors."""

MAX_BUCKET_BYTES = 128 * 2**20
"""The maximum size of a bucket in bytes. The maximum limits the memory that a weight push takes.

A tensor above this size forms its own bucket.
"""


def check_weights(weights: Any, *, is_folder: bool) -> None:
    """Check the type of the weights, before anything is read or sent.

    Args:
        weights: with `is_folder`, a path or a transformers model. Otherwise, a transformers model or (name,
            tensor) pairs.

    Raises:
        InvalidInputError: the weights are something else, or a model that a push would not send whole.
    """
    if is_folder and isinstance(weights, str | os.PathLike):
        if not isinstance(os.fspath(weights), str) or not os.fspath(weights):
            raise InvalidInputError(f"weights: got {describe(weights)}, expected a path as text")
    elif callable(getattr(weights, "save_pretrained" if is_folder else "state_dict", None)):
        if getattr(weights, "peft_config", None):
            raise InvalidInputError(
                "weights: got a model with PEFT adapters, expected merged weights: the engine would load the"
                " base model, or ignore the adapters. Call merge_and_unload() on a copy and push that"
            )
        if not is_folder and getattr(weights, "hf_quantizer", None) is not None:
            raise InvalidInputError(
                "weights: got a quantized model, expected one in full precision; save it and use via='disk'"
            )
    elif is_folder:
        raise InvalidInputError(
            f"weights: got {type(weights).__name__}, expected a path, or a transformers model with"
            " save_pretrained; a wrapper (DDP, FSDP, torch.compile) holds the model as an attribute"
        )
    elif isinstance(weights, str | bytes) or not isinstance(weights, Iterable):
        raise InvalidInputError(
            f"weights: got {describe(weights)}, expected a transformers model or (name, tensor) pairs; use"
            " via='disk' for a folder"
        )


@asynccontextmanager
async def checkpoint_folder(weights: Any) -> AsyncGenerator[str, None]:
    """Yield the name of a folder that contains the weights to push.

    If `weights` is a model, this function saves the model to a temporary folder, and removes the temporary
    folder when the context ends.

    Args:
        weights: a path or a model, checked by `check_weights`. If the path is a directory on this
            machine, the function yields the directory's absolute path. The function yields any other path
            unchanged, because the path may exist only on the engine's machine.
    """
    if isinstance(weights, str | os.PathLike):
        path = os.fspath(weights)
        yield os.path.abspath(path) if os.path.isdir(path) else path
        return
    folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="sglang-topp-weights-")
    try:
        await asyncio.to_thread(weights.save_pretrained, folder.name)
        yield folder.name
    finally:
        await asyncio.to_thread(folder.cleanup)


class CheckpointTensors(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint, as an engine reports them.

    Attributes:
        shapes: the shape of each tensor, by name.
        optional: the names of the tensors that the engine's model does not load, such as a tied LM head.
    """

    shapes: dict[str, list[int]] = msgspec.field(name="tensors")
    optional: frozenset[str]


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

    def add(self, tensors: Iterable[tuple[str, Sequence[int]]], is_last: bool) -> None:
        """Check the names and shapes of some of the push's tensors.

        Args:
            tensors: the name and the shape of each tensor.
            is_last: whether these are the last tensors. They must then be all that the engines load, unless
                the push is partial.

        Raises:
            InvalidInputError: an engine does not load a tensor of this name and shape, a name comes twice, or
                tensors are missing.
        """
        for name, shape in tensors:
            if name in self._seen:
                raise InvalidInputError(f"weights: got the tensor {name!r} twice, expected it once")
            self._seen.add(name)
            for url, known in self._engines:
                expected = known.shapes.get(name)
                if expected is None:
                    similar = difflib.get_close_matches(name, known.shapes, n=1, cutoff=0)
                    raise InvalidInputError(
                        f"weights: got the tensor {name!r}, but {url} loads none of this name; expected the"
                        f" names of the checkpoint that it was started with, such as {''.join(similar)!r}"
                    )
                if list(shape) != list(expected):
                    raise InvalidInputError(
                        f"weights: got {name!r} of shape {list(shape)}, expected {list(expected)}, which"
                        f" {url} loads"
                    )
        for url, known in self._engines if is_last and not self._is_partial else ():
            required = known.shapes.keys() - known.optional
            if missing := sorted(required - self._seen):
                raise InvalidInputError(
                    f"weights: got {len(self._seen)} tensors without {len(missing)} of the {len(required)}"
                    f" that {url} loads, such as {missing[0]!r}; push the whole model, or pass partial=True"
                    " to keep the engine's values of the others"
                )


class TensorsToPush:
    """The tensors of one push, in buckets.

    Wrong weights raise an error before any engine is paused, so the constructor reads the weights: whole if
    they are a model, a mapping, or a sequence, else one bucket.

    Args:
        weights: a transformers model or (name, tensor) pairs, checked by `check_weights`.

    Raises:
        InvalidInputError: there are no tensors, or one that was read is not a pair of a name and a tensor.
    """

    def __init__(self, weights: Any) -> None:
        is_lazy = not hasattr(weights, "state_dict") and not isinstance(weights, Mapping | Sequence)
        self._rest = buckets(named_tensors(weights))
        self._known = [next(self._rest)] if is_lazy else list(self._rest)
        self._check: TensorCheck | None = None

    def check(self, check: TensorCheck) -> None:
        """Compare the tensors with those that the engines load.

        If only the first bucket is known, `parts` checks each later bucket before it yields the bucket.

        Raises:
            InvalidInputError: a tensor does not fit, or tensors are missing.
        """
        for bucket, is_last in self._known:
            check.add(((name, tensor.shape) for name, tensor in bucket), is_last)
        self._check = check

    def parts(self) -> Iterator[Bucket]:
        """Yield the buckets.

        Raises:
            InvalidInputError: an entry of an iterator is not a pair of a name and a tensor, or does not fit.
        """
        yield from self._known
        for bucket, is_last in self._rest:
            if self._check is not None:
                self._check.add(((name, tensor.shape) for name, tensor in bucket), is_last)
            yield bucket, is_last


def named_tensors(weights: Any) -> Iterator[NamedTensor]:
    """Yield a (name, tensor) pair for each weight, with the name and the shape that a checkpoint uses.

    Args:
        weights: a transformers model or (name, tensor) pairs, checked by `check_weights`. For a
            model, the function yields each tensor with the name and the shape that `save_pretrained` writes.
            If the caller gives pairs, the pairs must already have the names and shapes of a checkpoint.

    Raises:
        InvalidInputError: an entry of `weights` is not a pair of a name and an unsharded tensor.
    """
    import torch

    if callable(getattr(weights, "state_dict", None)):
        weights = tensors_as_saved(weights, weights.state_dict())
    for entry in weights.items() if isinstance(weights, Mapping) else weights:
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(
                f"weights: got an entry {describe(entry)}, expected pairs of a name and a tensor"
            )
        if hasattr(tensor, "full_tensor"):
            raise InvalidInputError(
                f"weights: {name} is a sharded DTensor, expected a whole tensor; gather it with full_tensor()"
                " on every rank"
            )
        if tensor.is_meta:
            raise InvalidInputError(f"weights: {name} is on the meta device, expected a tensor with values")
        yield name, tensor.detach()


def buckets(tensors: Iterable[NamedTensor]) -> Iterator[Bucket]:
    """Group tensors into buckets of at most `MAX_BUCKET_BYTES`, and yield the buckets.

    A tensor above `MAX_BUCKET_BYTES` forms its own bucket.

    Raises:
        InvalidInputError: there are no tensors.
    """
    bucket: list[NamedTensor] = []
    num_bytes = 0
    for name, tensor in tensors:
        if bucket and num_bytes + tensor.nbytes > MAX_BUCKET_BYTES:
            yield bucket, False
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    if not bucket:
        raise InvalidInputError("weights: got no tensors, expected those of the whole model")
    yield bucket, True


def tensors_as_saved(model: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_pretrained` would write, under the same names.

    Args:
        model: a transformers model.
        state_dict: the model's tensors. If a parallel wrapper gathered them, tied weights may be copies.
    """
    state: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    # Tied weights are one tensor under several names. A checkpoint stores a tied tensor only under the first
    # of its names. transformers before version 5 does not list them.
    ignored = {*ignored, *(getattr(model, "all_tied_weights_keys", None) or ())}
    for name, tensor in state_dict.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        is_tied = bool(tensor.numel()) and not tensor.is_meta and place in seen
        seen.add(place)
        if name not in ignored and not is_tied:
            state[name] = tensor
    try:
        # Since version 5, transformers renames and joins some weights when it loads a checkpoint. Revert
        # these changes.
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return reverted
