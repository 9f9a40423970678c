"""SGLang 0.5.19 and later: a pass has auxiliary outputs, which SGLang itself brings to the host and
commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.payload import PROMPT_KEY

__all__ = ["AuxiliaryOutput", "Outputs", "SentOnce", "SingleAuxiliaryOutput"]


class AuxiliaryOutput:
    """`Internals` of 0.5.20 and later."""

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """All that SGLang calls with a pass has the `ForwardBatch`."""
        forward_batch.top_logprobs_nums = top_logprobs_nums

    def begin_pass(self, logits_output: Any) -> None:
        """SGLang does it."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Among SGLang's auxiliary outputs."""
        logits_output.auxiliary_device_output = self.append(logits_output.auxiliary_device_output, output)

    def append(self, current: Any, output: Any) -> Any:
        """By SGLang's own function."""
        from sglang.srt.managers.auxiliary_output import append_auxiliary_output

        return append_auxiliary_output(current, output)

    def answers_requests(self) -> bool:
        """By the ranks of attention."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)

    def weight_version(self) -> str:
        """SGLang changes weights and name between two passes, in the thread that launches them."""
        from sglang.srt.runtime_context import get_serving

        version: str = get_serving().weight_version
        return version

    def sampling(self) -> tuple[str, bool]:
        """By the settings of execution."""
        from sglang.srt.runtime_context import get_exec

        settings = get_exec()
        return settings.kernel.sampling_backend, bool(settings.deterministic.rl_on_policy_target)

    def sanitizes_logits(self) -> bool:
        """By the environment, as SGLang reads it."""
        from sglang.srt.environ import envs

        return bool(envs.SGLANG_SANITIZE_NAN_LOGITS.get())

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """SGLang has them on the host too from 0.5.21 on; before, this waits for them."""
        there: Sequence[int] | None = getattr(metadata, "input_logprob_indices_cpu", None)
        return indices.tolist() if there is None else there

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """By the normalizer where SGLang takes its faster way, else by `log_softmax`."""
        if not processor.enable_fast_input_logprobs:
            return torch.nn.functional.log_softmax(logits, dim=-1)
        from sglang.srt.layers.logprob_processor import compute_row_log_normalizer

        row_max, row_log_sum = compute_row_log_normalizer(logits)
        logprobs: torch.Tensor = (logits.float() - row_max[:, None]) - row_log_sum[:, None]
        return logprobs

    def prompt_rows(self) -> list[Any]:
        """A list that is empty once SGLang has taken a part of it.

        SGLang's own way, from 0.5.22 on (`is_request_level_customized_info_key`), sends those of an answer
        that is not streamed when it is finished. A request that is aborted while a pause has it wait does not
        get there: it shows the tokens that SGLang has sent, which is after every 50.
        """
        return SentOnce()

    def align(self, reqs: Sequence[Any]) -> None:
        """They are."""

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """With each request's prompt rows out of their one entry."""
        info = self._arrived(recv_obj)
        if PROMPT_KEY in info:
            info[PROMPT_KEY] = [
                [row for whole in entries if whole is not None for row in whole]
                for entries in info[PROMPT_KEY]
            ]
        return info

    def _arrived(self, recv_obj: Any) -> dict[str, Any]:
        """SGLang pickles it beside the message."""
        from sglang.srt.managers.io_struct import unwrap_from_pickle

        return unwrap_from_pickle(getattr(recv_obj, "customized_info", None)) or {}

    def streams_increments(self, manager: Any) -> bool:
        """By the manager's own record."""
        return bool(manager.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """By the manager's own record."""
        return bool(manager.skip_tokenizer_init)


class SentOnce(list[Any]):
    """Entries of `customized_info` that go out once, whole: SGLang takes the part of each list that belongs
    to the tokens it sends."""

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return super().__getitem__(part)
        whole = list(self)
        self.clear()
        # As one entry: where another request has none, SGLang fills in None for each of its tokens.
        return [whole] if whole else []


class SingleAuxiliaryOutput(AuxiliaryOutput):
    """`Internals` of 0.5.19, where a pass has one auxiliary output at the most."""

    def append(self, current: Any, output: Any) -> Any:
        """As SGLang does it later."""
        if current is None or output is None:
            return current or output
        return Outputs((*getattr(current, "outputs", (current,)), *getattr(output, "outputs", (output,))))


@dataclass(frozen=True)
class Outputs:
    """Several outputs of a pass, on the device or on the host.

    Attributes:
        outputs: in the order in which they are consumed.
    """

    outputs: tuple[Any, ...]

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
        """Issue the copies of each."""
        return Outputs(tuple(output.copy_to_host(copy_tensor) for output in self.outputs))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Have each join its requests."""
        for output in self.outputs:
            output.consume(batch, commits)
