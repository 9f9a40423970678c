"""Adapt to SGLang 0.5.16 to 0.5.18, where processors compute log-probs.

These releases do not copy a plugin's output to the host. `scheduler.auxiliary_output_before_0_5_19` does.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_topp_patches.compat.internals.sglang_0_5_19_and_later import Sglang0519

__all__ = ["Sglang0516", "Sglang0518", "take"]

_FIELD = "sglang_topp_device_output"


def take(logits_output: Any) -> Any:
    """Remove our output from a pass's `LogitsProcessorOutput` and return it; None if there is none."""
    output = getattr(logits_output, _FIELD, None)
    if output is not None:
        setattr(logits_output, _FIELD, None)
    return output


class Sglang0518(Sglang0519):
    """`Internals` of 0.5.18."""

    def begin_pass(self, logits_output: Any) -> None:
        """Remove the output of an earlier pass, because SGLang reuses the object."""
        take(logits_output)

    def attach(self, logits_output: Any, output: Any) -> None:
        """Store the output in an attribute of our own, because SGLang has no field for it."""
        setattr(logits_output, _FIELD, self.append(take(logits_output), output))

    def weight_version(self) -> str:
        """Return an empty string: in these releases, the scheduler does not know the version."""
        return ""


class Sglang0516(Sglang0518):
    """`Internals` of 0.5.16 and 0.5.17, which score all prompts with `log_softmax`."""

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Use `log_softmax`, as these releases do for every prompt."""
        return torch.nn.functional.log_softmax(logits, dim=-1)
