"""Decode SGLang's top log-probs, and the sampling masks of SGLang and vLLM, which need no plugin.

Top log-probs (`top_logprobs_num`) are the k most likely tokens of each position. `meta_info` holds them in
one of four forms, the last of which is the plugin's (`encode_top_k`)::

    SGLang, lists         output_top_logprobs[t] = [[logprob, token_id, text or null], ...], or null
    SGLang, flat arrays   output_top_logprobs_{val_flat,idx_flat,shape,null_prefix}
    SGLang, base64        output_top_logprobs_{val_flat_b64,idx_flat_b64,shape,null_prefix}
                          output_top_logprobs_{val_flat_b64,idx_flat_b64}_dtype
    plugin, base64        output_top_logprobs_{val_base64,idx_base64,shape,none_positions}

The field `shape` is `[R, k]`: the log-probs and the token ids are two arrays of R rows of k numbers. A
position without a distribution, such as the prompt's first token, has no row in these arrays. SGLang's field
`null_prefix` is the number of leading positions without a row. The plugin's field `none_positions` lists
the positions without a row.

A sampling mask lists the tokens that the engine's sampler could draw. For SGLang, the request's field
`sampling_logprobs_mode` sets a mode, `"support"` or `"selected"`::

    SGLang   meta_info.output_token_sampling_mask[t] = [token_id, ...]
             meta_info.output_token_sampling_logprobs[t] = [logprob, ...] in mode "support",
                                                           the sampled token's logprob in mode "selected"
    vLLM     choices[i].sampling_mask[t] = [token_id, ...], or null if masks are off

SGLang renormalizes `output_token_sampling_logprobs` over the tokens of the mask. The decoder ignores SGLang's
field `output_token_sampling_mask_length`. In an incremental stream, each chunk holds only its own masks, but
this field also counts the masks of earlier chunks.

If `max_new_tokens` is 0, SGLang reports one position, although there is no token. An answer without tokens
therefore has no sets, whatever its fields hold.

Shape legend: T positions, R positions with a distribution, n tokens over all positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates import csr_operations as csr
from sglang_topp.candidates.validation import LOWEST, MAX_LOGPROB, as_float32, check_distinct
from sglang_topp.errors import (
    InvalidInputError,
    MissingCandidateSetsError,
    WireError,
    describe,
)
from sglang_topp.formats import field_parsing as parsing
from sglang_topp.formats.field_parsing import FLOAT32, INT32, CandidateRows

_TOKENS = "output_token_logprobs"
_TOP_K = "output_top_logprobs"
_SHAPE = f"{_TOP_K}_shape"
_MASK, _LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
_VLLM_MASK = "sampling_mask"


def _sampled_logprobs(
    meta_info: Mapping[str, Any], sampled_ids: NDArray[np.integer[Any]]
) -> NDArray[np.float32]:
    """Return float32 [T]: the log-probs of the T sampled tokens, from `output_token_logprobs`.

    Raise WireError unless the field lists exactly the tokens `sampled_ids`, in order.
    """
    if meta_info.get(_TOKENS) is None:
        raise WireError(_TOKENS, "missing; it holds the sampled tokens' log-probs (`return_logprob`)")
    # The field is a list with one entry [logprob, token_id, text] per token: the row of one position.
    row = CandidateRows.of_lists(_TOKENS, [meta_info[_TOKENS]])
    parsing.check_count(_TOKENS, len(row.token_ids), len(sampled_ids))
    with parsing.renaming_errors(row.fields):
        logprobs = as_float32("logprobs", row.logprobs)
    if (t := csr.first_true(row.token_ids != sampled_ids)) is not None:
        raise WireError(
            _TOKENS, f"got token {row.token_ids[t]} at position {t}; the output is {sampled_ids[t]}"
        )
    if (t := csr.first_true(~(logprobs <= MAX_LOGPROB))) is not None:
        raise WireError(_TOKENS, f"got {logprobs[t]} at position {t}, expected at most 0 and no NaN")
    return logprobs


# -- top log-probs ------------------------------------------------------------------------------------------


def decode_top_k(
    meta_info: Mapping[str, Any], output_ids: ArrayLike, k: int, *, vocab_size: int | None = None
) -> CandidateSets:
    """Decode each position's k most likely tokens as a candidate set.

    The request must have `top_logprobs_num` >= `k`.

    The response may come from SGLang with or without the plugin. Let `q` be the probabilities at position
    `t`. The candidate set of position `t` is::

        C_t = { i : fewer than k tokens j have q[j] > q[i] }  ∪  { the sampled token }

    If the response lists more than `k` tokens, the set also keeps listed tokens that are as likely as the
    k-th. SGLang omits tied tokens after the k-th if `top_logprobs_num` equals `k`. To get the tied tokens
    too, set `top_logprobs_num` slightly higher than `k`. The decoder drops unsampled tokens of zero
    probability. The sampled token's log-prob comes from `output_token_logprobs`.

    Args:
        meta_info: the response's `meta_info`. By default, SGLang returns lists (`output_top_logprobs`).
            SGLang returns flat arrays, as JSON or base64, if the request has
            `return_flat_raw_output_top_logprobs`. The plugin returns base64 arrays if the request has
            `return_logprobs_in_base64`.
        output_ids: integers [T], the response's `output_ids`.
        k: how many of the most likely tokens to keep at each position, 1 or more.
        vocab_size: if given, ids of `vocab_size` or more are errors.

    Raises:
        InvalidInputError: `k` is not an integer of 1 or more.
        MissingCandidateSetsError: the response has no top log-probs, or none for a position.
        WireError: a field lists fewer than `k` tokens for a position, or is malformed in any other way. The
            message names the invalid field.
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise InvalidInputError(f"k: got {k!r}, expected an integer of 1 or more")
    sampled = parsing.token_ids_of("output_ids", output_ids)
    forms = ("base64", "flat_b64", "flat")
    kinds = [kind for kind in forms if meta_info.keys() & {f"{_TOP_K}_val_{kind}", f"{_TOP_K}_idx_{kind}"}]
    if not kinds and meta_info.get(_TOP_K) is None:
        raise MissingCandidateSetsError(
            _TOP_K, "the response holds no fixed-k log-probs; is top_logprobs_num in the request?"
        )
    if not len(sampled):
        return CandidateSets.empty(0)
    if kinds:
        listed = _top_k_arrays(meta_info, kinds[0], len(sampled))
    else:
        listed = CandidateRows.of_lists(_TOP_K, meta_info[_TOP_K])
    listed.check(len(sampled), vocab_size, "log-probs")
    fields, ids, lengths = listed.fields, listed.token_ids, listed.lengths
    if (t := csr.first_true(lengths < k)) is not None:
        raise WireError(
            fields["offsets"],
            f"lists {lengths[t]} tokens at position {t}, expected {k} or more; is top_logprobs_num {k}?",
        )
    parsing.check_range(fields["token_ids"], ids, 0, "token ids from 0 on")
    offsets = csr.offsets_of(lengths)
    rows = csr.rows_of(offsets)
    with parsing.renaming_errors(fields):
        logprobs = as_float32("logprobs", listed.logprobs)
        check_distinct(ids, rows)
        if (e := csr.first_true(np.isnan(logprobs))) is not None:
            raise WireError(fields["logprobs"], f"got nan at position {rows[e]}")
        reported = _sampled_logprobs(meta_info, sampled)

        # A listed token has the reported log-prob. An unlisted one is not more likely than any listed token.
        is_sampled = ids == sampled[rows]
        own, lowest = np.maximum(reported, LOWEST), np.minimum.reduceat(logprobs, offsets[:-1])
        is_wrong, unlisted = own > np.maximum(lowest, LOWEST), np.ones(len(sampled), np.bool_)
        unlisted[rows[is_sampled]] = False
        is_wrong[rows[is_sampled]] = own[~unlisted] != np.maximum(logprobs[is_sampled], LOWEST)
        if (t := csr.first_true(is_wrong)) is not None:
            raise WireError(
                _TOKENS,
                f"gives the sampled token at position {t} the log-prob {reported[t]}, which is at odds with"
                f" {fields['logprobs']}; they are of different tokens or distributions",
            )
        ends, offsets = offsets[1:][unlisted], offsets + csr.offsets_of(unlisted)
        ids = np.insert(ids, ends, sampled[unlisted])
        logprobs = np.insert(logprobs, ends, reported[unlisted])
        rows = csr.rows_of(offsets)
        ids, logprobs = csr.sorted_by_logprob(rows, ids, logprobs)
        kth = logprobs[offsets[:-1] + (k - 1)]
        kept = ((logprobs >= kth[rows]) & (logprobs > LOWEST)) | (ids == sampled[rows])
        sizes = np.bincount(rows[kept], minlength=len(sampled))
        return CandidateSets(ids[kept], logprobs[kept], csr.offsets_of(sizes), sampled)


def _top_k_arrays(meta_info: Mapping[str, Any], kind: str, num_tokens: int) -> CandidateRows:
    """Parse top log-probs in arrays of `kind`: "base64", "flat_b64", or "flat"."""
    values, ids = f"{_TOP_K}_val_{kind}", f"{_TOP_K}_idx_{kind}"
    nowhere = f"{_TOP_K}_none_positions" if kind == "base64" else f"{_TOP_K}_null_prefix"
    parsing.check_together(meta_info, (values, ids, _SHAPE, nowhere))
    logprobs: NDArray[np.floating[Any]]
    if kind == "flat":
        logprobs, token_ids = (
            parsing.numbers(values, meta_info[values]),
            parsing.integers(ids, meta_info[ids]),
        )
    else:
        for key, expected in ((values, "float32"), (ids, "int32")):
            if kind == "flat_b64" and (got := meta_info.get(f"{key}_dtype")) != expected:
                raise WireError(f"{key}_dtype", f"got {describe(got)}, expected {expected!r}")
        logprobs = parsing.b64array(values, meta_info[values], FLOAT32)
        token_ids = parsing.b64array(ids, meta_info[ids], INT32)
    shape = parsing.integers(_SHAPE, meta_info[_SHAPE]).tolist()
    if len(shape) != 2 or min(shape) < 0:
        raise WireError(_SHAPE, f"got {str(shape)[:80]}, expected [rows, k]")
    none = parsing.integers(nowhere, meta_info[nowhere] if kind == "base64" else [meta_info[nowhere]])
    num_none = len(none) if kind == "base64" else int(none[0])
    # Check the number of positions before an array of them is allocated, because it may be huge.
    parsing.check_count(_SHAPE, shape[0] + num_none, num_tokens)
    if kind != "base64":
        none = np.arange(num_none, dtype=np.int32)
    if num_none < 0 or (np.diff(none, prepend=-1, append=num_tokens) <= 0).any():
        raise WireError(nowhere, f"expected positions below {num_tokens}, in ascending order")
    for key, array in ((values, logprobs), (ids, token_ids)):
        if len(array) != shape[0] * shape[1]:
            raise WireError(
                key, f"got {len(array)} numbers, expected {shape[0]} x {shape[1]}, as in {_SHAPE}"
            )
    lengths = np.full(num_tokens, shape[1], np.int32)
    lengths[none] = -1
    return CandidateRows(token_ids, logprobs, lengths, parsing.fields_of(ids, values, _SHAPE))


# -- sampling masks -----------------------------------------------------------------------------------------


def decode_sampling_mask(
    meta_info: Mapping[str, Any], output_ids: ArrayLike, *, vocab_size: int | None = None
) -> CandidateSets:
    """Convert the native sampling masks of one answer into candidate sets.

    With `return_sampling_mask`, SGLang returns log-probs `r` that are renormalized over the mask. In mode
    `"support"` with `return_logprob`, SGLang also reports the log-prob of the sampled token `s` over the
    whole vocabulary. The decoder computes each candidate's log-prob over the whole vocabulary from `r` and
    `logprob[s]`. `log_kept_mass` is the log of the mask's total probability::

        logprob[i] = r[i] + (logprob[s] - r[s])         log_kept_mass = logprob[s] - r[s]

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
    sampled = parsing.token_ids_of("output_ids", output_ids)
    name = _MASK if _MASK in meta_info else _VLLM_MASK
    if (masks := meta_info.get(name)) is None:
        raise MissingCandidateSetsError(
            name, "there is no sampling mask; is return_sampling_mask in the request, and did it end well?"
        )
    if not len(sampled):
        return CandidateSets.empty(0)
    if not isinstance(masks, list) or not all(row is None or isinstance(row, list) for row in masks):
        raise WireError(name, "expected a list with one list of token ids (or null) per position")
    sizes = np.fromiter((len(row or ()) for row in masks), np.int64, len(masks))
    ids = parsing.integers(name, list(chain.from_iterable(row or () for row in masks)))
    fields = parsing.fields_of(name, _LOGPROBS, name)
    CandidateRows(ids, np.empty(0), sizes, fields).check(len(sampled), vocab_size, "sampling mask")
    parsing.check_range(name, ids, 0, "token ids from 0 on")
    offsets = csr.offsets_of(sizes)
    rows = csr.rows_of(offsets)
    with parsing.renaming_errors(fields):
        check_distinct(ids, rows)
        bare = CandidateSets(csr.sorted_by_id(rows, ids), None, offsets, sampled)
        support = _read_support(meta_info.get(_LOGPROBS), sizes) if name == _MASK else None
        if support is None or meta_info.get(_TOKENS) is None:
            return bare
        reported = _sampled_logprobs(meta_info, sampled)
        mass = np.bincount(rows, np.exp(support.astype(np.float64)), minlength=len(sampled))
        if (t := csr.first_true(~(np.abs(mass - 1) <= MAX_LOGPROB))) is not None:
            raise WireError(
                _LOGPROBS, f"add up to a probability of {mass[t]:.4f} at position {t}, expected 1"
            )
        within = support[ids == sampled[rows]]
        log_mass = reported.astype(np.float64) - within
        if (t := csr.first_true(~((log_mass <= MAX_LOGPROB) & (reported > LOWEST)))) is not None:
            raise WireError(
                _LOGPROBS,
                f"gives the sampled token at position {t} {within[t]}, and {_TOKENS} {reported[t]}, which are"
                " not of one distribution (SGLANG_RETURN_ORIGINAL_LOGPROB?)",
            )
        logprobs = (support + log_mass[rows]).astype(np.float32)
        ids, logprobs = csr.sorted_by_logprob(rows, ids, logprobs)
        kept = (logprobs > LOWEST) | (ids == sampled[rows])  # without tokens whose probability rounds to 0
        sizes = np.bincount(rows[kept], minlength=len(sampled))
        return CandidateSets(ids[kept], logprobs[kept], csr.offsets_of(sizes), sampled)


def _read_support(rows: Any, sizes: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return the log-probs of all tokens in the masks, float32 [n], or None if the answer lacks them.

    The log-probs are renormalized over each mask. SGLang reports the log-probs of all tokens in a mask only
    if `sampling_logprobs_mode` is "support".
    """
    if rows is None:
        return None
    if not isinstance(rows, list) or not any(isinstance(row, list) for row in rows):
        parsing.check_count(_LOGPROBS, len(parsing.numbers(_LOGPROBS, rows)), len(sizes))
        return None
    parsing.check_count(_LOGPROBS, len(rows), len(sizes))
    for t, (row, size) in enumerate(zip(rows, sizes.tolist(), strict=True)):
        if not isinstance(row, list) or len(row) != size:
            got = f"{len(row)} log-probs" if isinstance(row, list) else type(row).__name__
            raise WireError(_LOGPROBS, f"got {got} for the {size} tokens at position {t}")
    return as_float32("logprobs", parsing.numbers(_LOGPROBS, list(chain.from_iterable(rows))))
