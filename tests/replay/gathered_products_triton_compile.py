"""Compiles the kernels for NVIDIA GPUs, because the interpreter accepts code that the compiler refuses.

`test_gathered_products_triton` runs this file. It needs no GPU.
"""

from __future__ import annotations

import pytest
import torch

from sglang_topp.replay import gathered_products_triton
from sglang_topp.replay.candidate_index import Entries
from tests.triton_variants import recorded_variants

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_all(dtype: torch.dtype, width: int, num_entries: int) -> None:
    hidden, head = (torch.zeros(rows, width, dtype=dtype, device="cuda") for rows in (7, 300))
    positions, ids = (torch.zeros(num_entries, dtype=torch.int64, device="cuda") for _ in range(2))
    weights = torch.zeros(num_entries, device="cuda")
    entries = Entries(positions, ids, num_positions=len(hidden), num_ids=len(head))
    gathered_products_triton.gathered_dot(hidden, head, entries, out_dtype=torch.float32)
    gathered_products_triton.segment_sum(head, entries.by_position, weights, out_dtype=dtype)
    gathered_products_triton.segment_add(head.float(), hidden, entries.by_distinct_id, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_for_nvidia(capability, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recorded_variants(capability, compiles=True) as variants:
        run_all(dtype, 4096, 300)
    names = ["_dot_kernel", "_join_kernel", "_join_kernel", "_piece_kernel", "_piece_kernel"]
    assert sorted(name for name, _ in variants) == names
    assert all("cubin" in kernel.asm for kernel in variants.values())


@pytest.mark.parametrize("width", [1500, 4096])
def test_other_numbers_of_entries_compile_nothing(width):
    with recorded_variants(90, compiles=False) as variants:
        run_all(torch.bfloat16, width, 300)
        compiled = set(variants)
        for num_entries in (1, 16, 129, 320):
            run_all(torch.bfloat16, width, num_entries)
    assert set(variants) == compiled
