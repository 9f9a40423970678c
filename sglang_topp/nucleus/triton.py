"""Candidate sets on a GPU, as Triton kernels: the host learns no size before it wants the sets.

One pass over a row takes the maximum of every block of neighbouring ids. These maxima are tokens of
the row, so the cutoff among them alone is no higher than the row's own: `active` blocks, whose maximum
is above it, hold the whole nucleus. The exact cutoff is then searched for among their values, and what is
above it is written out. Rows of a model have some dozens of active blocks of thousands (normal logits of
standard deviation 6 at p = 0.95: 85 of 2,374); a flat row has them all, and is merely slower.

A search narrows an interval of keys (`select.falling`) by several pivots at once, until no two entries
are left in it. That takes some ten rounds, so the values stay in registers where they fit. Sums are float64
and each row is one program's, in a fixed order: results repeat to the last bit. What changes from step to
step is not specialised on: no step compiles what another has not.

Shape legend: B rows, V vocabulary, N blocks of S tokens, C places for candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_topp.nucleus._arguments import MAX_LOGPROB
from sglang_topp.nucleus._words import NOT_LOGPROBS, OUT_OF_RANGE

__all__ = ["Cuts", "compact", "find_cuts", "launch", "place"]

_BLOCK = 64
_MAX_BLOCKS = 1 << 13  # of a row: larger vocabularies have larger blocks
_BLOCKS_AT_ONCE = 64
_TILE = 512
_HELD = 4096  # values of a search that stay in registers
_PIVOTS = 8
_WARPS = 16
_HIGHEST = tl.constexpr(MAX_LOGPROB)
_NAN = tl.constexpr(float("nan"))
_OUT_OF_RANGE, _NOT_LOGPROBS = tl.constexpr(OUT_OF_RANGE), tl.constexpr(NOT_LOGPROBS)


class Cuts(NamedTuple):
    """Where the nuclei of some rows end, on the device of their log-probs.

    Attributes:
        sizes: int32 [B], how many candidates a row has, its sampled token included.
        words: int32 [B], 0 or what is wrong with a row (`_words`).
        highest: float32 [B], the row's highest log-prob, or NaN where it holds one.
        keys: int32 [B], a token is inside while its key is below this.
        blocks: int32 [B, N], the active blocks, rising.
        active: int32 [B], how many they are.
        block: S.
    """

    sizes: Tensor
    words: Tensor
    highest: Tensor
    keys: Tensor
    blocks: Tensor
    active: Tensor
    block: int


def launch(tensor: Tensor) -> torch.cuda.device:
    """Where kernels for this tensor are launched: Triton does so on the current device."""
    return torch.cuda.device(tensor.get_device())


def find_cuts(logprobs_BV: Tensor, limits_B: Tensor, sampled_B: Tensor | None, lowest: float) -> Cuts:
    """Find out where each row's nucleus ends. Waits for nothing.

    Args:
        logprobs_BV: contiguous along a row.
        limits_B: float64, a token is inside while the mass above it is less than this; 0 skips the row.
        sampled_B: int64; what is no token is reported, not read.
        lowest: log-probs at or below it stand for probability 0.
    """
    num_rows, vocab = logprobs_BV.shape
    block = max(_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, _MAX_BLOCKS)))
    num_blocks = triton.cdiv(vocab, block)
    device = logprobs_BV.device
    maxima_BN = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    blocks_BN = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    sizes_B, words_B, keys_B, active_B = (
        torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(4)
    )
    highest_B = torch.empty(num_rows, dtype=torch.float32, device=device)
    cuts = Cuts(sizes_B, words_B, highest_B, keys_B, blocks_BN, active_B, block)
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
    """Where each row's candidates go among `capacity` places: int32 [B], -1 for a row that does not fit.

    Rows follow one another; those that are larger than all of it leave their place to the next.
    """
    starts_B = torch.empty_like(sizes_B)
    if len(sizes_B):
        with launch(sizes_B):
            _place_kernel[(1,)](sizes_B, starts_B, len(sizes_B), capacity, TILE=_TILE)
    return starts_B


def compact(
    logprobs_BV: Tensor, sampled_B: Tensor | None, cuts: Cuts, starts_B: Tensor, entries_2C: Tensor
) -> None:
    """Write each row's candidates to its place, ids rising, a sampled token from outside last.

    Args:
        logprobs_BV: those that `cuts` was found for.
        sampled_B: likewise.
        starts_B: integers; -1 leaves the row out.
        entries_2C: int32, token ids and then the bits of their float32 log-probs.
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
    """How many of a row's values to look at at once."""
    num_values: int = triton.next_power_of_2(cuts.blocks.shape[1]) * cuts.block
    return max(cuts.block, min(largest, num_values))


def _key(lowest: float) -> int:
    """`_falling` of one number."""
    bits = int(torch.tensor(0.0 - lowest, dtype=torch.float32).view(torch.int32))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _falling(values):  # type: ignore[no-untyped-def]  # a kernel, not a Python function
    """`select.falling`."""
    bits = (0.0 - values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _tile(  # type: ignore[no-untyped-def]
    row_ptr, blocks_ptr, start, num_values, vocab, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """The next values of a row's active blocks, and their token ids; -inf where there is none."""
    at = start + tl.arange(0, TILE)
    block = tl.load(blocks_ptr + at // BLOCK, mask=at < num_values, other=0)
    token_ids = block * BLOCK + at % BLOCK
    is_there = (at < num_values) & (token_ids < vocab)
    values = tl.load(row_ptr + token_ids, mask=is_there, other=float("-inf")).to(tl.float32)
    return token_ids, values


@triton.jit  # type: ignore[untyped-decorator]
def _values(  # type: ignore[no-untyped-def]
    row_ptr,
    blocks_ptr,
    start,
    num_values,
    vocab,
    IS_GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The next values, of a row's active blocks or as they stand; -inf where there is none."""
    if IS_GATHERED:
        _, values = _tile(row_ptr, blocks_ptr, start, num_values, vocab, BLOCK, TILE)
    else:
        at = start + tl.arange(0, TILE)
        values = tl.load(row_ptr + at, mask=at < num_values, other=float("-inf"))
    return values


@triton.jit
def _above(keys_T, masses_T, keys_P):  # type: ignore[no-untyped-def]
    """Of each value above each pivot its mass, and 1: [P, T]."""
    is_above_PT = keys_T[None, :] < keys_P[:, None]
    return tl.where(is_above_PT, masses_T[None, :], 0.0), is_above_PT.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
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
):
    """The key below which a nucleus lies, and how many entries that are.

    Between rounds the mass above `low` is less than the limit, so what stands there is inside; the mass
    above `high` is not, or nothing possible is beyond it. One entry between them then is inside too.
    Up to HELD values are read once, and more in every round.
    """
    low = highest_key.to(tl.int64)
    high = tl.full((), 0, tl.int64) + lowest_key
    below_low = tl.full((), 0, tl.int32)
    below_high = tl.full((), 0, tl.int32)
    pivot = tl.arange(0, PIVOTS)
    is_held = num_values <= HELD
    held = _values(row_ptr, blocks_ptr, 0, tl.where(is_held, num_values, 0), vocab, IS_GATHERED, BLOCK, HELD)
    held_keys, held_masses = _falling(held), tl.exp(held.to(tl.float64))
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
                masses, counts = _above(_falling(values), tl.exp(values.to(tl.float64)), keys_P)
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
    return high, below_high


@triton.jit  # type: ignore[untyped-decorator]
def _maxima_kernel(  # type: ignore[no-untyped-def]
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
        is_nan = values != values  # which may win or lose a maximum
        highest = tl.max(tl.where(is_nan, float("-inf"), values), 1)
        highest = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, _NAN, highest)
        tl.store(maxima_ptr + row * num_blocks + block, highest, mask=block < num_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def _cut_kernel(  # type: ignore[no-untyped-def]
    logprobs_ptr,
    limits_ptr,
    sampled_ptr,
    maxima_ptr,
    sizes_ptr,
    words_ptr,
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
    tl.store(words_ptr + row, 0)
    tl.store(active_ptr + row, 0)
    if limit <= 0:
        return
    if HAS_SAMPLED:
        sampled = tl.load(sampled_ptr + row)
        if (sampled < 0) | (sampled >= vocab):
            tl.store(words_ptr + row, _OUT_OF_RANGE)
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
        highest = highest * _NAN
    tl.store(highest_ptr + row, highest)
    if not (highest.to(tl.float64) <= _HIGHEST):
        tl.store(words_ptr + row, _NOT_LOGPROBS)
        return

    highest_key = _falling(highest)
    key, num_active = _search(
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
    written = tl.full((), 0, tl.int32)
    for start in range(0, num_blocks, HELD):
        at = start + tl.arange(0, HELD)
        maxima = tl.load(maxima_ptr + at, mask=at < num_blocks, other=float("-inf"))
        is_active = _falling(maxima).to(tl.int64) < key
        tl.store(blocks_ptr + written + tl.cumsum(is_active.to(tl.int32), 0) - 1, at, mask=is_active)
        written += tl.sum(is_active.to(tl.int32), 0)
    tl.store(active_ptr + row, num_active)
    tl.debug_barrier()  # what one thread has written others read

    key, size = _search(
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
        sampled_key = _falling(tl.load(row_ptr + sampled).to(tl.float32))
        size += (sampled_key.to(tl.int64) >= key).to(tl.int32)
    tl.store(sizes_ptr + row, size)


@triton.jit(do_not_specialize=["num_rows", "capacity"])  # type: ignore[untyped-decorator]
def _place_kernel(sizes_ptr, starts_ptr, num_rows, capacity, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    end = tl.full((), 0, tl.int64)
    for first in range(0, num_rows, TILE):
        row = first + tl.arange(0, TILE)
        sizes = tl.load(sizes_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
        taken = tl.where(sizes <= capacity, sizes, 0)
        ends = end + tl.cumsum(taken, 0)
        fits = (sizes <= capacity) & (ends <= capacity)
        tl.store(starts_ptr + row, tl.where(fits, ends - sizes, -1).to(tl.int32), mask=row < num_rows)
        end += tl.sum(taken, 0)


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator]
def _compact_kernel(  # type: ignore[no-untyped-def]
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
    place = tl.load(starts_ptr + row).to(tl.int64)
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
        is_inside = _falling(values) < key
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
