"""Append each newly visible token's candidate set to the token's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_topp_patches.compat.releases import internals
from sglang_topp_patches.scheduler.request_budget import charge, end_without_set
from sglang_topp_patches.scheduler_messages import KEY, Entry, Span

__all__ = ["add_entries", "lowest_logprob"]


def add_entries(
    req: Any, output_index: int, found: Sequence[tuple[Span | None, str]], weight_version: str
) -> None:
    """Append one entry for each token to a request's `customized_info`.

    A missing set becomes an entry with a problem, and ends the request as an error.

    Args:
        req: SGLang's `Req`.
        output_index: the index of the first token in the request's output.
        found: each token's set, or None and the reason why it is missing.
        weight_version: the version of the weights that drew the tokens.
    """
    if req.customized_info is None:
        req.customized_info = {}
    entries = req.customized_info.setdefault(KEY, [])
    # If a retracted request's prompt came as embeddings, SGLang generates the answer again from the start.
    del entries[output_index:]
    skipped = output_index - len(entries)
    entries += [Entry(None, "a token became visible without passing through the sampler")] * skipped
    entries += [Entry(span, problem, weight_version=weight_version) for span, problem in found]
    if skipped > 0 or any(problem for _, problem in found):
        end_without_set(req)
    else:
        charge(req, sum(len(span[0]) // 4 for span, _ in found if span is not None), len(found))


def lowest_logprob() -> float | None:
    """Return the log-prob at or below which a probability is 0, or None for the dtype's lowest value.

    With `SGLANG_SANITIZE_NAN_LOGITS`, which `sglang-topp serve` sets, a logit of -1e30 stands for -inf. Where
    SGLang reports `log_softmax` (greedy rows), a forbidden token has a finite log-prob near -1e30.
    """
    return -1e20 if internals().sanitizes_logits() else None
