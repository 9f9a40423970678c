"""The LM head over every id that a rank holds, a chunk of positions at a time: logits, and gradients back.

Shape legend: T positions, H hidden size, V ids held by this rank that are no padding, C positions of
one chunk.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.replay.parallel import reduce_sum
from sglang_topp.replay.vocab_softmax import row_parts

__all__ = ["CHUNK_BYTES", "HeadGradients", "VocabHead"]

# Logits that are held at one time, unless the caller says otherwise.
CHUNK_BYTES = 1 << 28
_WEIGHT_ROWS = 1 << 13


class VocabHead:
    """The products of one pass: logits of a chunk, and a chunk's gradient back through the head.

    Sums run in `dtype`. On a GPU half-precision factors go to the tensor cores as they are and come
    out in float32; elsewhere they are widened first.
    """

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        *,
        num_ids: int,
        temperature: float | Tensor,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self.temperature = temperature
        self.softcap = softcap
        self.hidden_TH = hidden_TH
        self.weight_VH = weight_VH[:num_ids]
        self.bias_V = bias_V
        self.mixed = (
            hidden_TH.is_cuda and hidden_TH.dtype == weight_VH.dtype and hidden_TH.dtype != self.dtype
        )
        if not self.mixed:
            self.weight_VH = self.weight_VH.to(self.dtype)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        product: Tensor
        if self.mixed:
            product = torch.mm(left.to(right.dtype), right, out_dtype=self.dtype)
        else:
            product = torch.mm(left.to(self.dtype), right.to(self.dtype))
        return product

    def logits(self, part: slice) -> Tensor:
        """[C, V] of `dtype`: after bias, soft cap and temperature."""
        logits_CV = self._product(self.hidden_TH[part], self.weight_VH.t())
        if self.bias_V is not None:
            logits_CV += self.bias_V[: logits_CV.shape[1]]
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return self.divide_by_temperature(logits_CV, part)

    def divide_by_temperature(self, values_CV: Tensor, part: slice) -> Tensor:
        """In place."""
        if isinstance(self.temperature, Tensor):
            return values_CV.div_(self.temperature[part, None].to(values_CV))
        return values_CV if self.temperature == 1.0 else values_CV.div_(self.temperature)

    def softcap_slope(self, logits_CV: Tensor, part: slice) -> Tensor | None:
        """`1 - tanh^2` of the raw logits, from what `logits` returned; None without a soft cap."""
        if self.softcap is None:
            return None
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[part, None].to(logits_CV)
        return (logits_CV * (temperature / self.softcap)).square_().neg_().add_(1.0)

    def times_weight(self, grad_CV: Tensor) -> Tensor:
        """[C, H]: the gradient of the chunk's hidden states."""
        return self._product(grad_CV, self.weight_VH)

    def add_outer(self, grad_VH: Tensor, grad_CV: Tensor, part: slice) -> None:
        """Add the chunk's gradient of the head, some rows at a time: a whole one would double it."""
        right = self.hidden_TH[part]
        if not self.mixed:
            grad_VH[: grad_CV.shape[1]].addmm_(grad_CV.t(), right.to(self.dtype))
            return
        for rows in row_parts(grad_CV.shape[1], _WEIGHT_ROWS):
            grad_VH[rows] += self._product(grad_CV[:, rows].t(), right)


class HeadGradients:
    """Collects the gradients of hidden states, weight and bias, chunk by chunk, in the head's `dtype`."""

    def __init__(
        self,
        head: VocabHead,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self._head, self._like = head, (hidden_TH, weight_VH, bias_V)
        self._sums = [
            torch.zeros_like(tensor, dtype=head.dtype) if wants and tensor is not None else None
            for tensor, wants in zip(self._like, wanted, strict=True)
        ]

    def add(self, part: slice, grad_CV: Tensor, slope_CV: Tensor | None) -> None:
        """Take in the gradient of what `head.logits(part)` gave, which is overwritten."""
        hidden_TH, weight_VH, bias_V = self._sums
        self._head.divide_by_temperature(grad_CV, part)
        if slope_CV is not None:
            grad_CV *= slope_CV
        if hidden_TH is not None:
            hidden_TH[part] = self._head.times_weight(grad_CV)
        if weight_VH is not None:
            self._head.add_outer(weight_VH, grad_CV, part)
        if bias_V is not None:
            bias_V[: grad_CV.shape[1]] += grad_CV.sum(dim=0)

    def rounded(self, group: dist.ProcessGroup | None) -> list[Tensor | None]:
        """The three gradients, in their tensors' dtypes; that of the hidden states over all ranks."""
        if self._sums[0] is not None:
            reduce_sum(self._sums[0], group)
        return [
            None if total is None or like is None else total.to(like.dtype)
            for total, like in zip(self._sums, self._like, strict=True)
        ]
