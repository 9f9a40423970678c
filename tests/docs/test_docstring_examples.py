"""Run every example (`>>>`) in the docstrings of the packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from sybil.document import PythonDocStringDocument
from sybil.parsers.rest import DocTestParser

ROOT = Path(__file__).parents[2]
MODULES = [
    str(path.relative_to(ROOT))
    for folder in ("sglang_topp", "client", "server", "patches")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module: str) -> None:
    document = PythonDocStringDocument.parse(str(ROOT / module), DocTestParser())
    examples = list(document)
    assert examples
    for example in examples:
        example.evaluate()
