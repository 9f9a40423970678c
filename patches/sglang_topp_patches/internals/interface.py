"""What a hook asks of SGLang's insides, the same whatever the release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Internals"]


class Internals(Protocol):
    """SGLang's insides, as the hooks use them."""

    # -- in the scheduler

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Have a pass carry a list in place of its own.

        Args:
            top_logprobs_nums: equal to what is there.
            batch: what SGLang made the `ForwardBatch` from.
            forward_batch: that one.
        """

    def begin_pass(self, logits_output: Any) -> None:
        """Let nothing of an earlier pass stay on the output of this one."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Have an output travel to the host with a pass.

        Args:
            logits_output: SGLang's `LogitsProcessorOutput` of the pass.
            output: what `copy_to_host` and then `consume` are called of, with the tokens that became visible.
        """

    def append(self, current: Any, output: Any) -> Any:
        """Two outputs of one pass as one; None is no output."""

    def answers_requests(self) -> bool:
        """Whether this rank's results reach the client; the other ranks only mirror them."""

    def weight_version(self) -> str:
        """The name of the weights that a pass runs with now; empty where the scheduler is not told."""

    def sampling(self) -> tuple[str, bool]:
        """Which backend samples, and whether it does as `--rl-on-policy-target` has it.

        Raises:
            ValueError: SGLang has not told this process.
        """

    def sanitizes_logits(self) -> bool:
        """Whether a row without a token to draw fails alone: a switch of SGLang's, off by default."""

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Which rows of a pass score a prompt token, rising.

        Args:
            metadata: SGLang's `LogitsMetadata`.
            indices: the same on the device, int64.
        """

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """A prompt's log-probs exactly as SGLang reports them, in its own order of operations.

        Args:
            processor: what scores prompts there.
            logits: float [R, V].
        """

    def prompt_rows(self) -> list[Any]:
        """An empty list for `customized_info` whose entries go out once per request, whole."""

    def align(self, reqs: Sequence[Any]) -> None:
        """Make the `customized_info` of requests that are sent together such that each arrives with its
        own."""

    # -- in the HTTP process

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """What the scheduler sent for extensions, one list per key with an entry per request."""

    def streams_increments(self, manager: Any) -> bool:
        """Whether a chunk of a stream holds what is new alone, by SGLang's `TokenizerManager`."""

    def skips_tokenizer(self, manager: Any) -> bool:
        """Whether the server has no tokenizer, by SGLang's `TokenizerManager`."""
