"""Adapters to the internals of SGLang 0.5.16 to 0.5.18.

In these releases, SGLang's log-prob processors compute the log-probs. Before 0.5.16, the sampler computes
the log-probs. SGLang 0.5.16 to 0.5.18 does not copy a plugin's results to the host. The hooks in
`scheduler.host_copy_before_0_5_19` therefore copy the candidate sets.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_topp_patches.compat.internals.sglang_0_5_19_and_later import Sglang0519

__all__ = ["Sglang0516", "Sglang0518", "take"]

_FIELD = "sglang_topp_device_output"


def take(logits_output: Any) -> Any:
    """Remove and return the candidate sets of a `LogitsProcessorOutput`, or return None if it has none."""
    output = getattr(logits_output, _FIELD, None)
    if output is not None:
        setattr(logits_output, _FIELD, None)
    return output


class Sglang0518(Sglang0519):
    """Adapter to SGLang 0.5.18."""

    def begin_pass(self, logits_output: Any) -> None:
        """Remove the candidate sets of an earlier pass, because SGLang reuses `logits_output`."""
        take(logits_output)

    def attach(self, logits_output: Any, output: Any) -> None:
        """Store the sets in a new attribute of `logits_output`, because SGLang has no field for the sets."""
        setattr(logits_output, _FIELD, self.append(take(logits_output), output))

    def weight_version(self) -> str:
        """Return an empty string: in these releases, the scheduler does not know the weight version."""
        return ""


class Sglang0516(Sglang0518):
    """Adapter to SGLang 0.5.16 and 0.5.17, which score all prompts with `log_softmax`."""

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute the log-probs with `log_softmax`, as these releases do for every prompt."""
        return torch.nn.functional.log_softmax(logits, dim=-1)
