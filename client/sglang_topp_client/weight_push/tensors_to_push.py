"""Named tensors: yield a model's weights under their checkpoint names, and group the weights into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.weight_push.checkpoint_folder import check_model
from sglang_topp_client.weight_push.tensor_check import TensorCheck

if TYPE_CHECKING:
    import torch

NamedTensor: TypeAlias = "tuple[str, torch.Tensor]"
Bucket: TypeAlias = tuple[list[NamedTensor], bool]
"""`(tensors, is_last)`: consecutive tensors of a model, and whether they are the model's last tensors."""

__all__ = [
    "MAX_BUCKET_BYTES",
    "Bucket",
    "NamedTensor",
    "TensorsToPush",
    "buckets",
    "check_model_or_tensors",
    "named_tensors",
    "tensors_as_saved",
]

MAX_BUCKET_BYTES = 128 * 2**20
"""The maximum size of a bucket in bytes. The maximum limits the memory that a weight push takes.

A tensor above this size forms its own bucket.
"""


class TensorsToPush:
    """The tensors of one push, in buckets.

    Wrong weights raise an error before any engine is paused, so the constructor reads the weights: whole if
    they are a model, a mapping, or a sequence, else one bucket.

    Args:
        weights: a transformers model or (name, tensor) pairs, checked by `check_model_or_tensors`.

    Raises:
        InvalidInputError: there are no tensors, or one that was read is not a pair of a name and a tensor.
    """

    def __init__(self, weights: Any) -> None:
        named = named_tensors(weights)
        self._is_lazy = not hasattr(weights, "state_dict") and not isinstance(weights, Mapping | Sequence)
        self._known = [] if self._is_lazy else list(named)
        self._rest = buckets(named if self._is_lazy else self._known)
        self._first = next(self._rest)
        self._check: TensorCheck | None = None

    def check(self, check: TensorCheck) -> None:
        """Compare the tensors with those that the engines load.

        If only the first bucket is known, `parts` checks each later bucket before it yields the bucket.

        Raises:
            InvalidInputError: a tensor does not fit, or tensors are missing.
        """
        _check_bucket(check, *(self._first if self._is_lazy else (self._known, True)))
        self._check = check if self._is_lazy else None

    def parts(self) -> Iterator[Bucket]:
        """Yield the buckets.

        Raises:
            InvalidInputError: an entry of an iterator is not a pair of a name and a tensor, or does not fit.
        """
        yield self._first
        for bucket, is_last in self._rest:
            if self._check is not None:
                _check_bucket(self._check, bucket, is_last)
            yield bucket, is_last


def _check_bucket(check: TensorCheck, bucket: Iterable[NamedTensor], is_last: bool) -> None:
    check.add((name, tensor.shape) for name, tensor in bucket)
    if is_last:
        check.finish()


def check_model_or_tensors(weights: Any) -> None:
    """Raise InvalidInputError unless `weights` is a transformers model or (name, tensor) pairs."""
    if callable(getattr(weights, "state_dict", None)):
        check_model(weights)
        if getattr(weights, "hf_quantizer", None) is not None:
            raise InvalidInputError(
                "weights: got a quantized model, expected one in full precision; save it and use via='disk'"
            )
    elif isinstance(weights, str | bytes) or not isinstance(weights, Iterable):
        raise InvalidInputError(
            f"weights: got {describe(weights)}, expected a transformers model or (name, tensor) pairs; use"
            " via='disk' for a folder"
        )


def named_tensors(weights: Any) -> Iterator[NamedTensor]:
    """Yield a (name, tensor) pair for each weight, with the name and the shape that a checkpoint uses.

    Args:
        weights: a transformers model or (name, tensor) pairs, checked by `check_model_or_tensors`. For a
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
