"""Triton kernels that extract top-p candidate sets without making the host wait for the sets' sizes.

The first kernel cuts each row of log-probs into blocks of neighboring token ids, and computes the maximum of
every block. The second kernel selects the blocks with the highest maxima as active blocks: just enough blocks
that the probabilities of their maxima sum to `p` or more. The active blocks contain the whole nucleus,
because their maxima alone reach `p`, and every token in another block is less likely than each of these
maxima. If the sum over all blocks is below `p`, every block with a token of non-zero probability is active.
The second kernel then searches the active blocks for the exact cutoff, which separates the nucleus's
log-probs from lower log-probs. The last kernel writes out the tokens of the nucleus.

A block's maximum says nothing about its other tokens. In a real vocabulary, digits and punctuation marks are
neighbors, so a block often holds several likely tokens, and the maxima alone may not reach `p`. Before the
second kernel selects more than 64 blocks, it therefore adds up, in the 64 blocks with the highest maxima (in
fewer, if maxima are equal), the probabilities of all tokens above the other blocks' maxima. If the sum
reaches `p`, these blocks contain the nucleus. If it does not, for example because all tokens are about
equally likely, the kernel keeps all the blocks that it selected, and the extraction takes longer.

The search for the cutoff compares sort keys. A sort key is an integer that stands for a log-prob. A higher
log-prob has a lower sort key (`top_p_torch.sort_key_descending`). The search starts with an interval of sort
keys. Each round compares several pivot keys with the keys of all log-probs in the active blocks, and narrows
the interval. The search ends when at most one of these log-probs has its key in the interval, or when the
interval is a single key. The search takes about ten rounds. Every round needs the same log-probs, so the
kernel keeps them in registers if they fit.

One Triton program sums the probabilities of a row in float64 and in a fixed order, so results are bitwise
reproducible. The kernels are not specialized on arguments that change between decode steps, so Triton does
not recompile a kernel at a later step.

Shape legend: B rows, V ids in the vocabulary, N blocks of S tokens, C candidates that the output has room
for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_topp.candidates.validation import MAX_LOGPROB
from sglang_topp.nucleus.argument_checks import NOT_LOGPROBS, SAMPLED_OUT_OF_RANGE

__all__ = ["Cuts", "compact", "find_cuts", "launch", "place"]

_BLOCK = 64
_MAX_BLOCKS = 1 << 13  # the most blocks per row; a vocabulary of more than 2^19 ids gets larger blocks
_BLOCKS_AT_ONCE = 64
_TILE = 512
_HELD = 4096  # the most values that `_search` keeps in registers
_PIVOTS = 8
_WARPS = 16
_HIGHEST = tl.constexpr(MAX_LOGPROB)
_SAMPLED_OUT_OF_RANGE, _NOT_LOGPROBS = tl.constexpr(SAMPLED_OUT_OF_RANGE), tl.constexpr(NOT_LOGPROBS)


class Cuts(NamedTuple):
    """Each row's nucleus cutoff and candidate set size, on the device of the rows' log-probs.

    Attributes:
        sizes: int32 [B], the number of candidates of each row, including the sampled token.
        error_codes: int32 [B], the error code of each row (`argument_checks`), or 0 if the row has no
            error.
        highest: float32 [B], the highest log-prob of each row, or NaN if the row holds NaN.
        keys: int32 [B], the nucleus cutoff of each row, as a sort key (`top_p_torch.sort_key_descending`). A
            token is in the nucleus if its sort key is below the row's cutoff.
        blocks: int32 [B, N]. The first `active[b]` elements of `blocks[b]` are the indices, in ascending
            order, of the blocks that can hold tokens of row `b`'s nucleus.
        active: int32 [B], how many blocks of each row can hold tokens of the row's nucleus.
        block: S, the number of tokens in a block.
    """

    sizes: Tensor
    error_codes: Tensor
    highest: Tensor
    keys: Tensor
    blocks: Tensor
    active: Tensor
    block: int


def launch(tensor: Tensor) -> torch.cuda.device:
    """Return a context manager that makes the tensor's GPU the current device.

    Triton launches kernels on the current device.
    """
    return torch.cuda.device(tensor.get_device())


def find_cuts(logprobs_BV: Tensor, limits_B: Tensor, sampled_B: Tensor | None, lowest: float) -> Cuts:
    """Find the cutoff of each row's nucleus, without making the host wait for the GPU.

    Args:
        logprobs_BV: floats on a GPU, contiguous along a row.
        limits_B: float64, the total probability at which each row's nucleus ends. A token is in the nucleus
            if the probabilities of all more likely tokens sum to less than the row's limit. A row with a
            limit of 0 gets an empty set.
        sampled_B: int64, the sampled token id of each row, or None. A row whose sampled id is outside the
            vocabulary gets an error code.
        lowest: log-probs at or below this value stand for probability 0.
    """
    num_rows, vocab = logprobs_BV.shape
    block = max(_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, _MAX_BLOCKS)))
    num_blocks = triton.cdiv(vocab, block)
    device = logprobs_BV.device
    maxima_BN = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    blocks_BN = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    sizes_B, error_codes_B, keys_B, active_B = (
        torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(4)
    )
    highest_B = torch.empty(num_rows, dtype=torch.float32, device=device)
    cuts = Cuts(sizes_B, error_codes_B, highest_B, keys_B, blocks_BN, active_B, block)
    if not num_rows:
        return cuts
    blocks_at_once = max(1, _BLOCKS_AT_ONCE * _BLOCK // block)
    with launch(logprobs_BV):
        _maxima_kernel[(num_rows, triton.cdiv(num_blocks, blocks_at_once))](
            logprobs_BV,
            limits_B,
            maxima_BN,
            vocab,
            num_blocks,
            logprobs_BV.stride(0),
            BLOCK=block,
            BLOCKS=blocks_at_once,
        )
        _cut_kernel[(num_rows,)](
            logprobs_BV,
            limits_B,
            sampled_B,
            maxima_BN,
            *cuts[:-1],
            vocab,
            num_blocks,
            logprobs_BV.stride(0),
            _key(lowest),
            HAS_SAMPLED=sampled_B is not None,
            BLOCK=block,
            HELD=_size(cuts, _HELD),
            TILE=_size(cuts, _TILE),
            PIVOTS=_PIVOTS,
            num_warps=_WARPS,
        )
    return cuts


def place(sizes_B: Tensor, capacity: int) -> Tensor:
    """Return int64 [B]: each set's start index in the output, or -1 if the set does not fit.

    The sets follow each other in the output, in the order of their rows. A set of more than `capacity`
    candidates gets the start index -1 and takes no space. If a set of at most `capacity` candidates does not
    fit into the remaining space, that set and all later sets get the start index -1.
    """
    starts_B = torch.empty_like(sizes_B, dtype=torch.int64)
    if len(sizes_B):
        with launch(sizes_B):
            _place_kernel[(1,)](sizes_B, starts_B, len(sizes_B), capacity, TILE=_TILE)
    return starts_B


def compact(
    logprobs_BV: Tensor, sampled_B: Tensor | None, cuts: Cuts, starts_B: Tensor, entries_2C: Tensor
) -> None:
    """Write each row's candidate set to `entries_2C`, in ascending order of token ids.

    A sampled token outside the nucleus comes last in its set.

    Args:
        logprobs_BV, sampled_B: as passed to `find_cuts`.
        cuts: the result of `find_cuts`.
        starts_B: int64, the column of `entries_2C` for the first candidate of each set, or -1 to skip the
            set.
        entries_2C: int32, the output. Row 0 gets the candidates' token ids, and row 1 the bits of their
            float32 log-probs.
    """
    if not len(starts_B):
        return
    with launch(logprobs_BV):
        _compact_kernel[(len(starts_B),)](
            logprobs_BV,
            sampled_B,
            cuts.sizes,
            cuts.keys,
            cuts.blocks,
            cuts.active,
            starts_B,
            entries_2C,
            logprobs_BV.shape[1],
            cuts.blocks.shape[1],
            logprobs_BV.stride(0),
            entries_2C.shape[1],
            HAS_SAMPLED=sampled_B is not None,
            BLOCK=cuts.block,
            TILE=_size(cuts, _TILE),
        )


def _size(cuts: Cuts, largest: int) -> int:
    """Return how many of a row's values a kernel processes at once."""
    num_values: int = triton.next_power_of_2(cuts.blocks.shape[1]) * cuts.block
    return max(cuts.block, min(largest, num_values))


def _key(lowest: float) -> int:
    """Compute on the host the sort key that `_sort_key_descending` computes in a kernel."""
    bits = int(torch.tensor(0.0 - lowest, dtype=torch.float32).view(torch.int32))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _sort_key_descending(values):
    """Compute `top_p_torch.sort_key_descending` in a Triton kernel."""
    bits = (0.0 - values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _tile(row_ptr, blocks_ptr, start, num_values, vocab, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Load the token ids and log-probs of TILE tokens in the active blocks of a row.

    `blocks_ptr` points to the indices of the active blocks. The tokens of these blocks, in order, form one
    sequence. The TILE tokens start at index `start` of the sequence. A token gets log-prob -inf if its index
    in the sequence is `num_values` or more, or its id is outside the vocabulary.
    """
    at = start + tl.arange(0, TILE)
    block = tl.load(blocks_ptr + at // BLOCK, mask=at < num_values, other=0)
    token_ids = block * BLOCK + at % BLOCK
    is_there = (at < num_values) & (token_ids < vocab)
    values = tl.load(row_ptr + token_ids, mask=is_there, other=float("-inf")).to(tl.float32)
    return token_ids, values


@triton.jit
def _values(
    row_ptr,
    blocks_ptr,
    start,
    num_values,
    vocab,
    IS_GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load TILE values for `_search`, from index `start` on.

    If IS_GATHERED, the values are the log-probs of the tokens in the row's active blocks, as in `_tile`. If
    not IS_GATHERED, the values are stored one after the other from `row_ptr` on. A value whose index is
    `num_values` or more is -inf.
    """
    if IS_GATHERED:
        _, values = _tile(row_ptr, blocks_ptr, start, num_values, vocab, BLOCK, TILE)
    else:
        at = start + tl.arange(0, TILE)
        values = tl.load(row_ptr + at, mask=at < num_values, other=float("-inf"))
    return values


@triton.jit
def _masses(values, IS_COUNT: tl.constexpr):
    """Compute the probabilities of log-probs in float64, or ones."""
    return tl.full(values.shape, 1.0, tl.float64) if IS_COUNT else tl.exp(values.to(tl.float64))


@triton.jit
def _above(keys_T, masses_T, keys_P):
    """Compare T values with P pivots, and return the results as two [P, T] tensors.

    If value t is above pivot p, the element [p, t] of the first tensor is the value's probability, and the
    element [p, t] of the second tensor is 1. If the value is not above the pivot, both elements are 0.
    """
    is_above_PT = keys_T[None, :] < keys_P[:, None]
    return tl.where(is_above_PT, masses_T[None, :], 0.0), is_above_PT.to(tl.int32)


@triton.jit
def _search(
    row_ptr,
    blocks_ptr,
    num_values,
    vocab,
    limit,
    highest_key,
    lowest_key,
    IS_GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
    IS_COUNT: tl.constexpr = False,
):
    """Return the sort key of the nucleus cutoff, and the number of values with keys below the cutoff.

    Also return `low`, which is explained below, and the number of values with keys below `low`.

    The values are a row's block maxima, or the log-probs of the row's active blocks. A value of non-zero
    probability is in the nucleus if the total probability of all higher values is below `limit`. If IS_COUNT,
    every value counts as 1 instead of its probability.

    A higher value has a lower sort key. The search narrows the interval of sort keys from `low` to
    `high - 1`. The values with keys below `low` have a total probability below `limit`, so a value with key
    `low` is in the nucleus. The values with keys below `high` have a total probability of `limit` or more,
    unless the total probability of all values is below `limit`. In that case, every value of non-zero
    probability has a key below `high`. The search ends when at most one value has a key from `low` to
    `high - 1`, or when `high - low` is at most 1. Then the interval holds the key of at most one value, or of
    several equal values. All higher values have keys below `low`, so their total probability is below
    `limit`. Every value with a key in the interval is therefore in the nucleus, and the search returns `high`
    as the cutoff.

    If there are at most HELD values, the search loads all values once, and keeps them in registers. With more
    than HELD values, the search loads all values again in every round.
    """
    low = highest_key.to(tl.int64)
    high = tl.full((), 0, tl.int64) + lowest_key
    below_low = tl.full((), 0, tl.int32)
    below_high = tl.full((), 0, tl.int32)
    pivot = tl.arange(0, PIVOTS)
    is_held = num_values <= HELD
    held = _values(row_ptr, blocks_ptr, 0, tl.where(is_held, num_values, 0), vocab, IS_GATHERED, BLOCK, HELD)
    held_keys, held_masses = _sort_key_descending(held), _masses(held, IS_COUNT)
    is_open = low < high
    while is_open:
        step = (high - low + (PIVOTS - 1)) // PIVOTS
        keys_P = tl.minimum(low + step * (pivot + 1).to(tl.int64), high).to(tl.int32)
        if is_held:
            masses_PH, counts_PH = _above(held_keys, held_masses, keys_P)
            masses_P, counts_P = tl.sum(masses_PH, 1), tl.sum(counts_PH, 1)
        else:
            masses_PT = tl.zeros((PIVOTS, TILE), tl.float64)
            counts_PT = tl.zeros((PIVOTS, TILE), tl.int32)
            for start in range(0, num_values, TILE):
                values = _values(row_ptr, blocks_ptr, start, num_values, vocab, IS_GATHERED, BLOCK, TILE)
                masses, counts = _above(_sort_key_descending(values), _masses(values, IS_COUNT), keys_P)
                masses_PT += masses
                counts_PT += counts
            masses_P, counts_P = tl.sum(masses_PT, 1), tl.sum(counts_PT, 1)
        num_passed = tl.sum((masses_P < limit).to(tl.int32), 0)
        if num_passed > 0:
            below_low = tl.sum(tl.where(pivot == num_passed - 1, counts_P, 0), 0)
        below_high = tl.sum(tl.where(pivot == tl.minimum(num_passed, PIVOTS - 1), counts_P, 0), 0)
        high = tl.minimum(low + step * (num_passed + 1).to(tl.int64), high)
        low = tl.minimum(low + step * num_passed.to(tl.int64), high)
        is_open = (below_high - below_low > 1) & (high - low > 1)
    return high, below_high, low, below_low


@triton.jit
def _write_blocks(maxima_ptr, blocks_ptr, num_blocks, key, HELD: tl.constexpr):
    """Write the indices of the blocks whose maxima have sort keys below `key`."""
    written = tl.full((), 0, tl.int32)
    for start in range(0, num_blocks, HELD):
        at = start + tl.arange(0, HELD)
        maxima = tl.load(maxima_ptr + at, mask=at < num_blocks, other=float("-inf"))
        is_active = _sort_key_descending(maxima).to(tl.int64) < key
        tl.store(blocks_ptr + written + tl.cumsum(is_active.to(tl.int32), 0) - 1, at, mask=is_active)
        written += tl.sum(is_active.to(tl.int32), 0)
    tl.debug_barrier()  # the caller reads block indices that other threads wrote


@triton.jit
def _maxima_kernel(
    logprobs_ptr,
    limits_ptr,
    maxima_ptr,
    vocab,
    num_blocks,
    row_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(limits_ptr + row) > 0:
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = tl.load(logprobs_ptr + row * row_stride + at, mask=at < vocab, other=float("-inf"))
        values = values.to(tl.float32)
        is_nan = values != values  # `tl.max` does not reliably return NaN for a block with NaN
        highest = tl.max(tl.where(is_nan, float("-inf"), values), 1)
        highest = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), highest)
        tl.store(maxima_ptr + row * num_blocks + block, highest, mask=block < num_blocks)


@triton.jit
def _cut_kernel(
    logprobs_ptr,
    limits_ptr,
    sampled_ptr,
    maxima_ptr,
    sizes_ptr,
    error_codes_ptr,
    highest_ptr,
    keys_ptr,
    blocks_ptr,
    active_ptr,
    vocab,
    num_blocks,
    row_stride,
    lowest_key,
    HAS_SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits_ptr + row)
    tl.store(sizes_ptr + row, 0)
    tl.store(error_codes_ptr + row, 0)
    tl.store(active_ptr + row, 0)
    if limit <= 0:
        return
    if HAS_SAMPLED:
        sampled = tl.load(sampled_ptr + row)
        if (sampled < 0) | (sampled >= vocab):
            tl.store(error_codes_ptr + row, _SAMPLED_OUT_OF_RANGE)
            return
    row_ptr = logprobs_ptr + row * row_stride
    maxima_ptr += row * num_blocks
    blocks_ptr += row * num_blocks

    highest_H = tl.full((HELD,), float("-inf"), tl.float32)
    has_nan_H = tl.zeros((HELD,), tl.int32)
    for start in range(0, num_blocks, HELD):
        at = start + tl.arange(0, HELD)
        maxima = tl.load(maxima_ptr + at, mask=at < num_blocks, other=float("-inf"))
        is_nan = maxima != maxima
        has_nan_H |= is_nan.to(tl.int32)
        highest_H = tl.maximum(highest_H, tl.where(is_nan, float("-inf"), maxima))
    highest = tl.max(highest_H, 0)
    if tl.max(has_nan_H, 0) > 0:
        highest = highest * float("nan")
    tl.store(highest_ptr + row, highest)
    if not (highest.to(tl.float64) <= _HIGHEST):
        tl.store(error_codes_ptr + row, _NOT_LOGPROBS)
        return

    highest_key = _sort_key_descending(highest)
    key, num_active, _, _ = _search(
        maxima_ptr,
        maxima_ptr,
        num_blocks,
        vocab,
        limit,
        highest_key,
        lowest_key,
        False,
        BLOCK,
        HELD,
        TILE,
        PIVOTS,
    )
    if num_active * BLOCK > HELD:
        # A block may hold several likely tokens, and only its maximum counted. If the tokens above the maxima
        # of all other blocks reach the limit, the blocks with the highest maxima contain the nucleus.
        _, _, few_key, num_few = _search(
            maxima_ptr,
            maxima_ptr,
            num_blocks,
            vocab,
            HELD // BLOCK + 1,
            highest_key,
            lowest_key,
            False,
            BLOCK,
            HELD,
            TILE,
            PIVOTS,
            True,
        )
        _write_blocks(maxima_ptr, blocks_ptr, num_blocks, few_key, HELD)
        values = _values(row_ptr, blocks_ptr, 0, num_few * BLOCK, vocab, True, BLOCK, HELD)
        is_above = _sort_key_descending(values).to(tl.int64) < few_key
        mass = tl.sum(tl.where(is_above, tl.exp(values.to(tl.float64)), 0.0), 0)
        if mass > limit + 1e-9:  # far more than the rounding of two float64 sums
            key = few_key
            num_active = num_few
        tl.debug_barrier()  # all threads have read the indices that are written again below
    _write_blocks(maxima_ptr, blocks_ptr, num_blocks, key, HELD)
    tl.store(active_ptr + row, num_active)

    key, size, _, _ = _search(
        row_ptr,
        blocks_ptr,
        num_active * BLOCK,
        vocab,
        limit,
        highest_key,
        key,
        True,
        BLOCK,
        HELD,
        TILE,
        PIVOTS,
    )
    tl.store(keys_ptr + row, key.to(tl.int32))
    if HAS_SAMPLED:
        sampled_key = _sort_key_descending(tl.load(row_ptr + sampled).to(tl.float32))
        size += (sampled_key.to(tl.int64) >= key).to(tl.int32)
    tl.store(sizes_ptr + row, size)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _place_kernel(sizes_ptr, starts_ptr, num_rows, capacity, TILE: tl.constexpr):
    end = tl.full((), 0, tl.int64)
    for first in range(0, num_rows, TILE):
        row = first + tl.arange(0, TILE)
        sizes = tl.load(sizes_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
        taken = tl.where(sizes <= capacity, sizes, 0)
        ends = end + tl.cumsum(taken, 0)
        fits = (sizes <= capacity) & (ends <= capacity)
        tl.store(starts_ptr + row, tl.where(fits, ends - sizes, -1), mask=row < num_rows)
        end += tl.sum(taken, 0)


@triton.jit(do_not_specialize=["capacity"])
def _compact_kernel(
    logprobs_ptr,
    sampled_ptr,
    sizes_ptr,
    keys_ptr,
    blocks_ptr,
    active_ptr,
    starts_ptr,
    entries_ptr,
    vocab,
    num_blocks,
    row_stride,
    capacity,
    HAS_SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes_ptr + row)
    place = tl.load(starts_ptr + row)
    if (size == 0) | (place < 0):
        return
    row_ptr = logprobs_ptr + row * row_stride
    ids_ptr = entries_ptr
    bits_ptr = entries_ptr + capacity
    key = tl.load(keys_ptr + row)
    end = place + size
    num_values = tl.load(active_ptr + row) * BLOCK
    for start in range(0, num_values, TILE):
        token_ids, values = _tile(
            row_ptr, blocks_ptr + row * num_blocks, start, num_values, vocab, BLOCK, TILE
        )
        is_inside = _sort_key_descending(values) < key
        at = place + tl.cumsum(is_inside.to(tl.int32), 0) - 1
        tl.store(ids_ptr + at, token_ids, mask=is_inside)
        tl.store(bits_ptr + at, values.to(tl.int32, bitcast=True), mask=is_inside)
        place += tl.sum(is_inside.to(tl.int32), 0)
    if HAS_SAMPLED:
        is_outside = place < end
        sampled = tl.load(sampled_ptr + row)
        value = tl.load(row_ptr + sampled).to(tl.float32)
        tl.store(ids_ptr + place, sampled.to(tl.int32), mask=is_outside)
        tl.store(bits_ptr + place, value.to(tl.int32, bitcast=True), mask=is_outside)
