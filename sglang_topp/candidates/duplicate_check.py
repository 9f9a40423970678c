"""Check with a hash table whether all values in each row are distinct.

`validation.py` calls `all_distinct` to find token ids that occur twice in a candidate set. The check is
exact, and faster than a sort.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["all_distinct"]

# Odd factors with well-mixed bits: 2^32 over the golden ratio, and two constants of MurmurHash3.
_VALUE_FACTOR, _ROW_FACTOR, _ROUND_FACTOR = np.array([0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35], np.uint32)


def all_distinct(values: NDArray[np.int32], rows: NDArray[np.int32]) -> bool:
    """Return whether all values within each row are distinct.

    A pair is a value and its row. The function hashes each pair to a slot of a hash table, and writes the
    pair's index to the slot. Among pairs with the same slot, the last written pair keeps the slot. The
    function compares each of the other pairs with the pair that keeps the slot, and returns False if the two
    are equal. In the next round, the function rehashes the pairs that do not keep their slot. Equal pairs
    have the same slot in every round, so the function finds every duplicate.

    Args:
        values: int32 [n], the n values of all rows.
        rows: int32 [n], the row of each value.
    """
    bits = len(values).bit_length() + 1
    table = np.empty(1 << bits, np.int32)
    entries = np.arange(len(values), dtype=np.int32)
    hashes = values.view(np.uint32) * _VALUE_FACTOR + rows.view(np.uint32) * _ROW_FACTOR
    while len(entries):
        slots = (hashes >> np.uint32(32 - bits)).astype(np.intp)
        table[slots] = entries
        winners = table.take(slots)
        lost = np.flatnonzero(winners != entries)
        entries, winners = entries.take(lost), winners.take(lost)
        if (
            (values.take(winners) == values.take(entries)) & (rows.take(winners) == rows.take(entries))
        ).any():
            return False
        hashes = hashes.take(lost) * _ROUND_FACTOR
    return True
