"""Define `Internals`, the interface between the hooks and the internals of any supported SGLang release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Internals"]


class Internals(Protocol):
    """The operations on SGLang's internals that the hooks need. The adapter classes implement them."""

    # -- The scheduler's hooks call the methods from `carry` to `align`.

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Replace a pass's `top_logprobs_nums` with a copy that also records which rows ask for sets.

        Args:
            top_logprobs_nums: the copy, a `requested_rows.TopLogprobsNums`.
            batch: the batch from which SGLang made the `ForwardBatch`.
            forward_batch: the pass's `ForwardBatch`.
        """

    def begin_pass(self, logits_output: Any) -> None:
        """Clear earlier sets from a forward pass's output object, because SGLang may reuse that object."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Attach candidate sets to a forward pass, so that they are copied to the host with its results.

        Args:
            logits_output: SGLang's `LogitsProcessorOutput` of the pass.
            output: an object that holds the pass's sets. Its method `copy_to_host` is called first. Its
                method `consume` is called later, with the tokens that the scheduler added to the requests.
        """

    def append(self, current: Any, output: Any) -> Any:
        """Combine two auxiliary outputs of one forward pass into one. None means that there is no output."""

    def answers_requests(self) -> bool:
        """Return whether SGLang sends this rank's results to the client.

        If several ranks compute the same results, SGLang sends the results of one of these ranks.
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

        The module is None if it was not imported. The module may lack the attribute on a device that has no
        such kernel.
        """

    def sanitizes_logits(self) -> bool:
        """Return whether SGLang sanitizes logits, which is not its default.

        If a grammar forbids every token of a row, that row fails. With sanitized logits, the other rows of
        the pass succeed.
        """

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Return, in ascending order, the indices of a pass's rows that score a prompt token.

        Args:
            metadata: SGLang's `LogitsMetadata`.
            indices: SGLang's tensor of these row indices on the device, int64.
        """

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute a prompt's log-probs with the same operations as SGLang, in the same order.

        Args:
            processor: SGLang's `InputLogprobProcessor`; before 0.5.16, its `LogitsProcessor`.
            logits: float [R, V].
        """

    def prompt_rows(self) -> list[Any]:
        """Return an empty list for a prompt's sets, which SGLang sends to the HTTP process all at once.

        SGLang sends any other list of `customized_info` piece by piece, with the new tokens.
        """

    def align(self, reqs: Sequence[Any]) -> None:
        """Prepare the `customized_info` of requests that SGLang sends in one message.

        Some releases would otherwise deliver one request's values to another request.
        """

    # -- The HTTP process's hooks call the methods from `take_customized_info` to `skips_tokenizer`.

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return a scheduler message's `customized_info`: for each key, a list with one entry per request."""

    def streams_increments(self, manager: Any) -> bool:
        """Return whether a streamed chunk holds only new tokens. `manager` is SGLang's `TokenizerManager`."""

    def skips_tokenizer(self, manager: Any) -> bool:
        """Return whether the server runs without a tokenizer. `manager` is SGLang's `TokenizerManager`."""
