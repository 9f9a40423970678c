"""Plots of candidate sets for notebooks and papers. Needs matplotlib (`sglang-topp[plot]`).

Each plot function draws into the matplotlib Axes `ax`, by default the current Axes, and returns the Axes. The
plots omit positions without a candidate set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp_client.value_checks import import_optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["kept_mass", "over_positions", "ratios", "set_sizes"]

# Color-blind readers can tell blue and orange apart. The two colors also differ in grayscale.
_BLUE, _ORANGE = "#0072b2", "#e69f00"
_MAX_STRETCHES = 128
_RATIO_TICKS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5)
_LABELS = {"size": "set size", "mass": "kept mass", "entropy": "entropy (nats)"}


class HasCandidates(Protocol):
    """A `Rollout` of `sglang_topp_client`, or any other object with a `candidates` property."""

    @property
    def candidates(self) -> CandidateSets | None:
        """The candidate sets of the generated tokens, or None if the request asked for no sets."""


def set_sizes(rollouts: Iterable[HasCandidates], ax: Axes | None = None) -> Axes:
    """Draw the histogram of set sizes on log axes, with the median and the 99th percentile.

    Raises:
        InvalidInputError: no rollout has a candidate set.
        ModuleNotFoundError: matplotlib is not installed.
    """
    sizes = np.concatenate([sets.sizes[sets.sizes > 0] for sets in _sets_of(rollouts)])
    ax = _axes(ax)
    powers = np.arange(int(sizes.max()).bit_length() + 1)
    # Bar k counts the sets with more than 2**(k - 1) and at most 2**k candidates. Bar 0 therefore counts the
    # sets with one candidate.
    ax.hist(sizes, bins=[0.5, *(2.0**powers + 0.5)], color=_BLUE, edgecolor="white", linewidth=0.5)
    for q, style in ((50, "--"), (99, ":")):
        value = np.percentile(sizes, q, method="inverted_cdf")
        ax.axvline(value, color="black", linestyle=style, linewidth=1, label=f"p{q}: {value:,.0f}")
    ax.set(xscale="log", yscale="log", xlabel="candidates", ylabel="tokens")
    ax.legend(title=f"{np.mean(sizes == 1):.1%} of one candidate")
    return ax


def kept_mass(rollouts: Iterable[HasCandidates], ax: Axes | None = None) -> Axes:
    """Draw the histogram of the kept mass, with token counts on a log axis and a line at the mean.

    Raises:
        InvalidInputError: no rollout has a candidate set, or the candidate sets have no log-probs.
        ModuleNotFoundError: matplotlib is not installed.
    """
    mass = np.concatenate([_values("mass", sets)[sets.sizes > 0] for sets in _sets_of(rollouts)])
    ax = _axes(ax)
    low = min(0.8, float(np.floor(mass.min() * 50)) / 50)
    ax.hist(np.minimum(mass, 1), bins=np.linspace(low, 1, 51).tolist(), color=_BLUE)
    ax.axvline(mass.mean(), color="black", linestyle="--", linewidth=1, label=f"mean {mass.mean():.4f}")
    ax.set(yscale="log", xlabel="kept mass", ylabel="tokens")
    ax.legend()
    return ax


def over_positions(
    rollouts: Iterable[HasCandidates],
    ax: Axes | None = None,
    *,
    value: Literal["size", "mass", "entropy"] = "size",
) -> Axes:
    """Plot the median and the 10th to 90th percentiles of `value` against the position in the output.

    The function groups the positions into at most 128 intervals of equal length, and plots one point per
    interval.

    Raises:
        InvalidInputError: no rollout has a candidate set, or `value` is not "size", "mass", or "entropy".
            With "mass" or "entropy", the error can also mean that the candidate sets have no log-probs.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if value not in _LABELS:
        raise InvalidInputError(f"value: got {value!r}, expected one of {', '.join(_LABELS)}")
    sets = _sets_of(rollouts)
    positions = np.concatenate([np.flatnonzero(one.sizes) for one in sets])
    values = np.concatenate([_values(value, one)[one.sizes > 0] for one in sets])
    width = -(-int(positions.max() + 1) // _MAX_STRETCHES)
    stretches = positions // width
    order = np.argsort(stretches, kind="stable")
    numbers, starts = np.unique(stretches[order], return_index=True)
    parts = np.split(values[order], starts[1:])
    low, middle, high = np.transpose([np.percentile(part, (10, 50, 90)) for part in parts])
    centers = (numbers + 0.5) * width
    ax = _axes(ax)
    ax.fill_between(centers, low, high, color=_BLUE, alpha=0.25, linewidth=0, label="p10 to p90")
    ax.plot(centers, middle, color=_BLUE, label="median")
    ax.set(
        xlabel="position in the output", ylabel=_LABELS[value], yscale="log" if value == "size" else "linear"
    )
    ax.legend()
    return ax


def ratios(
    new: ArrayLike,
    old: ArrayLike,
    sets: CandidateSets,
    ax: Axes | None = None,
    *,
    masked_new: ArrayLike | None = None,
) -> Axes:
    """Draw a histogram of importance ratios without replay, and one with replay if `masked_new` is given.

    Without replay, the numerator of a token's ratio is the trainer's probability of the token over the whole
    vocabulary, `exp(new)`. With replay, the numerator is the trainer's probability over the candidate set,
    `exp(masked_new)`. In both histograms, the denominator is the sampler's probability of the token over the
    candidate set, `exp(old - sets.log_kept_mass)`. `sets.log_kept_mass` is the log of the kept mass.

    Args:
        new: float [T], the trainer's log-probs of the T tokens over the whole vocabulary.
        old: float [T], the rollout's log-probs over the whole vocabulary.
        sets: the T candidate sets. The plot omits tokens with an empty set.
        ax: the Axes to draw into; the current Axes by default.
        masked_new: float [T], the trainer's log-probs over the sets, which `score` and `score_logits`
            of `sglang_topp.replay` compute.

    Raises:
        InvalidInputError: the lengths differ, all sets are empty, or the sets have no log-probs.
        ModuleNotFoundError: matplotlib is not installed.
    """
    drawn_with = _floats("old", old, sets) - sets.log_kept_mass
    shown = [("without replay", _floats("new", new, sets), _ORANGE)]
    if masked_new is not None:
        shown.append(("with replay", _floats("masked_new", masked_new, sets), _BLUE))
    is_filled = sets.sizes > 0
    if not is_filled.any():
        raise InvalidInputError("sets: got no candidate set")
    ax = _axes(ax)
    logs = [(name, (values - drawn_with)[is_filled], color) for name, values, color in shown]
    most = min(1.0, max(0.25, max(float(np.abs(log).max()) for _, log, _ in logs)))
    edges = np.exp(np.linspace(-most, most, 82))
    for name, log, color in logs:
        ratio = np.exp(log)
        label = f"{name}: mean {ratio.mean():.4f}, {np.mean(np.abs(ratio - 1) > 0.1):.1%} off by over 10 %"
        # The first and the last bar also count the ratios outside the range of the bars.
        ax.hist(np.clip(ratio, edges[0], edges[-1]), bins=edges.tolist(), color=color, alpha=0.7, label=label)
    ax.set(xscale="log", yscale="log", xlabel="importance ratio", ylabel="tokens")
    ax.minorticks_off()
    ticks = [tick for tick in _RATIO_TICKS if edges[0] <= tick <= edges[-1]]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    # Leave room for the legend above the bars.
    ax.set_ylim(top=ax.get_ylim()[1] * 8)
    ax.legend(loc="upper left")
    return ax


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    axes: Axes = import_optional("matplotlib.pyplot", extra="plot", use="plots are drawn with it").gca()
    return axes


def _sets_of(rollouts: Iterable[HasCandidates]) -> list[CandidateSets]:
    sets = [one.candidates for one in rollouts if one.candidates is not None]
    if not any(len(one.token_ids) for one in sets):
        raise InvalidInputError("rollouts: got no candidate set")
    return sets


def _values(name: str, sets: CandidateSets) -> NDArray[Any]:
    if name == "size":
        return sets.sizes
    if name == "entropy":
        return sets.entropy
    mass: NDArray[np.float64] = np.exp(sets.log_kept_mass.astype(np.float64))
    return mass


def _floats(name: str, values: ArrayLike, sets: CandidateSets) -> NDArray[np.float64]:
    floats = np.asarray(values, np.float64)
    if floats.shape != (len(sets),):
        raise InvalidInputError(
            f"{name}: got shape {list(floats.shape)}, expected [{len(sets)}], one per set"
        )
    return floats
