"""Error codes that the GPU kernels write for each row, and the exceptions that the codes stand for."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus.argument_checks import not_logprobs, sampled_out_of_range

__all__ = ["NOT_LOGPROBS", "SAMPLED_OUT_OF_RANGE", "TOKEN_OUT_OF_RANGE", "ZERO_PROBABILITY", "row_error"]

SAMPLED_OUT_OF_RANGE = 1
"""The sampled id is outside the vocabulary."""
NOT_LOGPROBS = 2
"""The row holds NaN or a value above 0. The error detail is NaN or the highest value, as float32 bits."""
TOKEN_OUT_OF_RANGE = 3
"""The token id of a weight is outside the vocabulary. The error detail is the token id."""
ZERO_PROBABILITY = 4
"""A token of probability 0 has a positive weight and was not sampled. The error detail is the token's id."""


def row_error(row: int, code: int, detail: int, sampled_B: Tensor | None, vocab: int) -> InvalidInputError:
    """Return the exception for a row's error code and detail.

    The function reads `sampled_B` only for an invalid sampled id, because the read waits for the device.
    """
    if code == NOT_LOGPROBS:
        return not_logprobs(row, float(np.int32(detail).view(np.float32)))
    if code == TOKEN_OUT_OF_RANGE:
        return InvalidInputError(f"token_ids: got {detail} in row {row}, outside of 0 to {vocab - 1}")
    if code == ZERO_PROBABILITY:
        return InvalidInputError(
            f"weights: row {row} can draw token {detail}, whose log-prob is -inf;"
            " expected one above zero probability"
        )
    assert code == SAMPLED_OUT_OF_RANGE
    assert sampled_B is not None
    return sampled_out_of_range(row, int(sampled_B[row]), vocab)
