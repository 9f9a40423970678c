"""Encode and decode candidate sets in an engine's answers: the plugin's fields, and native sampling masks.

The plugin writes sets to SGLang's `meta_info`, as base64 or as lists, and the top-k log-probs as base64::

    {output,input}_top_p_logprobs_val_base64   log-probs of all candidates, position after position
    {output,input}_top_p_logprobs_idx_base64   token ids of all candidates
    {output,input}_top_p_logprobs_lengths      one set size per position; -1 if SGLang has no distribution

    {output,input}_top_p_logprobs[t] = [[logprob, token_id, text or null], ...], or null

A sampling mask, which needs no plugin, lists the tokens that the engine's sampler could draw. For SGLang, the
request's field `sampling_logprobs_mode` sets a mode, `"support"` or `"selected"`::

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

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates import csr_operations as csr
from sglang_topp.candidates.validation import LOWEST, MAX_LOGPROB, as_array
from sglang_topp.errors import MissingCandidateSetsError, WireError
from sglang_topp.formats import field_parsing as parsing
from sglang_topp.formats.field_parsing import FLOAT32, INT32

Side: TypeAlias = Literal["output", "input"]

NO_DISTRIBUTION = -1
"""The number in `lengths` for a position without a distribution, such as the prompt's first token."""

_SETS, _TOP_K = "output_top_p_logprobs", "output_top_logprobs"
_TOKENS = "output_token_logprobs"
_MASK, _LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
_VLLM_MASK = "sampling_mask"


def has_top_p(meta_info: Mapping[str, Any]) -> bool:
    """Return whether the response has candidate sets of generated tokens, as base64 or as lists."""
    return any(key.startswith(_SETS) for key in meta_info)


def encode_top_p(
    side: Side, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], lengths: Sequence[int]
) -> dict[str, Any]:
    """Encode candidate sets as the three `meta_info` fields of the base64 form.

    Args:
        side: `"output"` for generated positions, `"input"` for prompt positions.
        token_ids: int32 [n], the candidates' token ids, position after position.
        logprobs: float32 [n], the candidates' log-probs, in the order of `token_ids`.
        lengths: for each position, the set size, or `NO_DISTRIBUTION`.
    """
    name = f"{side}_top_p_logprobs"
    return {
        f"{name}_val_base64": parsing.b64text(logprobs, FLOAT32),
        f"{name}_idx_base64": parsing.b64text(token_ids, INT32),
        f"{name}_lengths": list(lengths),
    }


def encode_top_k(
    side: Side, logprobs: Sequence[Sequence[float] | None], token_ids: Sequence[Sequence[int] | None]
) -> dict[str, Any]:
    """Encode top-k log-probs as the `meta_info` fields of the plugin's base64 form.

    The base64 fields encode an array of log-probs [R, k] and an array of token ids [R, k]. A position without
    a distribution has no row in the arrays. `{side}_top_logprobs_shape` is `[R, k]`.
    `{side}_top_logprobs_none_positions` lists the positions without a row, in ascending order.

    Args:
        logprobs: one list for each of T positions. The list holds k log-probs. A position without a
            distribution has None or an empty list.
        token_ids: one list for each of T positions. The list holds k token ids in the order of `logprobs`.
    """
    name = f"{side}_top_logprobs"
    there = [t for t, row in enumerate(logprobs) if row and token_ids[t]]
    values = np.array([logprobs[t] for t in there], FLOAT32)
    ids = np.array([token_ids[t] for t in there], INT32)
    return {
        f"{name}_val_base64": parsing.b64text(values, FLOAT32),
        f"{name}_idx_base64": parsing.b64text(ids, INT32),
        f"{name}_shape": list(values.shape) if there else [0, 0],
        f"{name}_none_positions": sorted(set(range(len(logprobs))).difference(there)),
    }


def decode_top_p(
    meta_info: Mapping[str, Any],
    output_ids: ArrayLike,
    *,
    vocab_size: int | None = None,
    side: Side = "output",
) -> CandidateSets:
    """Decode the candidate sets of the tokens in a `/generate` response, from base64 or lists.

    Args:
        meta_info: the response's `meta_info`.
        output_ids: integers [T], the response's `output_ids`, or the prompt's tokens with `side="input"`.
        vocab_size: if given, ids of `vocab_size` or more are errors.
        side: `"input"` for the sets of the prompt. The response has them from the request's
            `logprob_start_len` on, so pass the prompt's tokens from there on. Each counts as the sampled
            token of its position. Do not take the ids from `input_token_logprobs`, where SGLang 0.5.23
            reports the vocabulary's last id as 0. The set of the prompt's first token is empty, because
            SGLang has no distribution for it.

    Raises:
        MissingCandidateSetsError: the response has no sets, or no set for a generated token.
        SampledTokenMissingError: the set of a position lacks the sampled token of that position.
        WireError: a field is malformed in any other way. The message names the invalid field.
    """
    name, sampled = f"{side}_top_p_logprobs", parsing.token_ids_of(f"{side}_ids", output_ids)
    if name in meta_info:
        values = ids = counts = name
        token_ids, logprobs, lengths = parsing.read_lists(name, meta_info[name])
    else:
        values, ids, counts = keys = f"{name}_val_base64", f"{name}_idx_base64", f"{name}_lengths"
        missing = set(keys) - meta_info.keys()
        if len(missing) == len(keys):
            raise MissingCandidateSetsError(
                name,
                "the response holds no candidate sets; is top_logprobs_p in the request, and does the server"
                " run the sglang-topp plugin (`sglang-topp doctor`)?",
            )
        if missing:
            raise WireError(min(missing), "missing beside the other fields of the sets")
        logprobs = parsing.b64array(values, meta_info[values], FLOAT32)
        token_ids = parsing.b64array(ids, meta_info[ids], INT32)
        lengths = parsing.numbers(counts, meta_info[counts], np.int32)
        if len(lengths) and (lowest := lengths.min()) < NO_DISTRIBUTION:
            raise WireError(counts, f"got {lowest}, expected set sizes, or -1 for none")
    fields = {"token_ids": ids, "logprobs": values, "offsets": counts, "sampled_ids": ids}
    required = "candidate set" if side == "output" else ""
    parsing.check_rows(fields, token_ids, lengths, len(sampled), vocab_size, required)
    with parsing.renaming_errors(fields):
        # A position without a distribution gets an empty set.
        return CandidateSets(token_ids, logprobs, csr.offsets_of(np.maximum(lengths, 0)), sampled)


def merge_stream_chunks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the output fields of consecutive stream chunks into the fields of one chunk.

    Args:
        parts: the `meta_info` of each chunk, in stream order. Each chunk's `meta_info` holds only the
            positions since the previous chunk.

    Returns:
        The joined `meta_info` fields: candidate sets in base64 or list form, and top-k log-probs as
        `encode_top_k` writes them. If any chunk lacks a field, the result lacks that field too, and the
        decoder then reports an incomplete answer.
    """
    shared = {key for key in parts[0] if all(key in part for part in parts)}
    merged: dict[str, Any] = {}
    for key in shared.intersection((_SETS, f"{_SETS}_lengths")):
        merged[key] = list(chain.from_iterable(part[key] for part in parts))
    for key in shared.intersection(
        f"{name}_{kind}_base64" for name in (_SETS, _TOP_K) for kind in ("val", "idx")
    ):
        merged[key] = parsing.b64text(
            np.concatenate([parsing.b64array(key, part[key], np.uint8) for part in parts]), np.uint8
        )
    if (none := f"{_TOP_K}_none_positions") in shared:
        shapes = [part[f"{_TOP_K}_shape"] for part in parts]
        sizes = [rows + len(part[none]) for (rows, _), part in zip(shapes, parts, strict=True)]
        starts = csr.offsets_of(sizes).tolist()
        merged[f"{_TOP_K}_shape"] = [sum(rows for rows, _ in shapes), max(width for _, width in shapes)]
        merged[none] = [start + t for start, part in zip(starts, parts, strict=False) for t in part[none]]
    return merged


# -- sampling masks -----------------------------------------------------------------------------------------


def _sampled_logprobs(
    meta_info: Mapping[str, Any], sampled_ids: NDArray[np.integer[Any]]
) -> NDArray[np.float32]:
    """Return float32 [T]: the log-probs of the T sampled tokens, from `output_token_logprobs`.

    Raise WireError unless the field lists exactly the tokens `sampled_ids`, in order.
    """
    if meta_info.get(_TOKENS) is None:
        raise WireError(_TOKENS, "missing; it holds the sampled tokens' log-probs (`return_logprob`)")
    # The field is a list with one entry [logprob, token_id, text] per token: the row of one position.
    token_ids, given, _ = parsing.read_lists(_TOKENS, [meta_info[_TOKENS]])
    if len(token_ids) != len(sampled_ids):
        raise WireError(_TOKENS, f"got {len(token_ids)} positions for {len(sampled_ids)} tokens")
    with parsing.renaming_errors({"logprobs": _TOKENS}):
        logprobs = as_array("logprobs", given, np.float32)
    if (t := csr.first_true(token_ids != sampled_ids)) is not None:
        raise WireError(_TOKENS, f"got token {token_ids[t]} at position {t}; the output is {sampled_ids[t]}")
    if (t := csr.first_true(~(logprobs <= MAX_LOGPROB))) is not None:
        raise WireError(_TOKENS, f"got {logprobs[t]} at position {t}, expected at most 0 and no NaN")
    return logprobs


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
    ids = parsing.token_ids_of(name, list(chain.from_iterable(row or () for row in masks)))
    fields = {"token_ids": name, "logprobs": _LOGPROBS, "offsets": name, "sampled_ids": name}
    parsing.check_rows(fields, ids, sizes, len(sampled), vocab_size, "sampling mask")
    offsets = csr.offsets_of(sizes)
    rows = csr.rows_of(offsets)
    with parsing.renaming_errors(fields):
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
        order = np.lexsort((ids, -logprobs, rows))
        ids, logprobs = ids[order], logprobs[order]
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
    is_support = isinstance(rows, list) and any(isinstance(row, list) for row in rows)
    given = rows if is_support else parsing.numbers(_LOGPROBS, rows)
    if len(given) != len(sizes):
        raise WireError(_LOGPROBS, f"got {len(given)} positions for {len(sizes)} tokens")
    if not is_support:
        return None
    for t, (row, size) in enumerate(zip(rows, sizes.tolist(), strict=True)):
        if not isinstance(row, list) or len(row) != size:
            got = f"{len(row)} log-probs" if isinstance(row, list) else type(row).__name__
            raise WireError(_LOGPROBS, f"got {got} for the {size} tokens at position {t}")
    return as_array("logprobs", parsing.numbers(_LOGPROBS, list(chain.from_iterable(rows))), np.float32)
