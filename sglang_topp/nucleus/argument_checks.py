"""Check the arguments of `top_p_candidates` and `support_candidates`, and name what is wrong with them.

The shapes, the dtypes, and the thresholds are checked before the extraction starts. Log-probs and sampled ids
are checked by the extraction itself, because it reads them anyway. A Triton kernel can raise nothing: it
writes an error code and a detail for each row, from which `kernel_error` makes the exception.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_topp.errors import InvalidInputError

# If a row has several errors, a kernel reports the one with the highest code.
ZERO_PROBABILITY = 1
"""A token that was not sampled has probability 0, but a positive weight. The detail is `~token_id`."""
NOT_LOGPROBS = 2
"""The kernel read NaN or a value above 0 in the row of log-probs. The detail is its float32 bits."""
TOKEN_OUT_OF_RANGE = 3
"""A token id with a positive weight is outside the vocabulary. The detail is that id."""
SAMPLED_OUT_OF_RANGE = 4
"""The sampled token id of the row is outside the vocabulary. The detail is that id."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def check_top_p_arguments(
    logprobs: Tensor, p: float | Sequence[float] | Tensor, sampled_ids: Sequence[int] | Tensor | None
) -> tuple[Tensor, NDArray[np.float64], Tensor | None]:
    """Check the shapes and dtypes of the arguments of `top_p_candidates`, and the values of `p`.

    The torch and Triton implementations check the values of `logprobs` and `sampled_ids` while they read the
    two tensors.

    Returns:
        `(logprobs, p, sampled_ids)`. `logprobs` is [B, V], with float64 converted to float32. `p` is float64
        [B] on the host. `sampled_ids` is int64 [B] on the device of `logprobs`, or None.
    """
    logprobs = _checked_logprobs(logprobs)
    p_B = _thresholds(p, len(logprobs))
    return logprobs, p_B, None if sampled_ids is None else _checked_sampled(sampled_ids, logprobs)


def check_support_arguments(
    logprobs: Tensor, weights: Tensor, token_ids: Tensor | None, sampled_ids: Sequence[int] | Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Check the arguments of `support_candidates`.

    The torch and Triton implementations use `token_ids` as indices into the rows of `logprobs`. The function
    therefore also checks the values of `token_ids`.

    Returns:
        `(logprobs, is_drawn, token_ids, sampled_ids)`. `logprobs` is [R, V], with float64 converted to
        float32. `is_drawn` is bool [R, W], True where a weight is above 0. `token_ids` has shape [R, W], or
        is None. `sampled_ids` is int64 [R] on the device of `logprobs`.
    """
    logprobs = _checked_logprobs(logprobs)
    rows, vocab = logprobs.shape
    if not isinstance(weights, Tensor) or weights.ndim != 2 or len(weights) != rows:
        raise InvalidInputError(f"weights: got {_describe(weights)}, expected a tensor [{rows}, W]")
    if token_ids is None:
        if weights.shape[1] != vocab:
            raise InvalidInputError(
                f"weights: got {_describe(weights)} without token_ids, expected [{rows}, {vocab}]"
            )
    elif token_ids.shape != weights.shape or token_ids.dtype not in _INTEGERS:
        raise InvalidInputError(
            f"token_ids: got {_describe(token_ids)}, expected integers {list(weights.shape)}"
        )
    elif token_ids.numel() and not (int(token_ids.amin()) >= 0 and int(token_ids.amax()) < vocab):
        raise InvalidInputError(f"token_ids: got ids outside of 0 to {vocab - 1}")
    return logprobs, weights > 0, token_ids, _checked_sampled(sampled_ids, logprobs)


def _checked_logprobs(logprobs: Tensor) -> Tensor:
    if not isinstance(logprobs, Tensor) or logprobs.ndim != 2 or logprobs.dtype not in _DTYPES:
        raise InvalidInputError(f"logprobs: got {_describe(logprobs)}, expected a float tensor [B, V]")
    vocab = logprobs.shape[1]
    if not 0 < vocab <= 1 << 24:  # the kernels' sums would overflow; no tokenizer has a tenth of that
        raise InvalidInputError(f"logprobs: got a vocabulary of {vocab}, expected 1 to 2^24")
    return (logprobs.float() if logprobs.dtype == torch.float64 else logprobs).detach()


def _checked_sampled(sampled_ids: Sequence[int] | Tensor, logprobs: Tensor) -> Tensor:
    rows = len(logprobs)
    try:
        sampled = torch.as_tensor(sampled_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"sampled_ids: expected {rows} integers: {error}") from None
    if sampled.shape != (rows,) or (sampled.dtype not in _INTEGERS and rows):
        raise InvalidInputError(f"sampled_ids: got {_describe(sampled)}, expected integers [{rows}]")
    return sampled.to(logprobs.device, torch.int64)


def _thresholds(p: float | Sequence[float] | Tensor, rows: int) -> NDArray[np.float64]:
    """Return the checked thresholds `p` as float64 [B] on the host."""
    try:
        p_B = np.asarray(p.detach().cpu().double() if isinstance(p, Tensor) else p)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"p: expected a float or {rows} floats: {error}") from None
    if p_B.dtype.kind not in "fiu" and p_B.size:
        raise InvalidInputError(f"p: got {p_B.dtype}, expected a float or {rows} floats")
    if p_B.shape not in ((), (rows,)):
        raise InvalidInputError(f"p: got shape {list(p_B.shape)}, expected a float or [{rows}]")
    values = p_B.reshape(-1)
    if (wrong := np.flatnonzero(~((values >= 0) & (values <= 1)))).size:
        where = f" for row {wrong[0]}" if p_B.ndim else ""
        raise InvalidInputError(f"p: got {values[wrong[0]]}{where}, expected 0 to 1")
    return np.broadcast_to(p_B.astype(np.float64, copy=False), rows)


def row_error(row: int, code: int, detail: float, vocab: int = 0) -> InvalidInputError:
    """Return the exception for an error in a row.

    Args:
        code: one of the codes above.
        detail: the log-prob for NOT_LOGPROBS, or else the token id.
        vocab: V, for the two codes of ids that are out of range.
    """
    if code == NOT_LOGPROBS:
        problem = "NaN" if np.isnan(detail) else f"{detail:g}, which is above 0"
        return InvalidInputError(
            f"logprobs: row {row} holds {problem}; expected natural log-probs, at most 0"
        )
    if code == ZERO_PROBABILITY:
        return InvalidInputError(
            f"weights: row {row} can draw token {detail}, whose log-prob is -inf;"
            " expected one above zero probability"
        )
    if code == TOKEN_OUT_OF_RANGE:
        return InvalidInputError(f"token_ids: got {detail} in row {row}, outside of 0 to {vocab - 1}")
    assert code == SAMPLED_OUT_OF_RANGE
    return InvalidInputError(f"sampled_ids: got {detail} for row {row}, expected 0 to {vocab - 1}")


def kernel_error(row: int, error: int, vocab: int) -> InvalidInputError:
    """Return the exception for the error that a kernel wrote for a row.

    Args:
        error: an int64 above 0. Its highest bits, from bit 60 on, are the code. The others are the detail, as
            a two's complement.
    """
    code, detail = error >> 60, ((error & ((1 << 60) - 1)) ^ (1 << 59)) - (1 << 59)
    if code == NOT_LOGPROBS:
        return row_error(row, code, float(np.int32(detail).view(np.float32)))
    return row_error(row, code, ~detail if code == ZERO_PROBABILITY else detail, vocab)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
