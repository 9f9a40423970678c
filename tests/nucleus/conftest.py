"""Larger tiles in Triton's interpreter, whose cost grows with the number of operations, not of values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="session")
def large_tiles() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from sglang_topp.nucleus import sampler_support_triton, top_p_triton

    with (
        mock.patch.object(top_p_triton, "_LANES", 1 << 11),
        mock.patch.object(sampler_support_triton, "_TILE", 1 << 14),
    ):
        yield
