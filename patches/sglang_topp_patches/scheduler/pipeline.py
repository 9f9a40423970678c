"""Send a forward pass's candidate sets from the last pipeline stage to the first pipeline stage.

The last stage samples the tokens, and the first stage sends the tokens to the HTTP process. SGLang passes the
results of a forward pass from stage to stage as a dictionary. SGLang sends the tensors in this dictionary
directly, and pickles all other values. So the last stage puts each tensor of the candidate sets into the
dictionary as a separate value. SGLang pickles the remaining fields of the sets.

The first stage holds the sets until it sends them to the HTTP process, so it counts them. A request that
exceeds its limit (`memory`) is aborted on all pipeline stages. Until the last stage receives the
abort, the last stage still extracts the request's sets.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from sglang_topp.malloc_trim import LARGE_BYTES
from sglang_topp_patches.hooks import around
from sglang_topp_patches.memory import trimmer
from sglang_topp_patches.releases import append
from sglang_topp_patches.scheduler.sets import PassSets

_SETS = "sglang_topp"
"""The key of the sets without their tensors in a stage's output. The tensors are beside it, by number."""

_PLACE = torch.empty(0)
"""What is pickled in place of each tensor."""


@around("sglang.srt.managers.scheduler_pp_mixin.add_auxiliary_output_to_pp_tensors", since="0.5.19")
def add_to_stage_output(
    original: Callable[..., None], tensors: MutableMapping[str, Any], output: Any
) -> None:
    """Send a pass's sets from the last stage."""
    from sglang.srt.runtime_context import get_parallel

    outputs = getattr(output, "outputs", (output,))
    others = None
    for other in outputs:
        if not isinstance(other, PassSets):
            others = append(others, other)
    original(tensors, others)

    flat: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> torch.Tensor:
        flat.append(tensor)
        return _PLACE

    # Some sets may have been too large for the staging area. `settled` extracts these sets again in the last
    # stage, because only the last stage has the log-probs.
    ours = [each.settled().copy_to_host(take_out) for each in outputs if isinstance(each, PassSets)]
    if not ours:
        return
    tensors[_SETS] = (ours, [len(tensor) for tensor in flat])
    for place, tensor in enumerate(flat):
        tensors[f"{_SETS}.{place}"] = _indivisible(tensor, get_parallel().attn_tp_size)
    if sum(tensor.nbytes for tensor in flat) >= LARGE_BYTES:
        trimmer.trim_soon()


@around("sglang.srt.managers.scheduler_pp_mixin.pop_auxiliary_output_from_pp_tensors", since="0.5.19")
def take_from_stage_output(
    original: Callable[..., Any], tensors: MutableMapping[str, Any], observer: Any
) -> Any:
    """Receive a pass's sets in the first stage."""
    ours, lengths = tensors.pop(_SETS, ((), ()))
    flat = (tensors.pop(f"{_SETS}.{place}")[:length] for place, length in enumerate(lengths))
    output = original(tensors, observer)
    for each in ours:
        output = append(output, each.copy_to_host(lambda place: next(flat)))
    return output


def _indivisible(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Pad a tensor by one element if its length is a multiple of the number of tensor-parallel ranks.

    SGLang makes each rank send a different part of a tensor if the tensor's length is a multiple of the
    number of ranks. Only one rank of the last stage has the sets. This rank must send the whole tensor.
    """
    if num_ranks == 1 or len(tensor) == 0 or len(tensor) % num_ranks:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(1)])
