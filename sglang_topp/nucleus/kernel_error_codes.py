"""Error codes that the GPU kernels write for each row, and the exceptions that the codes stand for."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus.argument_checks import not_logprobs, sampled_out_of_range

__all__ = ["NOT_LOGPROBS", "SAMPLED_OUT_OF_RANGE", "TOKEN_OUT_OF_RANGE", "ZERO_PROBABILITY", "row_error"]

SAMPLED_OUT_OF_RANGE = 1
"""Error code: the sampled token id of the row is outside the vocabulary."""
NOT_LOGPROBS = 2
"""Error code: the kernel read NaN or a value above 0 in the row of log-probs.

The error detail is NaN or the highest value that the kernel read, as float32 bits.
"""
TOKEN_OUT_OF_RANGE = 3
"""Error code: a token id with a positive weight is outside the vocabulary. The error detail is that id."""
ZERO_PROBABILITY = 4
"""Error code: a token that was not sampled has probability 0, but a positive weight.

The error detail is the id of that token.
"""


def row_error(row: int, code: int, detail: int, sampled_B: Tensor | None, vocab: int) -> InvalidInputError:
    """Return the exception for the error code and the error detail that a kernel wrote for a row.

    The function reads `sampled_B` only for the code `SAMPLED_OUT_OF_RANGE`, because the read waits for the
    GPU.
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
