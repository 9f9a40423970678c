"""SGLang 0.5.16 to 0.5.18: log-probs have their own processors, and a request carries `customized_info`;
nothing brings what an extension took from a pass to the host (`lifecycle` does)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_topp_patches.internals.auxiliary_output import SingleAuxiliaryOutput

__all__ = ["CustomizedInfo", "CustomizedInfoOneNormalizer", "take"]

_FIELD = "sglang_topp_device_output"


def take(logits_output: Any) -> Any:
    """What rides on a pass's output (SGLang's `LogitsProcessorOutput`), off it; None where nothing does."""
    output = getattr(logits_output, _FIELD, None)
    if output is not None:
        setattr(logits_output, _FIELD, None)
    return output


class CustomizedInfo(SingleAuxiliaryOutput):
    """`Internals` of 0.5.18."""

    def begin_pass(self, logits_output: Any) -> None:
        """What the object was used for before is over."""
        take(logits_output)

    def attach(self, logits_output: Any, output: Any) -> None:
        """By a field of our own."""
        setattr(logits_output, _FIELD, self.append(take(logits_output), output))

    def weight_version(self) -> str:
        """The scheduler is not told."""
        return ""


class CustomizedInfoOneNormalizer(CustomizedInfo):
    """`Internals` of 0.5.16 and 0.5.17, whose prompts are scored in one way."""

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """By `log_softmax`."""
        return torch.nn.functional.log_softmax(logits, dim=-1)
