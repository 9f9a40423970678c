"""Puts this folder on the path, because its tests share `replay_oracle`, and chooses dense positions."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["none", "some", "all"])
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute logits one by one; over the whole vocabulary where a set is large; or so at every position."""
    from sglang_topp.replay import candidate_index

    share = {"none": 2.0, "some": 0.1, "all": 0.0}[request.param]
    for source in candidate_index.DENSE_SHARES:
        monkeypatch.setitem(candidate_index.DENSE_SHARES, source, candidate_index.DenseShare(share, 0))
    return str(request.param)
