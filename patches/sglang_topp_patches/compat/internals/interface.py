"""Define the interface to SGLang's internals that every range of releases implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Internals"]


class Internals(Protocol):
    """SGLang's internals, as the hooks use them in every release."""

    # -- in the scheduler

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Replace the pass's `top_logprobs_nums` by this equal list, which carries our state.

        Args:
            top_logprobs_nums: equal to the pass's list.
            batch: the batch that SGLang made the `ForwardBatch` from.
            forward_batch: the pass's `ForwardBatch`.
        """

    def begin_pass(self, logits_output: Any) -> None:
        """Drop what an earlier pass left on the output object of this one."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Send an output to the host with a pass.

        Args:
            logits_output: SGLang's `LogitsProcessorOutput` of the pass.
            output: its `copy_to_host` is called, and then its `consume`, with the tokens that became visible.
        """

    def append(self, current: Any, output: Any) -> Any:
        """Return two outputs of one pass as one. None is no output."""

    def answers_requests(self) -> bool:
        """Return whether this rank's results reach the client. The other ranks only mirror them."""

    def weight_version(self) -> str:
        """Return the name of the weights that a pass runs with now; empty where the scheduler does not know
        it."""

    def sampling(self) -> tuple[str, bool]:
        """Return the sampling backend, and whether `--rl-on-policy-target` is set.

        Raises:
            ValueError: SGLang has not set its configuration in this process.
        """

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Return the objects and the names under which `eagle_sample` looks for its sampling kernels.

        An object may lack the name, on a device without such a kernel. It is None if it was not imported.
        """

    def sanitizes_logits(self) -> bool:
        """Return whether SGLang lets a row without a possible token fail alone. Off by default."""

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Return which rows of a pass score a prompt token, rising.

        Args:
            metadata: SGLang's `LogitsMetadata`.
            indices: the same rows on the device, int64.
        """

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute a prompt's log-probs exactly as SGLang reports them, in its order of operations.

        Args:
            processor: the object that scores prompts.
            logits: float [R, V].
        """

    def prompt_rows(self) -> list[Any]:
        """Return an empty list for `customized_info` whose entries SGLang sends once per request, whole."""

    def align(self, reqs: Sequence[Any]) -> None:
        """Prepare the `customized_info` of requests that are sent together, so that each arrives with its
        own."""

    # -- in the HTTP process

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return the scheduler's values for extensions: one list per key, with an entry per request."""

    def streams_increments(self, manager: Any) -> bool:
        """Return whether a streamed chunk holds only new tokens, by SGLang's `TokenizerManager`."""

    def skips_tokenizer(self, manager: Any) -> bool:
        """Return whether the server has no tokenizer, by SGLang's `TokenizerManager`."""
