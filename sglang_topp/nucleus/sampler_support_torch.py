"""In plain torch, find the tokens that a sampler could draw in each row, and their log-probs.

A sampler draws the token of a row in proportion to the row's sampling weights. So it could draw every token
with a weight above 0.

Shape legend: R rows of sampling weights, V ids in the vocabulary, W sampling weights per row, n candidates
over all rows. Without the argument `token_ids_RW`, every id of the vocabulary has a weight, and W is V. With
`token_ids_RW`, only the ids in `token_ids_RW` have weights, so W may be less than V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_topp.candidates.validation import MAX_LOGPROB
from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus.argument_checks import not_logprobs, sampled_out_of_range
from sglang_topp.nucleus.top_p_torch import sort_key_descending

__all__ = ["support_candidates"]


def support_candidates(
    logprobs_RV: Tensor, weights_RW: Tensor, token_ids_RW: Tensor | None, sampled_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sglang_topp.nucleus.support_candidates` in plain torch, for checked arguments."""
    num_rows, vocab = logprobs_RV.shape
    nonsense_R = (sampled_R < 0) | (sampled_R >= vocab)
    if bool(nonsense_R.any()):
        worst = int(nonsense_R.nonzero()[0])
        raise sampled_out_of_range(worst, int(sampled_R[worst]), vocab)
    row_n, column_n = (weights_RW > 0).nonzero(as_tuple=True)
    ids_n = column_n if token_ids_RW is None else token_ids_RW[row_n, column_n].long()
    lacking_R = torch.ones_like(nonsense_R)
    lacking_R[row_n[ids_n == sampled_R[row_n]]] = False
    forced_R = lacking_R.nonzero().squeeze(1)
    row_n = torch.cat([row_n, forced_R])
    ids_n = torch.cat([ids_n, sampled_R[forced_R]])

    logprobs_n = logprobs_RV[row_n, ids_n]
    possible_n = logprobs_n > torch.finfo(logprobs_n.dtype).min
    # `wrong_n` also marks a NaN log-prob, because `~(x <= limit)` is true for NaN. Only the sampled token may
    # have probability 0.
    wrong_n = ~(logprobs_n <= MAX_LOGPROB) | ~(possible_n | (ids_n == sampled_R[row_n]))
    if bool(wrong_n.any()):
        worst = int(wrong_n.nonzero()[0])
        if bool(possible_n[worst]) or bool(logprobs_n[worst].isnan()):
            raise not_logprobs(int(row_n[worst]), float(logprobs_n[worst]))
        raise InvalidInputError(
            f"weights: row {int(row_n[worst])} can draw token {int(ids_n[worst])}, whose log-prob is"
            f" {float(logprobs_n[worst]):g}; expected one above zero probability"
        )

    logprobs_n = logprobs_n.float()
    if token_ids_RW is not None or len(forced_R):
        order_n = ids_n.argsort(stable=True)
        row_n, ids_n, logprobs_n = row_n[order_n], ids_n[order_n], logprobs_n[order_n]
    order_n = ((row_n << 32) + sort_key_descending(logprobs_n)).argsort(stable=True)
    offsets = torch.zeros(num_rows + 1, dtype=torch.int64, device=logprobs_RV.device)
    torch.cumsum(torch.bincount(row_n, minlength=num_rows), 0, out=offsets[1:])
    return ids_n[order_n].int(), logprobs_n[order_n], offsets
