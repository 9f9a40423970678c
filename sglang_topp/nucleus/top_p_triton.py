"""Triton kernels that extract top-p candidate sets without making the host wait for the sets' sizes.

The first kernel cuts each row of log-probs into blocks of neighboring token ids, and computes the maximum of
every block. The second kernel takes the 64 blocks with the highest maxima, fewer if maxima are equal. They
hold every token that is more likely than the maxima of all other blocks. If these tokens have a total
probability of `p` or more, the nucleus is among them. If not, the kernel tries eight times as many blocks,
and in the end all of them. In the blocks it then searches for the exact cutoff, which separates the nucleus's
log-probs from lower ones. The last kernel writes out the tokens of the nucleus.

The search compares sort keys: integers that ascend as log-probs descend
(`extraction_torch.sort_key_descending`). Each round compares several pivot keys with the keys of all
log-probs in the blocks, and narrows the interval of keys that can be the cutoff. It takes eleven rounds at
most, and fewer if the interval soon holds the key of a single log-prob.

Probabilities are summed as 64-bit integers, in units of 2^-46. Such sums are exact in any order, so results
are bitwise reproducible. The integer of one probability has two errors:

- `_mass` computes exp(x) in float32 as 2^n exp(r), with |r| < 0.35. The subtraction x - n log(2) is exact but
  for its last step, which rounds by at most 2^-26. `tl.exp(r)` multiplies r by log2(e), which rounds by
  2^-26 again, and computes the power of two with a relative error below 2^-22. All in all, a probability has
  a relative error below 2^-22 + 2^-24 = 3e-7, and so has any sum of probabilities.
- Rounding down to a whole unit loses less than 2^-46. Over the 2^24 tokens of the largest vocabulary, that is
  less than 2^-22 = 2.4e-7.

A sum around p <= 1 is therefore wrong by less than 5.4e-7, which is inside of the 1e-6 that
`nucleus.top_p_candidates` documents. For 151,936 tokens, it is wrong by less than 3e-7.

No sum overflows, not even if a row is no distribution. A log-prob is at most 2^-10, so its integer is below
1.002 * 2^46. One of 256 lanes adds up at most 2^16 of them, which is less than 2^63. Before the lanes are
added up, a lane above 2^54 is set to 2^54, a probability of 256: far above every limit below infinity.

Shape legend: B rows, V ids in the vocabulary, N blocks of S tokens, C candidates that the output has room
for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_topp.candidates.validation import MAX_LOGPROB
from sglang_topp.nucleus.argument_checks import NOT_LOGPROBS, SAMPLED_OUT_OF_RANGE
from sglang_topp.nucleus.extraction_torch import sort_key_descending

UNIT_BITS = 46
"""The kernels sum probabilities in units of 2^-46."""
_BLOCK = 64
_MAX_BLOCKS = tl.constexpr(1 << 12)  # per row; a vocabulary of more than 2^18 ids gets larger blocks
_FEW_BLOCKS = 64
_LANES = 256
_DEPTH = tl.constexpr(8)  # values per lane that are loaded at once
_PIVOTS = tl.constexpr(8)
_WARPS = 8
_UNIT_BITS, _HIGHEST = tl.constexpr(UNIT_BITS), tl.constexpr(MAX_LOGPROB)
_SAMPLED_OUT_OF_RANGE, _NOT_LOGPROBS = tl.constexpr(SAMPLED_OUT_OF_RANGE), tl.constexpr(NOT_LOGPROBS)


def kernel(function: Callable[..., None]) -> Any:
    """Compile a Triton kernel once per vocabulary and dtype.

    By default, Triton compiles a kernel again if a number is the first to be 1 or a multiple of 16, or if a
    tensor's address is the first to be no multiple of 16 bytes. Numbers of rows and addresses of rows change
    from step to step, and the compiler would take a second out of one of them.
    """
    names = [name for name in inspect.signature(function).parameters if name.islower() and name != "vocab"]
    return triton.jit(do_not_specialize=names)(function)


class Cuts(NamedTuple):
    """Each row's set size and nucleus cutoff, on the device of the rows' log-probs.

    Attributes:
        rows: int64 [B, 3], as in `gpu_extraction.StagingArea`. `place` fills in the second column.
        cuts: int32 [B, 2 + N]. First the nucleus's cutoff as a sort key: a token is in the nucleus if its key
            is below. Then the number of blocks that can hold tokens of the nucleus, and their indices in
            ascending order.
        block: S, the number of tokens in a block.
    """

    rows: Tensor
    cuts: Tensor
    block: int


def find_cuts(logprobs_BV: Tensor, limits_B: Tensor, sampled_B: Tensor | None, lowest: float) -> Cuts:
    """Find the cutoff of each row's nucleus, without making the host wait for the GPU.

    Args:
        logprobs_BV: floats on a GPU, contiguous along a row.
        limits_B: int64, the total probability at which each row's nucleus ends, in units of 2^-`UNIT_BITS`. A
            token is in the nucleus if the probabilities of all more likely tokens sum to less. A row with a
            limit of 0 gets an empty set.
        sampled_B: int64, the sampled token id of each row, or None. A row whose sampled id is outside the
            vocabulary gets an error.
        lowest: log-probs at or below this value stand for probability 0.
    """
    num_rows, vocab = logprobs_BV.shape
    block = max(_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, _MAX_BLOCKS.value)))
    num_blocks = triton.cdiv(vocab, block)
    maxima_BN = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logprobs_BV.device)
    cuts_BK = torch.empty((num_rows, 2 + num_blocks), dtype=torch.int32, device=logprobs_BV.device)
    rows_B3 = torch.zeros((num_rows, 3), dtype=torch.int64, device=logprobs_BV.device)
    if not num_rows:
        return Cuts(rows_B3, cuts_BK, block)
    blocks_at_once = max(1, _LANES * _DEPTH.value // block)
    _maxima_kernel[(num_rows, triton.cdiv(num_blocks, blocks_at_once))](
        logprobs_BV,
        limits_B,
        maxima_BN,
        vocab,
        num_blocks,
        logprobs_BV.stride(0),
        BLOCK=block,
        BLOCKS=blocks_at_once,
        IS_ALIGNED=all(size % 16 == 0 for size in (vocab, logprobs_BV.stride(0), logprobs_BV.data_ptr())),
    )
    _cut_kernel[(num_rows,)](
        logprobs_BV,
        limits_B,
        sampled_B,
        maxima_BN,
        rows_B3,
        cuts_BK,
        vocab,
        num_blocks,
        logprobs_BV.stride(0),
        int(sort_key_descending(torch.tensor(lowest, dtype=torch.float32))),
        _FEW_BLOCKS,
        BLOCK=block,
        LANES=_LANES,
        num_warps=_WARPS,
    )
    return Cuts(rows_B3, cuts_BK, block)


def place(rows_R3: Tensor, capacity: int) -> None:
    """Write each set's start index in the output to `rows_R3[:, 1]`, or -1 if there is nothing to write.

    The sets follow each other in the output, in the order of their rows. A set of more than `capacity`
    candidates does not fit, and takes no space. If a set of at most `capacity` candidates does not fit into
    the remaining space, neither do all later sets. A row with an error gets the size 0.
    """
    if len(rows_R3):
        _place_kernel[(1,)](rows_R3, len(rows_R3), capacity, TILE=_LANES)


def compact(logprobs_BV: Tensor, sampled_B: Tensor | None, cuts: Cuts, entries_2C: Tensor) -> None:
    """Write each row's candidate set to `entries_2C`, in ascending order of token ids.

    A sampled token outside the nucleus comes last in its set.

    Args:
        logprobs_BV, sampled_B: as passed to `find_cuts`.
        cuts: the result of `find_cuts`, after `place`.
        entries_2C: int32, the output. Row 0 gets the candidates' token ids, and row 1 the bits of their
            float32 log-probs.
    """
    if len(logprobs_BV):
        _compact_kernel[(len(logprobs_BV),)](
            logprobs_BV,
            sampled_B,
            cuts.rows,
            cuts.cuts,
            entries_2C,
            logprobs_BV.shape[1],
            cuts.cuts.shape[1] - 2,
            logprobs_BV.stride(0),
            entries_2C.shape[1],
            BLOCK=cuts.block,
            TILE=_LANES * _DEPTH.value,
            num_warps=_WARPS,
        )


@triton.jit
def error(code: tl.constexpr, detail):
    """Return an error as an int64: the code in the highest bits, then the detail (`argument_checks`)."""
    return (detail.to(tl.int64) & ((1 << 60) - 1)) | (code << 60)


@triton.jit
def _sort_key_descending(values):
    """Compute `extraction_torch.sort_key_descending` in a Triton kernel."""
    bits = (0.0 - values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mass(logprobs):
    """Compute the probabilities of float32 log-probs in units of 2^-46, as int64."""
    logprobs = tl.maximum(logprobs, -43.0)  # less than a unit, and no shift below by more than 62 bits
    n = tl.floor(logprobs * 1.4426950408889634 + 0.5)
    r = (
        logprobs - n * 0.693359375
    ) + n * 2.1219444005469058e-4  # log(2) in two parts; n * 355 / 512 is exact
    scaled = (tl.exp(r) * (1 << 24)).to(tl.int32)  # exact: exp(r) is above 0.5
    return (scaled.to(tl.int64) << (_UNIT_BITS - 24)) >> (0.0 - n).to(tl.int32).to(tl.int64)


@triton.jit
def _tile(row_ptr, blocks_ptr, at, num_values, vocab, BLOCK: tl.constexpr):
    """Load the token ids and log-probs of some tokens in the selected blocks of a row.

    `blocks_ptr` points to the indices of the blocks. The tokens of these blocks, in order, form one sequence,
    and `at` are indices into it. A token gets log-prob -inf if its index is `num_values` or more, or its id
    is outside the vocabulary.
    """
    block = tl.load(blocks_ptr + at // BLOCK, mask=at < num_values, other=0)
    token_ids = block * BLOCK + at % BLOCK
    is_there = (at < num_values) & (token_ids < vocab)
    values = tl.load(row_ptr + token_ids, mask=is_there, other=float("-inf")).to(tl.float32)
    return token_ids, values


@triton.jit
def _search(
    values_ptr,
    blocks_ptr,
    num_values,
    vocab,
    limit,
    low,
    high,
    IS_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Narrow the interval of sort keys from `low` to `high - 1` around the cutoff.

    The values are the log-probs of the tokens in a row's selected blocks, and each weighs its probability. If
    IS_COUNT, the values are stored one after the other from `values_ptr` on, and each weighs 1.

    The values with keys below `low` weigh less than `limit`. Those with keys below `high` weigh `limit` or
    more, unless all values up to the caller's `high` weigh less. The search ends when at most one value has a
    key from `low` to `high - 1`, or when `high - low` is at most 1. Then the interval holds the key of at
    most one value, or of several equal values. So every value with a key below `high` is in the nucleus.

    Returns:
        `(low, high, below_high, is_short)`: the ends of the interval, the number of values with keys below
        `high`, and whether they weigh less than `limit`.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    below_high = tl.full((), 0, tl.int32)
    is_short = low <= high
    is_open = low < high
    pivot = tl.arange(0, _PIVOTS)
    lane = tl.arange(0, _DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    while is_open:
        step = (high - low + (_PIVOTS - 1)) // _PIVOTS
        keys_P = tl.minimum(low + step * (pivot + 1).to(tl.int64), high).to(tl.int32)
        masses_PL = tl.zeros((_PIVOTS, LANES), tl.int64)
        counts_PL = tl.zeros((_PIVOTS, LANES), tl.int32)
        for start in range(0, num_values, _DEPTH * LANES):
            at = start + lane
            if IS_COUNT:
                values = tl.load(values_ptr + at, mask=at < num_values, other=float("-inf"))
            else:
                _, values = _tile(values_ptr, blocks_ptr, at, num_values, vocab, BLOCK)
            is_below = _sort_key_descending(values)[None, :, :] < keys_P[:, None, None]
            counts_PL += tl.sum(is_below.to(tl.int32), 1)
            if not IS_COUNT:
                masses_PL += tl.sum(tl.where(is_below, _mass(values)[None, :, :], 0), 1)
        counts_P = tl.sum(counts_PL, 1)
        if IS_COUNT:
            is_passed = counts_P < limit
        else:
            is_passed = tl.sum(tl.minimum(masses_PL, (1 << 62) // LANES), 1) < limit
        num_passed = tl.sum(is_passed.to(tl.int32), 0)
        is_short = num_passed == _PIVOTS
        below_low = tl.sum(tl.where(pivot == num_passed - 1, counts_P, 0), 0)
        below_high = tl.sum(tl.where(pivot == tl.minimum(num_passed, _PIVOTS - 1), counts_P, 0), 0)
        high = tl.minimum(low + step * (num_passed + 1).to(tl.int64), high)
        low = tl.minimum(low + step * num_passed.to(tl.int64), high)
        is_open = (below_high - below_low > 1) & (high - low > 1)
    return low, high, below_high, is_short


@kernel
def _maxima_kernel(
    logprobs_ptr,
    limits_ptr,
    maxima_ptr,
    vocab,
    num_blocks,
    row_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(limits_ptr + row) > 0:
        row_ptr = logprobs_ptr + row * row_stride
        if IS_ALIGNED:
            row_ptr = tl.multiple_of(row_ptr, 16)  # so that a load takes 16 bytes
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        is_nan = values != values  # `tl.max` does not reliably return NaN for a block with NaN
        highest = tl.max(tl.where(is_nan, float("-inf"), values), 1)
        highest = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), highest)
        tl.store(maxima_ptr + row * num_blocks + block, highest, mask=block < num_blocks)


@kernel
def _cut_kernel(
    logprobs_ptr,
    limits_ptr,
    sampled_ptr,
    maxima_ptr,
    rows_ptr,
    cuts_ptr,
    vocab,
    num_blocks,
    row_stride,
    lowest_key,
    few_blocks,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits_ptr + row)
    if limit <= 0:
        return
    row_ptr = logprobs_ptr + row * row_stride
    rows_ptr += row * 3
    cuts_ptr += row * (2 + num_blocks)
    blocks_ptr = cuts_ptr + 2
    maxima_ptr += row * num_blocks
    if sampled_ptr is not None:
        sampled = tl.load(sampled_ptr + row)
        if (sampled < 0) | (sampled >= vocab):
            tl.store(rows_ptr + 2, error(_SAMPLED_OUT_OF_RANGE, sampled))
            return

    block = tl.arange(0, _MAX_BLOCKS)
    maxima = tl.load(maxima_ptr + block, mask=block < num_blocks, other=float("-inf"))
    is_nan = maxima != maxima
    highest = tl.max(tl.where(is_nan, float("-inf"), maxima), 0)
    if tl.max(is_nan.to(tl.int32), 0) > 0:
        highest = highest * float("nan")
    if not (highest <= _HIGHEST):
        tl.store(rows_ptr + 2, error(_NOT_LOGPROBS, highest.to(tl.int32, bitcast=True)))
        return

    first = _sort_key_descending(highest)
    most = tl.full((), 0, tl.int32) + few_blocks
    key = tl.full((), 0, tl.int64) + lowest_key
    size = tl.full((), 0, tl.int32)
    num_active = tl.full((), 0, tl.int32)
    is_short = limit > 0
    while is_short:
        # All tokens with keys below `bound` are in the selected blocks.
        bound, _, _, _ = _search(
            maxima_ptr,
            blocks_ptr,
            num_blocks,
            vocab,
            most + 1,
            first,
            lowest_key,
            True,
            BLOCK,
            LANES,
        )
        maxima = tl.load(maxima_ptr + block, mask=block < num_blocks, other=float("-inf"))  # frees registers
        is_active = _sort_key_descending(maxima) < bound
        num_active = tl.sum(is_active.to(tl.int32), 0)
        tl.debug_barrier()  # all threads have read the indices that are written again here
        tl.store(blocks_ptr + tl.cumsum(is_active.to(tl.int32), 0) - 1, block, mask=is_active)
        tl.debug_barrier()  # the search reads indices that other threads wrote
        _, key, size, is_short = _search(
            row_ptr,
            blocks_ptr,
            num_active * BLOCK,
            vocab,
            limit,
            first,
            bound,
            False,
            BLOCK,
            LANES,
        )
        is_short &= bound < lowest_key
        most *= 8
    tl.store(cuts_ptr, key.to(tl.int32))
    tl.store(cuts_ptr + 1, num_active)
    if sampled_ptr is not None:
        sampled_key = _sort_key_descending(tl.load(row_ptr + sampled).to(tl.float32))
        size += (sampled_key.to(tl.int64) >= key).to(tl.int32)
    tl.store(rows_ptr, size.to(tl.int64))


@kernel
def _place_kernel(rows_ptr, num_rows, capacity: tl.int64, TILE: tl.constexpr):
    end = tl.full((), 0, tl.int64)
    for first in range(0, num_rows, TILE):
        row = first + tl.arange(0, TILE)
        size_ptr = rows_ptr + row * 3
        exists = row < num_rows
        is_valid = tl.load(size_ptr + 2, mask=exists, other=0) == 0
        sizes = tl.where(is_valid, tl.load(size_ptr, mask=exists, other=0), 0)
        taken = tl.where(sizes <= capacity, sizes, 0)
        ends = end + tl.cumsum(taken, 0)
        fits = (taken > 0) & (ends <= capacity)
        tl.store(size_ptr, sizes, mask=exists)
        tl.store(size_ptr + 1, tl.where(fits, ends - sizes, -1), mask=exists)
        end += tl.sum(taken, 0)


@kernel
def _compact_kernel(
    logprobs_ptr,
    sampled_ptr,
    rows_ptr,
    cuts_ptr,
    entries_ptr,
    vocab,
    num_blocks,
    row_stride,
    capacity: tl.int64,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(rows_ptr + row * 3 + 1)
    if place < 0:
        return
    end = place + tl.load(rows_ptr + row * 3)
    row_ptr = logprobs_ptr + row * row_stride
    cuts_ptr += row * (2 + num_blocks)
    key = tl.load(cuts_ptr)
    num_values = tl.load(cuts_ptr + 1) * BLOCK
    for start in range(0, num_values, TILE):
        at = start + tl.arange(0, TILE)
        token_ids, values = _tile(row_ptr, cuts_ptr + 2, at, num_values, vocab, BLOCK)
        is_inside = _sort_key_descending(values) < key
        place_ptr = entries_ptr + place + tl.cumsum(is_inside.to(tl.int32), 0) - 1
        tl.store(place_ptr, token_ids, mask=is_inside)
        tl.store(place_ptr + capacity, values.to(tl.int32, bitcast=True), mask=is_inside)
        place += tl.sum(is_inside.to(tl.int32), 0)
    if sampled_ptr is not None:
        sampled = tl.load(sampled_ptr + row)
        value = tl.load(row_ptr + sampled).to(tl.float32)
        tl.store(entries_ptr + place, sampled.to(tl.int32), mask=place < end)
        tl.store(entries_ptr + capacity + place, value.to(tl.int32, bitcast=True), mask=place < end)
