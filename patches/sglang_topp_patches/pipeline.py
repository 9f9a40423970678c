"""Sets on their way from the last pipeline stage, which samples, to the first, which answers.

SGLang hands what a pass gave from stage to stage as a dictionary. Tensors travel as such, everything else
pickled beside their sizes: so does what is known of the rows here, and the sets as tensors of their own.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_topp_patches.heap import LARGE_BYTES, trim_soon
from sglang_topp_patches.payload import KEY
from sglang_topp_patches.releases import internals

__all__ = ["PassSets", "Sets", "add_to_stage_output", "take_from_stage_output"]


class Sets(Protocol):
    """Sets that one pass took, on the device or on the host."""

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Sets:
        """The same with every tensor copied, in a fixed order."""

    def settled(self) -> Sets:
        """The same with whole sets on the device; waits for them."""

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Join them to their requests."""


@dataclass(frozen=True)
class PassSets:
    """All sets of one pass; SGLang's `DeviceAuxiliaryOutput` and `HostAuxiliaryOutput` in one.

    Attributes:
        parts: the prompt's, where one was scored, before the generated tokens'.
    """

    parts: tuple[Sets, ...]

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> PassSets:
        """Issue the copies; `consume` runs after SGLang has waited for them."""
        return PassSets(tuple(part.copy_to_host(copy_tensor) for part in self.parts))

    def settled(self) -> PassSets:
        """The same with whole sets on the device; waits for them."""
        return PassSets(tuple(part.settled() for part in self.parts))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Join all sets to their requests."""
        for part in self.parts:
            part.consume(batch, commits)


def add_to_stage_output(
    original: Callable[..., None], tensors: MutableMapping[str, Any], output: Any
) -> None:
    """AROUND hook on `add_auxiliary_output_to_pp_tensors`, in the last stage."""
    from sglang.srt.runtime_context import get_parallel

    outputs = getattr(output, "outputs", (output,))
    others = None
    for other in outputs:
        if not isinstance(other, PassSets):
            others = internals().append(others, other)
    original(tensors, others)

    flat: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> Any:
        flat.append(tensor)
        return len(flat) - 1

    # What did not fit its staging area can be taken again on this stage alone.
    ours = [each.settled().copy_to_host(take_out) for each in outputs if isinstance(each, PassSets)]
    if not ours:
        return
    tensors[KEY] = (ours, [len(tensor) for tensor in flat])
    for place, tensor in enumerate(flat):
        tensors[f"{KEY}.{place}"] = _indivisible(tensor, get_parallel().attn_tp_size)
    if sum(tensor.nbytes for tensor in flat) >= LARGE_BYTES:
        trim_soon()


def take_from_stage_output(
    original: Callable[..., Any], tensors: MutableMapping[str, Any], observer: Any
) -> Any:
    """AROUND hook on `pop_auxiliary_output_from_pp_tensors`, in the first stage."""
    ours, lengths = tensors.pop(KEY, ((), ()))
    flat = [tensors.pop(f"{KEY}.{place}")[:length] for place, length in enumerate(lengths)]
    output = original(tensors, observer)
    for each in ours:
        output = internals().append(output, each.copy_to_host(flat.__getitem__))
    return output


def _indivisible(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Longer by one where SGLang would have each tensor-parallel rank send its share and gather them: only
    the rank that answers has sets."""
    if num_ranks == 1 or len(tensor) == 0 or len(tensor) % num_ranks:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(1)])
