"""Define the interface to SGLang's internals that every range of releases implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Internals"]


class Internals(Protocol):
    """The interface through which hooks use SGLang's internals, the same for every release."""

    # -- in the scheduler

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Replace the pass's `top_logprobs_nums` by an equal list that carries our state.

        Args:
            top_logprobs_nums: the new list, equal to the pass's list.
            batch: the batch that SGLang made the `ForwardBatch` from.
            forward_batch: the pass's `ForwardBatch`.
        """

    def begin_pass(self, logits_output: Any) -> None:
        """Remove the sets of an earlier pass from the pass's output object, which SGLang may reuse."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Send an output to the host with a pass.

        Args:
            logits_output: SGLang's `LogitsProcessorOutput` of the pass.
            output: the sets of the pass. Its `copy_to_host` is called, and then its `consume`, with the
                tokens that became visible.
        """

    def append(self, current: Any, output: Any) -> Any:
        """Combine two outputs of one pass into one. None stands for no output."""

    def answers_requests(self) -> bool:
        """Return whether this rank's results reach the client. The other ranks only mirror them."""

    def weight_version(self) -> str:
        """Return the weight version of a pass that starts now; empty if the scheduler does not know it."""

    def sampling(self) -> tuple[str, bool]:
        """Return the sampling backend, and whether `--rl-on-policy-target` is set.

        Raises:
            ValueError: SGLang has not set its configuration in this process.
        """

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Return where `eagle_sample` looks up its sampling kernels: pairs of a module and an attribute.

        On a device without such a kernel, the module may lack the attribute. A module that was not imported
        is None.
        """

    def sanitizes_logits(self) -> bool:
        """Return whether SGLang sanitizes logits, so that a row without a possible token fails alone.

        SGLang's default is False.
        """

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Return the indices of the rows of a pass that score a prompt token, ascending.

        Args:
            metadata: SGLang's `LogitsMetadata`.
            indices: the same rows on the device, int64.
        """

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute a prompt's log-probs as SGLang reports them, by the same operations in the same order.

        Args:
            processor: SGLang's object that scores prompts.
            logits: float [R, V].
        """

    def prompt_rows(self) -> list[Any]:
        """Return an empty list for `customized_info`. SGLang sends its entries together, once per request."""

    def align(self, reqs: Sequence[Any]) -> None:
        """Prepare the `customized_info` of requests that are sent together.

        Each request then arrives with its own values.
        """

    # -- in the HTTP process

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return the message's `customized_info`: one list per key, with an entry per request."""

    def streams_increments(self, manager: Any) -> bool:
        """Return whether a streamed chunk has only new tokens. `manager` is SGLang's `TokenizerManager`."""

    def skips_tokenizer(self, manager: Any) -> bool:
        """Return whether the server has no tokenizer. `manager` is SGLang's `TokenizerManager`."""
