"""The interpreter pays by the operation, not by the value: cases of whole vocabularies get larger tiles."""

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
    from sglang_topp.nucleus import support_triton, triton

    with (
        mock.patch.multiple(triton, _TILE=1 << 14, _BLOCKS_AT_ONCE=1 << 9),
        mock.patch.multiple(support_triton, _TILE=1 << 14),
    ):
        yield
