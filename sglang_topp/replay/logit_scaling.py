"""Convert an LM head's raw output to logits: apply scale, soft cap, and temperature, in SGLang's order.

The raw output of an LM head is `hidden . weight + bias`.

Shape legend: T positions, C positions of one chunk, V ids held by this rank, m candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.vocab_shards import first_true

__all__ = ["LogitTransform"]


@dataclass(frozen=True, eq=False)
class LogitTransform:
    """The conversion of an LM head's raw output into the policy's logits `z`.

    ::

        z = softcap * tanh(logit_scale * raw / softcap) / temperature
        z = logit_scale * raw / temperature                            without a soft cap
    """

    temperature: float | Tensor
    """One number above 0, or a tensor [T] of numbers above 0."""
    softcap: float | None = None
    logit_scale: float = 1.0

    @classmethod
    def of(
        cls,
        temperature: float | Tensor,
        num_positions: int,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        may_wait: bool = True,
    ) -> LogitTransform:
        """Check the arguments, copy a `temperature` tensor, and build a transform.

        If `may_wait` is False, this method does not wait for the device. An invalid value in a `temperature`
        tensor on an accelerator then raises no error, but becomes NaN in the transform's `temperature`.

        Raises:
            InvalidInputError: an argument is not positive and finite, `temperature` is neither one number nor
                one number per position, or `temperature` requires a gradient.
        """
        if softcap is not None and not 0 < softcap < math.inf:
            raise InvalidInputError(f"softcap: got {softcap}, expected a positive number or None")
        if not 0 < logit_scale < math.inf:
            raise InvalidInputError(
                f"logit_scale: got {logit_scale}, expected a positive number; for a model that divides its"
                " logits (Granite's logits_scaling), pass 1 over its divisor"
            )
        return cls(_check_temperature(temperature, num_positions, may_wait), softcap, float(logit_scale))

    def of_entries(self, raw_m: Tensor, positions_m: Tensor) -> Tensor:
        """Convert the candidates' raw outputs `raw_m`, at the positions `positions_m`, to logits [m].

        The logits are differentiable in `raw_m`.
        """
        logits = raw_m if self.logit_scale == 1.0 else raw_m * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if isinstance(self.temperature, Tensor):
            return logits / self.temperature.to(logits).index_select(0, positions_m)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def of_rows_(self, raw_CV: Tensor, part: slice) -> Tensor:
        """Overwrite the raw outputs `raw_CV` with logits.

        `part` is the slice that selects the C positions from all T positions.
        """
        if self.softcap is None:
            return self._divide_(raw_CV, part, self.logit_scale)
        raw_CV.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap)
        return self._divide_(raw_CV, part)

    def softcap_slope(self, logits_CV: Tensor, part: slice) -> Tensor | None:
        """Return the soft cap's derivative, `1 - tanh^2`, or None without a soft cap.

        `logits_CV` holds the logits `softcap * tanh / temperature`. The method therefore computes `tanh` as
        `logits_CV * temperature / softcap`.
        """
        if self.softcap is None:
            return None
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[part, None].to(logits_CV)
        return (logits_CV * (temperature / self.softcap)).square_().neg_().add_(1.0)

    def backward_rows_(self, grad_CV: Tensor, slope_CV: Tensor | None, part: slice) -> Tensor:
        """Overwrite `grad_CV`, the gradient of the logits, with the gradient of the raw outputs.

        `slope_CV` is the result of `softcap_slope` at the same logits.
        """
        self._divide_(grad_CV, part, self.logit_scale)
        return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)

    def take(self, positions: Tensor) -> LogitTransform:
        """Return the transform for only the positions with the indices `positions` (1-D int64)."""
        if not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature.to(positions.device).index_select(0, positions))

    def _divide_(self, values_CV: Tensor, part: slice, factor: float = 1.0) -> Tensor:
        """Multiply `values_CV` by `factor / temperature` in place, in one pass."""
        if isinstance(self.temperature, Tensor):
            return values_CV.div_(self.temperature[part, None].to(values_CV) / factor)
        return values_CV if self.temperature == factor else values_CV.div_(self.temperature / factor)


def _check_temperature(temperature: float | Tensor, num_positions: int, may_wait: bool) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < math.inf:
            raise InvalidInputError(f"temperature: got {temperature}, expected a positive number")
        return float(temperature)
    if temperature.shape not in ((), (num_positions,)):
        raise InvalidInputError(
            f"temperature: got shape {tuple(temperature.shape)}, expected one number or [{num_positions}]"
        )
    if temperature.requires_grad:
        raise InvalidInputError("temperature: it requires a gradient, and none is computed; detach it")
    is_valid = (temperature > 0) & temperature.isfinite()
    if not may_wait and temperature.device.type != "cpu":
        return torch.where(is_valid, temperature, torch.nan).expand(num_positions)
    if (bad := first_true(~is_valid.reshape(-1))) is not None:
        raise InvalidInputError(
            f"temperature: got {float(temperature.reshape(-1)[bad])} at position {bad}, expected above 0"
        )
    # Copy the temperatures, because the caller may overwrite the tensor for the next batch before the
    # backward reads the temperatures.
    return temperature.clone() if temperature.ndim else float(temperature)
