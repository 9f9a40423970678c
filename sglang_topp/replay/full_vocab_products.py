"""Compute an LM head's logits and gradients over the whole vocabulary, one chunk of positions at a time.

Shape legend: T positions, H hidden size, V ids of this rank, C positions per chunk. In the logits and their
gradient, V excludes the ids of padding rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.replay.full_vocab_softmax import row_parts
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.vocab_shard_reductions import reduce_sum

__all__ = ["CHUNK_BYTES", "HeadGradients", "VocabHead"]

# The default limit, in bytes, on the logits of one chunk of positions. The argument `chunk_rows` of
# `head_logprobs` and `distillation_loss` replaces this limit.
CHUNK_BYTES = 1 << 28
_WEIGHT_ROWS = 1 << 13


class VocabHead:
    """The matrix products of an LM head: logits, and the gradients of hidden states and weight.

    The results have the dtype `dtype`. On a GPU, if hidden states and weight have the same half-precision
    dtype, tensor cores multiply in that dtype and sum in float32. The gradient of the logits is first
    converted to that dtype. In all other cases, all matrices are first converted to `dtype`.
    """

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        *,
        num_ids: int,
        transform: LogitTransform,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self.transform = transform
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
        """Return the logits [C, V] in `dtype`, after bias, scale, soft cap, and temperature."""
        logits_CV = self._product(self.hidden_TH[part], self.weight_VH.t())
        if self.bias_V is not None:
            logits_CV += self.bias_V[: logits_CV.shape[1]]
        return self.transform.of_rows_(logits_CV, part)

    def times_weight(self, grad_CV: Tensor) -> Tensor:
        """Return the gradient [C, H] of a chunk's hidden states.

        `grad_CV` is the gradient of `hidden . weight + bias`, the LM head's raw output before scale, soft
        cap, and temperature.
        """
        return self._product(grad_CV, self.weight_VH)

    def add_outer(self, grad_VH: Tensor, grad_CV: Tensor, part: slice) -> None:
        """Add the weight's gradient from one chunk to `grad_VH`, without a second [V, H] tensor."""
        right = self.hidden_TH[part]
        if not self.mixed:
            grad_VH[: grad_CV.shape[1]].addmm_(grad_CV.t(), right.to(self.dtype))
            return
        for rows in row_parts(grad_CV.shape[1], _WEIGHT_ROWS):
            grad_VH[rows] += self._product(grad_CV[:, rows].t(), right)


class HeadGradients:
    """Gradients of hidden states, weight, and bias, accumulated chunk by chunk in `VocabHead.dtype`."""

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
        """Add one chunk's gradients to the accumulated gradients.

        The method overwrites `grad_CV`, the loss's gradient with respect to `head.logits(part)`. `slope_CV`
        is the result of `LogitTransform.softcap_slope` at the same logits.
        """
        hidden_TH, weight_VH, bias_V = self._sums
        self._head.transform.backward_rows_(grad_CV, slope_CV, part)
        if hidden_TH is not None:
            hidden_TH[part] = self._head.times_weight(grad_CV)
        if weight_VH is not None:
            self._head.add_outer(weight_VH, grad_CV, part)
        if bias_V is not None:
            bias_V[: grad_CV.shape[1]] += grad_CV.sum(dim=0)

    def rounded(self, group: dist.ProcessGroup | None) -> list[Tensor | None]:
        """Return the gradients of hidden states, weight, and bias, each in the dtype of its tensor.

        Before rounding, the method sums the gradient of the hidden states over the ranks of `group`.
        """
        if self._sums[0] is not None:
            reduce_sum(self._sums[0], group)
        return [
            None if total is None or like is None else total.to(like.dtype)
            for total, like in zip(self._sums, self._like, strict=True)
        ]
