"""Check with a hash table whether all values in each row are distinct.

The check is exact, and faster than a sort. `validation.py` uses it to check token ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["all_distinct"]

# These odd constants have well-mixed bits: 2^32 over the golden ratio, and two from MurmurHash3.
_VALUE_FACTOR, _ROW_FACTOR, _ROUND_FACTOR = np.array([0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35], np.uint32)


def all_distinct(values: NDArray[np.int32], rows: NDArray[np.int32]) -> bool:
    """Return whether all values within each row are distinct.

    In each round, every entry hashes to a slot of a table, writes its index to the slot, and reads the slot
    again. If an entry reads another entry's index, the function compares the two entries. The entry whose
    index was overwritten goes to the next round, with another hash. Equal entries (same value and same row)
    always hash to the same slot. Once the slot holds the index of one of several equal entries, the function
    compares the others with that entry. So the check finds every duplicate.

    Args:
        values: int32 [n], the value of every entry.
        rows: int32 [n], the row of every entry.
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
