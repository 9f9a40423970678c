"""Sets are taken where the log-probs are, and reach the host with the copy that SGLang makes."""

from __future__ import annotations

import torch

from sglang_topp_patches.extract import RowSets, extract
from tests.gpu import gpu

VOCAB = 9_000


def test_on_a_gpu_as_on_the_cpu() -> None:
    logprobs = torch.log_softmax(torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 5, -1)
    logprobs[2, 7] = torch.nan
    sampled = torch.tensor([1, 2, 3, 4])
    thresholds = [0.9, 0.0, 0.9, 1.0]

    def on_host(sets: RowSets) -> RowSets:
        return sets.map(lambda tensor: tensor.to("cpu"))

    with gpu():
        on_device = extract(logprobs.to("cuda"), thresholds, sampled.to("cuda"))
        assert on_device.token_ids.device.type == "cuda"
        got = on_host(on_device)
    want = on_host(extract(logprobs, thresholds, sampled))
    assert list(want.problems) == [2]
    assert got.problems == want.problems
    assert got.spans() == want.spans()
