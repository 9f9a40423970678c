"""Adapters to the internals of SGLang 0.5.19 and later.

Unlike earlier releases, these releases of SGLang copy auxiliary outputs to the host. An auxiliary output
holds extra results of a forward pass, such as candidate sets.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.hooks import Seam
from sglang_topp_patches.scheduler_messages import PROMPT_KEY

__all__ = ["CALLED", "Outputs", "SentOnce", "Sglang0519", "Sglang0520", "Sglang0521", "Sglang0523"]

CALLED = (
    Seam(
        "sglang.srt.managers.auxiliary_output.append_auxiliary_output",
        "Copy the sets to the host with SGLang's own results.",
        ("current", "output"),
        since="0.5.20",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
        "Rely on a new weight version only between two passes.",
        ("new_version",),
        since="0.5.19",
    ),
    Seam("sglang.srt.runtime_context.get_serving", "Read the weight version.", since="0.5.19"),
    Seam("sglang.srt.runtime_context.get_exec", "Read which backend samples.", since="0.5.20"),
    Seam(
        "sglang.srt.layers.logprob_processor.compute_row_log_normalizer",
        "Compute prompt log-probs as SGLang does.",
        ("logits",),
        since="0.5.18",
    ),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        "Read on the host which rows of a pass score prompt tokens.",
        keywords=("input_logprob_indices_cpu",),
        since="0.5.21",
    ),
)

_KERNEL = "tree_speculative_sampling_target_only"
_PACKAGE = "sgl_kernel"


def _imported(name: str) -> Any:
    """Import and return a module, or return None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Sglang0523:
    """Adapter to SGLang 0.5.23 and later."""

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Set `top_logprobs_nums` on the `ForwardBatch`, which every function in a forward pass receives."""
        forward_batch.top_logprobs_nums = top_logprobs_nums

    def begin_pass(self, logits_output: Any) -> None:
        """Do nothing, because SGLang itself clears earlier auxiliary outputs when it samples."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Add the sets to the forward pass's auxiliary output, which SGLang copies to the host."""
        logits_output.auxiliary_device_output = self.append(logits_output.auxiliary_device_output, output)

    def append(self, current: Any, output: Any) -> Any:
        """Combine two auxiliary outputs with SGLang's own function `append_auxiliary_output`."""
        from sglang.srt.managers.auxiliary_output import append_auxiliary_output

        return append_auxiliary_output(current, output)

    def answers_requests(self) -> bool:
        """Return whether this process has rank 0 in both attention groups (tensor and context parallel)."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)

    def weight_version(self) -> str:
        """Read the weight version from SGLang's `get_serving`.

        SGLang changes the weights and their version only between forward passes, in the thread that launches
        the passes. All rows of a forward pass therefore have the same weight version.
        """
        from sglang.srt.runtime_context import get_serving

        version: str = get_serving().weight_version
        return version

    def sampling(self) -> tuple[str, bool]:
        """Read the sampling backend and the on-policy setting from SGLang's `get_exec`."""
        from sglang.srt.runtime_context import get_exec

        settings = get_exec()
        return settings.kernel.sampling_backend, bool(settings.deterministic.rl_on_policy_target)

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Return the two kernels that `eagle_sample` calls: the target-only and the rejection kernel."""
        # `eagle_sample` is defined in `eagle_utils`, which imports the two kernels below at its top level.
        module = sys.modules.get("sglang.srt.speculative.eagle_utils")
        return (module, _KERNEL), (module, "chain_speculative_sampling_triton")

    def sanitizes_logits(self) -> bool:
        """Read SGLang's environment variable `SGLANG_SANITIZE_NAN_LOGITS`."""
        from sglang.srt.environ import envs

        return bool(envs.SGLANG_SANITIZE_NAN_LOGITS.get())

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Return the indices of the logits rows that score prompt tokens, as a sequence on the host.

        SGLang 0.5.21 and later keep a copy of the row indices on the host. Before 0.5.21, SGLang keeps the
        row indices only on the device, so this method waits for the device.
        """
        on_host: Sequence[int] | None = getattr(metadata, "input_logprob_indices_cpu", None)
        return indices.tolist() if on_host is None else on_host

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute the log-probs as SGLang does: with `compute_row_log_normalizer` or with `log_softmax`."""
        if not processor.enable_fast_input_logprobs:
            return torch.nn.functional.log_softmax(logits, dim=-1)
        from sglang.srt.layers.logprob_processor import compute_row_log_normalizer

        row_max, row_log_sum = compute_row_log_normalizer(logits)
        logprobs: torch.Tensor = (logits.float() - row_max[:, None]) - row_log_sum[:, None]
        return logprobs

    def prompt_rows(self) -> list[Any]:
        """Return a `SentOnce`, a list that SGLang sends to the HTTP process once and as a whole.

        SGLang 0.5.22 and later can also send a plain list once per request
        (`is_request_level_customized_info_key`). The patch set does not use this feature, because without
        streaming, SGLang would send the plain list only when the request finishes. A pause can move a running
        request back to the waiting queue. If the request is then aborted in the queue, it does not finish.
        The HTTP process may already have tokens of this request, because the scheduler sends new tokens after
        every 50 tokens, even without streaming. The answer would then have tokens, but no sets of the prompt.
        """
        return SentOnce()

    def align(self, reqs: Sequence[Any]) -> None:
        """Do nothing, because SGLang 0.5.15 and later deliver `customized_info` to the right request."""

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return a scheduler message's `customized_info`, with one flat list of prompt sets per request."""
        info = self._arrived(recv_obj)
        if PROMPT_KEY in info:
            # If a request has no list under `PROMPT_KEY`, SGLang sends None for each of the request's new
            # tokens.
            info[PROMPT_KEY] = [
                [row for whole in entries if whole is not None for row in whole]
                for entries in info[PROMPT_KEY]
            ]
        return info

    def _arrived(self, recv_obj: Any) -> dict[str, Any]:
        """Unpickle and return the field `customized_info` of a scheduler message."""
        from sglang.srt.managers.io_struct import unwrap_from_pickle

        return unwrap_from_pickle(getattr(recv_obj, "customized_info", None)) or {}

    def streams_increments(self, manager: Any) -> bool:
        """Read the manager's attribute `incremental_streaming_output`."""
        return bool(manager.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """Read the manager's attribute `skip_tokenizer_init`."""
        return bool(manager.skip_tokenizer_init)


class SentOnce(list[Any]):
    """A list that SGLang sends to the HTTP process once and as a whole, as part of `customized_info`.

    For each message to the HTTP process, SGLang slices every list in `customized_info`. The bounds of the
    slice are the positions of the new tokens. A `SentOnce` ignores the bounds. Slicing a `SentOnce` removes
    all of its values, and returns a list with one entry: the list of the removed values. Slicing an empty
    `SentOnce` returns an empty list.
    """

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return super().__getitem__(part)
        whole = list(self)
        self.clear()
        # `take_customized_info` unpacks `whole`, which is the only entry of the returned list.
        return [whole] if whole else []


class Sglang0521(Sglang0523):
    """Adapter to SGLang 0.5.21 and 0.5.22, where each call of `eagle_sample` imports the sampling kernel."""

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Import the sampling kernel's module.

        SGLang itself contains the sampling kernel for CUDA devices. The package `sgl_kernel` contains the
        sampling kernel for other GPUs.
        """
        from sglang.srt.utils.common import is_cuda

        name = "sglang.kernels.ops.speculative.sampling" if is_cuda() else _PACKAGE
        return ((_imported(name), _KERNEL),)


class Sglang0520(Sglang0521):
    """Adapter to SGLang 0.5.20, where the sampling kernel comes from the package `sgl_kernel`."""

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Import `sgl_kernel`, the package that contains the sampling kernel of SGLang 0.5.20 and earlier."""
        return ((_imported(_PACKAGE), _KERNEL),)


class Sglang0519(Sglang0520):
    """Adapter to SGLang 0.5.19, where a forward pass has at most one auxiliary output."""

    def append(self, current: Any, output: Any) -> Any:
        """Combine two auxiliary outputs of a forward pass, as SGLang 0.5.20 and later do themselves."""
        if current is None or output is None:
            return current or output
        return Outputs((*getattr(current, "outputs", (current,)), *getattr(output, "outputs", (output,))))


@dataclass(frozen=True)
class Outputs:
    """Several auxiliary outputs of one forward pass, on the device or on the host.

    Attributes:
        outputs: the auxiliary outputs. `Outputs.consume` calls their `consume` methods in this order.
    """

    outputs: tuple[Any, ...]

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
        """Start to copy the tensors of every auxiliary output to the host."""
        return Outputs(tuple(output.copy_to_host(copy_tensor) for output in self.outputs))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Call the method `consume` of every auxiliary output."""
        for output in self.outputs:
            output.consume(batch, commits)
