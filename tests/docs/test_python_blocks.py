"""Run every Python block of the documentation, page by page, with one engine for all.

Blocks of a page share names, as they would in a notebook. The addresses of the tutorial's server are replaced
by those of the test's server. The working directory has `tiny-model`, which that server serves and which
blocks push, and the examples can be imported. A block that cannot run has a caption that says why. A
`% invisible-code-block: python` sets up names, or checks what the page claims; in the README it is an HTML
comment.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.myst import PythonCodeBlockParser

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = {str(path.relative_to(ROOT)): path for path in FILES}
SIDECAR, ENGINE = "http://127.0.0.1:30010", "http://127.0.0.1:30000"
CHECKPOINT = "/checkpoints/step-8"
NOT_RUN = "Not run in the tests: "
_PARSER = PythonCodeBlockParser()


def blocks_of(text: str, path: str = "page.md") -> Document:
    """Parse the blocks that run, without those whose caption says that they do not."""
    document = Document(text, path)
    for region in _PARSER(document):
        if f":caption: {NOT_RUN}" not in text[region.start : region.end]:
            document.add(region)
    return document


PAGES_WITH_BLOCKS = [name for name, path in PAGES.items() if list(blocks_of(path.read_text()))]


def test_every_kind_of_block_is_found() -> None:
    page = """
```python
a = 1
```
```{code-block} python
:caption: Not run in the tests: it needs a GPU
raise ValueError
```
```{code-block} python
a += 1
```
% invisible-code-block: python
%
% assert a == 2

```text
not Python
```
"""
    examples = list(blocks_of(page))
    assert len(examples) == 3
    for example in examples:
        example.evaluate()
    *setup, check = blocks_of(page.replace("a += 1", "a += 2"))
    for example in setup:
        example.evaluate()
    with pytest.raises(AssertionError):
        check.evaluate()


def test_every_fence_with_python_is_a_block() -> None:
    """A misspelled language would leave a block out of the tests."""
    for name, path in PAGES.items():
        text = path.read_text()
        fences = re.findall(
            r"^ *```+ *(?:\{code-block\} *)?(?:python|py|python3|pycon|ipython)\b", text, re.M | re.I
        )
        run, not_run = len(list(blocks_of(text))), text.count(f":caption: {NOT_RUN}")
        hidden = len(re.findall(r"^(?:%|<!--) invisible-code-block: python", text, re.M))
        assert len(fences) == run - hidden + not_run, name


@pytest.mark.parametrize("name", PAGES_WITH_BLOCKS)
def test_python_blocks(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGES[name].read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    if SIDECAR in text or ENGINE in text or "tiny-model" in text:
        served = request.getfixturevalue("served")
        text = text.replace(SIDECAR, served.sidecar).replace(ENGINE, served.engine)
        text = text.replace(CHECKPOINT, str(served.model))
        os.symlink(served.model, "tiny-model")
    for example in blocks_of(text, str(PAGES[name])):
        example.evaluate()
