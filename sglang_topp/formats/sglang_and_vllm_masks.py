"""Decode the native sampling masks of unpatched SGLang and vLLM to candidate sets.

A sampling mask lists the tokens that the engine's sampler could draw. For SGLang, the request's field
`sampling_logprobs_mode` sets a mode, `"support"` or `"selected"`::

    SGLang   meta_info.output_token_sampling_mask[t] = [token_id, ...]
             meta_info.output_token_sampling_logprobs[t] = [logprob, ...] in mode "support",
                                                           the sampled token's logprob in mode "selected"
    vLLM     choices[i].sampling_mask[t] = [token_id, ...], or null if masks are off

SGLang renormalizes `output_token_sampling_logprobs` over the tokens of the mask. The decoder ignores SGLang's
field `output_token_sampling_mask_length`. In an incremental stream, each chunk holds only its own masks, but
this field also counts the masks of earlier chunks.

Shape legend: T positions, n tokens in all masks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import (
    first_true,
    offsets_of,
    rows_of,
    sorted_by_id,
    sorted_by_logprob,
)
from sglang_topp.candidates.validation import LOWEST, MAX_LOGPROB, as_float32, check_distinct
from sglang_topp.errors import MissingCandidateSetsError, SampledTokenMissingError, WireError
from sglang_topp.formats import output_token_logprobs
from sglang_topp.formats.field_parsing import (
    Decoded,
    check_count,
    check_range,
    check_vocab,
    integers,
    numbers,
    renaming_errors,
    token_ids_of,
)

__all__ = ["decode_sampling_mask"]

_MASK, _LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
_VLLM_MASK = "sampling_mask"


def decode_sampling_mask(
    meta_info: Mapping[str, Any], output_ids: ArrayLike, *, vocab_size: int | None = None
) -> CandidateSets:
    """Convert the native sampling masks of one answer into candidate sets.

    With `return_sampling_mask`, SGLang returns log-probs `r` that are renormalized over the mask. In mode
    `"support"` with `return_logprob`, SGLang also reports the log-prob of the sampled token `s` over the
    whole vocabulary. The decoder computes each candidate's log-prob over the whole vocabulary from `r` and
    `logprob[s]`. `logprob_sum` is the log of the mask's total probability::

        logprob[i] = r[i] + (logprob[s] - r[s])         logprob_sum = logprob[s] - r[s]

    The sets have no log-probs in three cases: the mode is `"selected"`, the request did not set
    `return_logprob`, or the answer is from vLLM. In mode `"selected"`, `output_token_sampling_logprobs` holds
    the old log-probs for importance ratios.

    Args:
        meta_info: SGLang's `meta_info`, or one of vLLM's `choices`.
        output_ids: integers [T], the generated tokens.
        vocab_size: if given, ids of `vocab_size` or more are errors.

    Raises:
        MissingCandidateSetsError: the response has no masks, or no mask for a position.
        SampledTokenMissingError: the mask of a position lacks the sampled token of that position.
        WireError: a field is malformed in any other way, or the log-probs in the fields
            `output_token_sampling_logprobs` and `output_token_logprobs` cannot belong to one distribution.
            `SGLANG_RETURN_ORIGINAL_LOGPROB=1` makes the log-probs in these two fields disagree at a
            temperature other than 1. The message names the invalid field.

    Example:
        >>> choice = {"sampling_mask": [[5, 3], [7]]}  # one of vLLM's choices
        >>> sets = decode_sampling_mask(choice, output_ids=[3, 7])
        >>> sets.to_lists()
        ([[3, 5], [7]], None)
        >>> sets.has_logprobs
        False
    """
    return _decode(meta_info, output_ids, vocab_size).to_sets()


def _decode(meta_info: Mapping[str, Any], output_ids: ArrayLike, vocab_size: int | None) -> Decoded:
    sampled = token_ids_of("output_ids", output_ids)
    name = _MASK if _MASK in meta_info else _VLLM_MASK
    if meta_info.get(name) is None:
        raise MissingCandidateSetsError(
            name, "there is no sampling mask; is return_sampling_mask in the request, and did it end well?"
        )
    ids, sizes = _read_ids(name, meta_info[name], len(sampled))
    check_range(name, ids, 0, "token ids from 0 on")
    check_vocab(name, ids, vocab_size)
    offsets = offsets_of(sizes)
    rows = rows_of(offsets)
    fields = dict.fromkeys(("token_ids", "offsets", "sampled_ids"), name) | {"logprobs": _LOGPROBS}
    with renaming_errors(fields):
        check_distinct(ids, rows)
    support = _read_support(meta_info.get(_LOGPROBS), sizes) if name == _MASK else None
    if support is None or meta_info.get(output_token_logprobs.FIELD) is None:
        return Decoded(sorted_by_id(rows, ids), None, offsets, sampled, fields)

    reported = output_token_logprobs.sampled_logprobs(meta_info, sampled)
    logprobs = _under_the_vocabulary(ids, support, rows, sampled, reported)
    # Drop tokens whose probability rounds to 0.
    kept = (logprobs > LOWEST) | np.isnan(logprobs) | (ids == sampled[rows])
    ids, logprobs, rows = ids[kept], logprobs[kept], rows[kept]
    offsets = offsets_of(np.bincount(rows, minlength=len(sampled)))
    return Decoded(*sorted_by_logprob(rows, ids, logprobs), offsets, sampled, fields)


def _under_the_vocabulary(
    ids: NDArray[np.int32],
    support: NDArray[np.float32],
    rows: NDArray[np.int32],
    sampled: NDArray[np.integer[Any]],
    reported: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return the whole-vocabulary log-probs of the n tokens in all masks, float32 [n].

    `support` holds the log-prob of each of the n tokens, renormalized over the mask of the token's position.
    `reported` holds each sampled token's log-prob over the whole vocabulary. At one position with sampled
    token `s`, the result for token `i` is `support[i] + (reported - support[s])`.
    """
    is_sampled = ids == sampled[rows]
    if len(lacking := np.setdiff1d(np.arange(len(sampled)), rows[is_sampled])):
        t = int(lacking[0])
        raise SampledTokenMissingError(
            _MASK, f"{sampled[t]} is not among the {np.count_nonzero(rows == t)} tokens at position {t}"
        )
    mass = np.bincount(rows, np.exp(support.astype(np.float64)), minlength=len(sampled))
    if (wrong := first_true(~(np.abs(mass - 1) <= MAX_LOGPROB))) is not None:
        raise WireError(
            _LOGPROBS, f"add up to a probability of {mass[wrong]:.4f} at position {wrong}, expected 1"
        )
    log_mass = reported.astype(np.float64) - support[is_sampled]
    if (wrong := first_true(~((log_mass <= MAX_LOGPROB) & (reported > LOWEST)))) is not None:
        raise WireError(
            _LOGPROBS,
            f"gives the sampled token at position {wrong} {support[is_sampled][wrong]}, and"
            f" {output_token_logprobs.FIELD} {reported[wrong]}, which are not of one distribution"
            " (SGLANG_RETURN_ORIGINAL_LOGPROB?)",
        )
    logprobs: NDArray[np.float32] = (support + log_mass[rows]).astype(np.float32)
    return logprobs


def _read_ids(name: str, rows: Any, num_tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Parse the masks of all positions to `(token_ids [n], sizes [T])`."""
    if not isinstance(rows, list) or not all(row is None or isinstance(row, list) for row in rows):
        raise WireError(name, "expected a list with one list of token ids (or null) per position")
    check_count(name, len(rows), num_tokens)
    rows = rows[:num_tokens]
    sizes = np.fromiter((len(row or ()) for row in rows), np.int64, len(rows))
    missing = np.flatnonzero(sizes == 0)
    if len(missing):
        raise MissingCandidateSetsError(
            name,
            f"no sampling mask at {len(missing)} of {len(rows)} positions, the first at {missing[0]};"
            " every generated token needs one",
        )
    return integers(name, list(chain.from_iterable(rows))), sizes


def _read_support(rows: Any, sizes: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return the log-probs of all tokens in the masks, float32 [n], or None if the answer lacks them.

    The log-probs are renormalized over each mask. SGLang reports the log-probs of all tokens in a mask only
    if `sampling_logprobs_mode` is "support".
    """
    if rows is None:
        return None
    if not isinstance(rows, list):
        raise WireError(_LOGPROBS, f"got {type(rows).__name__}, expected a list")
    check_count(_LOGPROBS, len(rows), len(sizes))
    rows = rows[: len(sizes)]
    if not any(isinstance(row, list) for row in rows):
        numbers(_LOGPROBS, rows)
        return None
    for t, (row, size) in enumerate(zip(rows, sizes.tolist(), strict=True)):
        if not isinstance(row, list) or len(row) != size:
            got = f"{len(row)} log-probs" if isinstance(row, list) else type(row).__name__
            raise WireError(_LOGPROBS, f"got {got} for the {size} tokens at position {t}")
    with renaming_errors({"logprobs": _LOGPROBS}):
        return as_float32("logprobs", numbers(_LOGPROBS, list(chain.from_iterable(rows))))
