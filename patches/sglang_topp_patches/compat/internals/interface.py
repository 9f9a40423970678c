"""Define `Internals`, the interface between the hooks and the internals of any supported SGLang release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Internals"]


class Internals(Protocol):
    """The operations on SGLang's internals that the hooks need.

    Each adapter class implements all of these operations.
    """

    # -- Hooks in the scheduler call the following methods.

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Replace the list `top_logprobs_nums` in the batch objects that a forward pass reads.

        Args:
            top_logprobs_nums: the new list, a `scheduler.step.TopLogprobsNums`. The list's attribute
                `forward_pass` records which rows of the pass belong to requests for candidate sets.
            batch: the batch from which SGLang made the `ForwardBatch`.
            forward_batch: the `ForwardBatch` of the forward pass.
        """

    def begin_pass(self, logits_output: Any) -> None:
        """Remove an earlier pass's candidate sets from `logits_output`. SGLang may reuse this object."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Attach candidate sets to a forward pass's results, before the results are copied to the host.

        Args:
            logits_output: SGLang's `LogitsProcessorOutput` of the pass.
            output: an object that holds the candidate sets of the forward pass. `output.copy_to_host` runs
                first. After the scheduler has added the new tokens to the requests, `output.consume` runs,
                and receives the new tokens as an argument.
        """

    def append(self, current: Any, output: Any) -> Any:
        """Combine two auxiliary outputs of one forward pass. Each of the two may be None.

        An auxiliary output holds extra results of a forward pass, such as the candidate sets in the argument
        `output` of `attach`.
        """

    def answers_requests(self) -> bool:
        """Return whether SGLang sends this rank's results to the client.

        If several ranks compute the same results, SGLang sends the results of only one rank.
        """

    def weight_version(self) -> str:
        """Return the current weight version, or an empty string if the scheduler knows no version."""

    def sampling(self) -> tuple[str, bool]:
        """Return the sampling backend, and whether `--rl-on-policy-target` is set.

        Raises:
            ValueError: SGLang has not set its configuration in this process.
        """

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Return a (module, attribute name) pair for each sampling kernel that `eagle_sample` looks up.

        SGLang's `eagle_sample` verifies the tokens of speculative decoding. If a kernel's module is not
        imported, the kernel's pair has None in place of the module. On a device without a sampling kernel,
        the module may lack the attribute.
        """

    def sanitizes_logits(self) -> bool:
        """Return whether the setting `SGLANG_SANITIZE_NAN_LOGITS` is on. The setting is off by default.

        If a grammar forbids every token in a row of logits, the request of this row fails. The other requests
        of the forward pass succeed only if `SGLANG_SANITIZE_NAN_LOGITS` is on.
        """

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Return, as a sequence on the host, the indices of the logits rows that score prompt tokens.

        The indices are in ascending order.

        Args:
            metadata: SGLang's `LogitsMetadata` of the forward pass.
            indices: int64, the same row indices in a tensor on the device.
        """

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute a prompt's log-probs with the operations that SGLang uses, in the same order.

        Args:
            processor: SGLang's `InputLogprobProcessor`. Before SGLang 0.5.16: SGLang's `LogitsProcessor`.
            logits: float [R, V], the logits of R rows over the V tokens of the vocabulary.
        """

    def align(self, reqs: Sequence[Any]) -> None:
        """Add missing keys to `customized_info`, so that all `reqs` have the same keys.

        The scheduler sends the new tokens of `reqs` in one message. If two requests in this message had
        different keys in `customized_info`, SGLang up to 0.5.14 would deliver one request's values to another
        request.
        """

    # -- Hooks in the HTTP process call the following methods.

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return a scheduler message's `customized_info`: for each key, a list with one entry per request."""

    def streams_increments(self, manager: Any) -> bool:
        """Return whether a streamed chunk holds only the new tokens, instead of all tokens so far.

        `manager` is SGLang's `TokenizerManager`.
        """

    def skips_tokenizer(self, manager: Any) -> bool:
        """Return whether the server runs without a tokenizer. `manager` is SGLang's `TokenizerManager`."""
