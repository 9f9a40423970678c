"""The plots: what they draw, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp_client import plots

mpl.use("Agg")
import matplotlib.pyplot as plt


def make(sizes: list[int], mass: float = 0.9) -> CandidateSets:
    """Return sets of these sizes, each with this mass. A size of 0 makes an empty set."""
    counts = np.array(sizes)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ids = np.concatenate([np.arange(size) for size in sizes]).astype(np.int32)
    logprobs = np.log(mass / np.repeat(counts, counts)).astype(np.float32)
    return CandidateSets(ids, logprobs, offsets, np.zeros(len(sizes), np.int32))


def rollouts(*sets: CandidateSets | None) -> list[Any]:
    return [SimpleNamespace(candidates=one) for one in sets]


@pytest.fixture(autouse=True)
def _figures() -> Iterator[None]:
    yield
    plt.close("all")


def heights(ax: Any) -> list[int]:
    return [int(bar.get_height()) for bar in ax.patches]


def test_entropy_is_that_within_the_set() -> None:
    sets = CandidateSets([1, 2, 3], np.log([0.6, 0.3, 0.5]), [0, 2, 2, 3], [1, -1, 3])
    r = np.array([0.6, 0.3]) / 0.9
    assert sets.entropy == pytest.approx([-(r * np.log(r)).sum(), 0, 0], abs=1e-6)
    without_mass = CandidateSets([1, 2], [0, -np.inf], [0, 2], [2])
    assert without_mass.entropy.tolist() == [0]


def test_sizes_are_counted_by_powers_of_two() -> None:
    ax = plots.set_sizes(rollouts(make([1, 1, 2, 0, 3, 4]), None, make([5, 300])))
    assert heights(ax)[:4] == [2, 1, 2, 1]
    assert sum(heights(ax)) == 7
    assert "p50: 3" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_mass_counts_every_set_once() -> None:
    _, ax = plt.subplots()
    assert plots.kept_mass(rollouts(make([1, 2, 0], 0.95), make([3], 0.3)), ax) is ax
    assert sum(heights(ax)) == 3
    assert ax.get_legend().get_texts()[0].get_text() == f"mean {(0.95 + 0.95 + 0.3) / 3:.4f}"


@pytest.mark.parametrize(("value", "expected"), [("size", 4.0), ("mass", 0.9), ("entropy", np.log(4))])
def test_the_median_over_positions(value: Any, expected: float) -> None:
    ax = plots.over_positions(rollouts(make([4] * 1000), make([4] * 10)), value=value)
    (line,) = ax.get_lines()
    assert len(line.get_xdata()) == 125
    assert np.asarray(line.get_ydata()) == pytest.approx(expected, rel=1e-5)


def test_ratios_of_equal_weights_are_the_kept_mass_without_replay_and_1_with_it() -> None:
    sets = make([2, 0, 3], 0.8)
    ax = plots.ratios(sets.sampled_logprobs, sets.sampled_logprobs, sets, masked_new=sets.masked_logprobs)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [
        "without replay: mean 0.8000, 100.0% off by over 10 %",
        "with replay: mean 1.0000, 0.0% off by over 10 %",
    ]
    assert sum(heights(ax)) == 4


def test_what_cannot_be_drawn_is_named() -> None:
    sets = make([2, 3])
    with pytest.raises(InvalidInputError, match="rollouts: got no candidate set"):
        plots.set_sizes(rollouts(None, CandidateSets.empty(3)))
    with pytest.raises(InvalidInputError, match="value: got 'mode', expected one of size, mass, entropy"):
        plots.over_positions(rollouts(sets), value="mode")
    with pytest.raises(InvalidInputError, match=r"new: got shape \[3\], expected \[2\]"):
        plots.ratios([0, 0, 0], [0, 0], sets)
    with pytest.raises(InvalidInputError, match="these candidate sets have none"):
        plots.kept_mass(rollouts(sets.without_logprobs()))


def test_the_extra_is_named_without_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import sglang_topp_client.plots as p; p._axes(None)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'sglang-topp[plot]'" in ended.stderr
