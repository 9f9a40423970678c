"""Adapt to SGLang 0.5.19 and later, which copies and commits the auxiliary outputs of a pass."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.scheduler_messages import PROMPT_KEY

__all__ = ["Outputs", "SentOnce", "Sglang0519", "Sglang0520", "Sglang0521", "Sglang0523"]

_KERNEL = "tree_speculative_sampling_target_only"
_PACKAGE = "sgl_kernel"


def _imported(name: str) -> Any:
    """Import a module as `eagle_sample` does when it draws. Return None if there is no such module."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Sglang0523:
    """`Internals` since 0.5.23."""

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Set the list on the `ForwardBatch`, which SGLang passes to every function of a pass."""
        forward_batch.top_logprobs_nums = top_logprobs_nums

    def begin_pass(self, logits_output: Any) -> None:
        """Do nothing: since 0.5.19, SGLang itself clears the auxiliary output when it samples."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Add the output to SGLang's auxiliary outputs."""
        logits_output.auxiliary_device_output = self.append(logits_output.auxiliary_device_output, output)

    def append(self, current: Any, output: Any) -> Any:
        """Combine the outputs with SGLang's own function."""
        from sglang.srt.managers.auxiliary_output import append_auxiliary_output

        return append_auxiliary_output(current, output)

    def answers_requests(self) -> bool:
        """Return whether the attention ranks (tensor and context parallel) in the runtime context are 0."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)

    def weight_version(self) -> str:
        """Read the version from the serving context.

        SGLang changes the weights and their version between two passes, in the thread that launches passes.
        So each pass has one version.
        """
        from sglang.srt.runtime_context import get_serving

        version: str = get_serving().weight_version
        return version

    def sampling(self) -> tuple[str, bool]:
        """Read the backend and the on-policy setting from the execution context."""
        from sglang.srt.runtime_context import get_exec

        settings = get_exec()
        return settings.kernel.sampling_backend, bool(settings.deterministic.rl_on_policy_target)

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Return the module of `eagle_sample`, which imports the kernels at its top."""
        module = sys.modules.get("sglang.srt.speculative.eagle_utils")
        return (module, _KERNEL), (module, "chain_speculative_sampling_triton")

    def sanitizes_logits(self) -> bool:
        """Read SGLang's environment variable `SGLANG_SANITIZE_NAN_LOGITS`."""
        from sglang.srt.environ import envs

        return bool(envs.SGLANG_SANITIZE_NAN_LOGITS.get())

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Read the rows on the host, where SGLang keeps them since 0.5.21.

        Before 0.5.21, this waits for the device.
        """
        on_host: Sequence[int] | None = getattr(metadata, "input_logprob_indices_cpu", None)
        return indices.tolist() if on_host is None else on_host

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Use SGLang's row normalizer if SGLang takes its faster path, else `log_softmax`."""
        if not processor.enable_fast_input_logprobs:
            return torch.nn.functional.log_softmax(logits, dim=-1)
        from sglang.srt.layers.logprob_processor import compute_row_log_normalizer

        row_max, row_log_sum = compute_row_log_normalizer(logits)
        logprobs: torch.Tensor = (logits.float() - row_max[:, None]) - row_log_sum[:, None]
        return logprobs

    def prompt_rows(self) -> list[Any]:
        """Return a list that empties itself once SGLang takes a slice of it.

        Since 0.5.22, SGLang can send entries once per request (`is_request_level_customized_info_key`). But
        if the answer is not streamed, SGLang sends them only when the request finishes. A request that is
        aborted while it waits because of a pause never finishes. Its answer still shows tokens, because
        SGLang sends new tokens after every 50, even if the answer is not streamed.
        """
        return SentOnce()

    def align(self, reqs: Sequence[Any]) -> None:
        """Do nothing: since 0.5.15, SGLang itself keeps the values of each request apart."""

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return the values, with each request's prompt rows unpacked from the one entry that holds them."""
        info = self._arrived(recv_obj)
        if PROMPT_KEY in info:
            info[PROMPT_KEY] = [
                [row for whole in entries if whole is not None for row in whole]
                for entries in info[PROMPT_KEY]
            ]
        return info

    def _arrived(self, recv_obj: Any) -> dict[str, Any]:
        """Unpickle the value, which SGLang sends as a pickle beside the message."""
        from sglang.srt.managers.io_struct import unwrap_from_pickle

        return unwrap_from_pickle(getattr(recv_obj, "customized_info", None)) or {}

    def streams_increments(self, manager: Any) -> bool:
        """Read the manager's attribute `incremental_streaming_output`."""
        return bool(manager.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """Read the manager's attribute `skip_tokenizer_init`."""
        return bool(manager.skip_tokenizer_init)


class SentOnce(list[Any]):
    """A list of `customized_info` whose entries SGLang sends together, once.

    SGLang sends a slice of each list, for the new tokens. The first slice of this list returns all entries as
    one entry, and empties the list.
    """

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return super().__getitem__(part)
        whole = list(self)
        self.clear()
        # The one entry holds all rows, for `take_customized_info` to unpack. For a request without rows,
        # SGLang fills in None for each of its tokens.
        return [whole] if whole else []


class Sglang0521(Sglang0523):
    """`Internals` of 0.5.21 and 0.5.22, where `eagle_sample` imports the kernel when it is called."""

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Import the module with the CUDA kernel. On other devices, import the package of older releases."""
        from sglang.srt.utils.common import is_cuda

        name = "sglang.kernels.ops.speculative.sampling" if is_cuda() else _PACKAGE
        return ((_imported(name), _KERNEL),)


class Sglang0520(Sglang0521):
    """`Internals` of 0.5.20 and older releases, where the kernel comes from the package `sgl_kernel`."""

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Import `sgl_kernel`, in which these releases have the kernel on every device."""
        return ((_imported(_PACKAGE), _KERNEL),)


class Sglang0519(Sglang0520):
    """`Internals` of 0.5.19, where a pass has one auxiliary output at most."""

    def append(self, current: Any, output: Any) -> Any:
        """Combine the outputs as SGLang itself does since 0.5.20."""
        if current is None or output is None:
            return current or output
        return Outputs((*getattr(current, "outputs", (current,)), *getattr(output, "outputs", (output,))))


@dataclass(frozen=True)
class Outputs:
    """Several outputs of a pass, on the device or on the host.

    Attributes:
        outputs: the outputs, in the order in which they are consumed.
    """

    outputs: tuple[Any, ...]

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
        """Issue the copies of each output."""
        return Outputs(tuple(output.copy_to_host(copy_tensor) for output in self.outputs))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Consume each output."""
        for output in self.outputs:
            output.consume(batch, commits)
