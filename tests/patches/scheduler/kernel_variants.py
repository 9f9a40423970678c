"""The variants of the extraction's Triton kernels: all compile, and a warm-up asks for each of them.

`test_gpu_staging` runs this file. It needs no GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_topp_patches.scheduler.sets import StagedSets, extract, extract_support, warm_up
from tests.triton_variants import recorded_variants

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ODD, EVEN = 50_257, 151_936


def extract_all(logprobs: Tensor, sampled_ids: Tensor, lowest: float | None) -> None:
    """Extract sets by every rule, and extract them again, as if they had not fit."""
    rows, vocab = logprobs.shape
    all_rows = torch.ones(rows + 1, dtype=torch.bool, device="cuda")[1:]
    is_drawn = torch.ones(rows + 1, vocab, dtype=torch.bool, device="cuda")[1:]
    few = is_drawn[:, 7:20].expand(rows, 13), torch.zeros(rows, 40, dtype=torch.int32, device="cuda")[:, 3:16]
    sets = [
        extract(logprobs, p, sampled_ids, lowest=lowest) for p in ([0.5] * rows, [0.0, *[1.0] * (rows - 1)])
    ]
    sets.append(extract(logprobs, [0.9] * rows, sampled_ids, lowest=lowest, is_taken=all_rows))
    for drawn, ids in ((None, None), (is_drawn, None), few):
        sets += [extract_support(logprobs, range(rows), drawn, ids, sampled_ids, all_rows, lowest=lowest)]
    for each in sets:
        assert isinstance(each, StagedSets)
        each.take_again[0](np.arange(len(each.rows))[-1:])


@pytest.mark.parametrize("vocab", [ODD, EVEN])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_after_a_warm_up_nothing_is_compiled(dtype: torch.dtype, vocab: int) -> None:
    with recorded_variants(90, compiles=False) as variants:
        warm_up.__wrapped__(vocab, dtype, torch.device("cuda"))
        compiled = set(variants)
        for rows in (1, 2, 16, 17):
            # The rows of an odd vocabulary begin at every alignment.
            logprobs = torch.zeros(rows + 1, vocab, dtype=dtype, device="cuda")[1:]
            sampled_ids = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")[1:]
            extract_all(logprobs, sampled_ids, -1e20 if rows == 2 else None)
    assert len(compiled) == 8
    assert set(variants) == compiled


@pytest.mark.parametrize(
    ("capability", "dtype", "vocab"),
    [(80, F32, EVEN), (90, F32, EVEN), (100, F32, EVEN), (90, F32, ODD), (90, BF16, EVEN), (90, F16, ODD)],
    ids=str,
)
def test_every_variant_compiles(
    capability: int, dtype: torch.dtype, vocab: int, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recorded_variants(capability, compiles=True) as variants:
        warm_up.__wrapped__(vocab, dtype, torch.device("cuda"))
    assert len(variants) == 8
    for (name, _), kernel in variants.items():
        assert "cubin" in kernel.asm
        assert "f64" not in kernel.asm["ptx"], f"{name}: many GPUs compute a 64th as fast in float64"
