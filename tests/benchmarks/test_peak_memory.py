"""Peak memory counts each tensor while it lives, and neither inputs nor results."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.peak_memory import peak_bytes


def buffer(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(("before", "beside", "peak"), [(4000, 100, 4000), (100, 4000, 4000), (30, 30, 30)])
def test_a_result_takes_nothing_from_a_peak_before_it(before: int, beside: int, peak: int) -> None:
    kept: list[torch.Tensor] = [buffer(5000)]

    def work() -> list[torch.Tensor]:
        kept.clear()  # what an earlier run allocated
        buffer(before)
        kept.append(buffer(5000))
        buffer(beside)
        return kept

    assert peak_bytes(work) == peak
