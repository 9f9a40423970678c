"""Define `Internals`, the interface between the hooks and the internals of any supported SGLang release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Internals"]


class Internals(Protocol):
    """The operations on SGLang's internals that the hooks need. The adapter classes implement them."""

    # -- The hooks in the scheduler call these methods.

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Replace the forward pass's `top_logprobs_nums` with an equal list that refers to our `ForwardPass`.

        Args:
            top_logprobs_nums: the new list, equal to the pass's list.
            batch: the batch from which SGLang made the `ForwardBatch`.
            forward_batch: the pass's `ForwardBatch`.
        """

    def begin_pass(self, logits_output: Any) -> None:
        """Clear earlier sets from a forward pass's output object, because SGLang may reuse that object."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Attach candidate sets to a forward pass, so that they are copied to the host with its results.

        Args:
            logits_output: SGLang's `LogitsProcessorOutput` of the pass.
            output: an object that holds the pass's sets. The method `copy_to_host` is called first. Later,
                the method `consume` is called with the tokens that became visible.
        """

    def append(self, current: Any, output: Any) -> Any:
        """Combine two outputs of one forward pass into one. None stands for no output."""

    def answers_requests(self) -> bool:
        """Return whether SGLang sends this rank's results to the client.

        A rank whose results are not sent repeats the work of a rank whose results are sent.
        """

    def weight_version(self) -> str:
        """Return the current weight version, or an empty string if the scheduler does not know it."""

    def sampling(self) -> tuple[str, bool]:
        """Return the sampling backend, and whether `--rl-on-policy-target` is set.

        Raises:
            ValueError: SGLang has not set its configuration in this process.
        """

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Return the (module, attribute name) pairs under which `eagle_sample` looks up its sampling kernels.

        A module that was not imported is None. On a device without the kernel, the module may lack the
        attribute.
        """

    def sanitizes_logits(self) -> bool:
        """Return whether SGLang sanitizes logits, which is not its default.

        If SGLang sanitizes logits, a row without any possible token fails without failing the other rows.
        """

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Return, in ascending order, the indices of a pass's rows that score a prompt token.

        Args:
            metadata: SGLang's `LogitsMetadata`.
            indices: the same indices on the device, int64.
        """

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute a prompt's log-probs with the same operations as SGLang, in the same order.

        Args:
            processor: SGLang's object that scores prompts.
            logits: float [R, V].
        """

    def prompt_rows(self) -> list[Any]:
        """Return an empty list for `customized_info`. SGLang sends all entries of the list at once.

        SGLang sends any other list piece by piece, with the tokens.
        """

    def align(self, reqs: Sequence[Any]) -> None:
        """Prepare the `customized_info` of requests that SGLang sends in one message.

        Without this preparation, some releases deliver a request's values to another request.
        """

    # -- The hooks in the HTTP process call these methods.

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return the message's `customized_info`: one list per key, with an entry per request."""

    def streams_increments(self, manager: Any) -> bool:
        """Return whether a streamed chunk holds only new tokens. `manager` is SGLang's `TokenizerManager`."""

    def skips_tokenizer(self, manager: Any) -> bool:
        """Return whether the server runs without a tokenizer. `manager` is SGLang's `TokenizerManager`."""
