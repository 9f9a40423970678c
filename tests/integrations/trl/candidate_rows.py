"""Random completions with random candidate sets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp_integrations.trl import _ScoredRows

__all__ = ["random_rows"]

ROWS, PROMPT, WIDTH = 3, 4, 6


def random_rows(vocab_size: int, *, set_size: int = 8, seed: int = 0) -> tuple[_ScoredRows, Tensor]:
    """Return the rows, and `input_ids` [3, 10] whose last 6 tokens are the completions.

    The second completion has 4 tokens, and the third is masked as a whole.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, vocab_size, (ROWS, PROMPT + WIDTH))
    lengths = [WIDTH, 4, WIDTH]
    sets = []
    for row, length in zip(ids[:, PROMPT:], lengths, strict=True):
        spans = []
        for token in row[:length]:
            others = rng.permutation(np.delete(np.arange(vocab_size), token))[: set_size - 1]
            spans.append(np.sort(np.append(others, token)))
        logprobs = np.full(length * set_size, -np.log(set_size), np.float32)
        offsets = np.arange(length + 1) * set_size
        sets.append(CandidateSets(np.concatenate(spans), logprobs, offsets, row[:length]))
    mask = torch.arange(WIDTH) < torch.tensor([WIDTH, 4, 0])[:, None]
    input_ids = torch.tensor(ids)
    return _ScoredRows(sets, input_ids[:, PROMPT:], mask.long()), input_ids
