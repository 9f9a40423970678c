"""The README is short and its links lead somewhere; pictures are small, and each is shown on some page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation_blocks import DOCS

ROOT = DOCS.parent
MAX_README_LINES = 120
MAX_PICTURE_BYTES = 150_000
PICTURES = sorted(path for path in (DOCS / "pictures").iterdir() if path.suffix in (".svg", ".png"))


def links_of(path: Path) -> list[str]:
    """Return the targets of a page's Markdown links and pictures that are files of this repository."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text)
    return [target for target in targets if not target.startswith("http")]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(name: str) -> None:
    for target in links_of(ROOT / name):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_pictures_are_small_and_shown(picture: Path) -> None:
    assert picture.stat().st_size <= MAX_PICTURE_BYTES
    shown = {(page.parent / target).resolve() for page in DOCS.rglob("*.md") for target in links_of(page)}
    assert picture.resolve() in shown


def test_the_script_draws_the_pictures_that_are_committed(tmp_path: Path) -> None:
    """Names only: another version of matplotlib or Chromium draws other bytes."""
    command = [sys.executable, "-m", "docs.pictures.make_pictures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    by_example = {"training-bias.png"}  # `python examples/bias.py --plot` trains for it
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in PICTURES} - by_example
    assert {path.suffix for path in PICTURES} == {".svg", ".png"}
