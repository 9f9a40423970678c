"""Python blocks of the documentation's pages, for tests that run one with their own fixtures."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["DOCS", "block_with"]

DOCS = Path(__file__).parents[1] / "docs"


def block_with(page: str, part: str) -> str:
    """Return the only Python block of `page`, a path in `docs`, that contains `part`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if part in block)
    return block
