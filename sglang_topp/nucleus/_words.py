"""What a kernel finds wrong with a row: a word that it leaves, read once the host has it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus._arguments import not_logprobs, sampled_out_of_range

__all__ = ["NOT_LOGPROBS", "NO_TOKEN", "OUT_OF_RANGE", "ZERO_PROBABILITY", "problem"]

OUT_OF_RANGE = 1
"""The sampled id is no token."""
NOT_LOGPROBS = 2
"""NaN, or a value above 0; the word beside it has the bits of the highest, or of NaN."""
NO_TOKEN = 3
"""A weight's id is no token; the word beside it is that id."""
ZERO_PROBABILITY = 4
"""A token of probability 0, which was not sampled, has a weight; the word beside it is its id."""


def problem(row: int, word: int, detail: int, sampled_B: Tensor | None, vocab: int) -> InvalidInputError:
    """The error that a row's two words stand for; `sampled_B` is read where it is to blame."""
    if word == NOT_LOGPROBS:
        return not_logprobs(row, float(np.int32(detail).view(np.float32)))
    if word == NO_TOKEN:
        return InvalidInputError(f"token_ids: got {detail} in row {row}, outside of 0 to {vocab - 1}")
    if word == ZERO_PROBABILITY:
        return InvalidInputError(
            f"weights: row {row} can draw token {detail}, whose log-prob is -inf;"
            " expected one above zero probability"
        )
    assert word == OUT_OF_RANGE
    assert sampled_B is not None
    return sampled_out_of_range(row, int(sampled_B[row]), vocab)
