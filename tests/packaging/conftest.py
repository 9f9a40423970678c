"""The wheel and the source distribution, built once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, run


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution that `make dist` builds."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="session")
def wheel(distributions: tuple[Path, Path]) -> Path:
    """The built wheel."""
    return distributions[0]


@pytest.fixture(autouse=True)
def _outside_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that nothing is imported from the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
