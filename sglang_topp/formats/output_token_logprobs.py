"""Read the sampled tokens' log-probs (`output_token_logprobs`) from answers of SGLang, patched or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.candidates.csr_operations import first_true
from sglang_topp.candidates.validation import MAX_LOGPROB, as_float32
from sglang_topp.errors import WireError
from sglang_topp.formats.field_parsing import check_count, entry_rows, renaming_errors

__all__ = ["FIELD", "sampled_logprobs"]

FIELD = "output_token_logprobs"


def sampled_logprobs(
    meta_info: Mapping[str, Any], sampled_ids: NDArray[np.integer[Any]]
) -> NDArray[np.float32]:
    """Return float32 [T]: the log-probs of the T sampled tokens, from `output_token_logprobs`.

    Raise WireError unless `output_token_logprobs` lists exactly the tokens `sampled_ids`, in order.
    """
    if meta_info.get(FIELD) is None:
        raise WireError(FIELD, "missing; it holds the sampled tokens' log-probs (`return_logprob`)")
    # `output_token_logprobs` is a list with one entry [logprob, token_id, text] per token. `entry_rows`
    # expects a list of lists of entries, so put the field into a list of length 1.
    token_ids, given, _ = entry_rows(FIELD, [meta_info[FIELD]])
    check_count(FIELD, len(given), len(sampled_ids))
    with renaming_errors({"logprobs": FIELD}):
        logprobs = as_float32("logprobs", given[: len(sampled_ids)])
    if (t := first_true(token_ids[: len(sampled_ids)] != sampled_ids)) is not None:
        raise WireError(FIELD, f"got token {token_ids[t]} at position {t}; the output is {sampled_ids[t]}")
    if (t := first_true(~(logprobs <= MAX_LOGPROB))) is not None:
        raise WireError(FIELD, f"got {logprobs[t]} at position {t}, expected at most 0 and no NaN")
    return logprobs
