"""All contenders of `nucleus_gpu` return the same sets.

`test_nucleus_gpu` runs this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import nucleus_gpu
from benchmarks.nucleus_gpu import STAGED, contenders
from tests.fake_gpu import gpu
from tests.nucleus import reference


@pytest.mark.parametrize("std", nucleus_gpu.ROWS.values(), ids=nucleus_gpu.ROWS)
def test_contenders_return_the_same_sets(std):
    logprobs = torch.log_softmax(torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) * std, -1)
    ids, values, offsets = reference.top_p_candidates(logprobs, 0.95)
    with gpu():
        all_contenders = contenders(logprobs.to("cuda"), 0.95)
        for label in ("sort and cumsum", "plain torch (select)", "top_p_candidates, one wait"):
            got = [part.cpu() for part in all_contenders[label]()]
            assert [part.tolist() for part in got] == [ids.tolist(), values.tolist(), offsets.tolist()], label
        staged = all_contenders[STAGED]().map(lambda tensor: tensor.cpu())
        assert all_contenders["one copy"]().cpu().equal(logprobs)
        assert all_contenders["topk(300)"]().values.shape == (3, 300)
    assert [part.tolist() for part in staged.sets()] == [ids.tolist(), values.tolist(), offsets.tolist()]
