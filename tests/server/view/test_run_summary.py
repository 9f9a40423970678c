"""The statistics of a page equal statistics over all tokens at once."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp_client import ScoredRollout, load_scored_rollouts
from sglang_topp_server.view.percentile_bands import ENTROPY_GRID, MASS_GRID, SIZE_GRID, PositionBands
from sglang_topp_server.view.run_summary import RunSummary
from sglang_topp_server.view.token_metrics import token_metrics


@pytest.fixture(scope="module")
def scored(scored_file):
    return [one for _, one in load_scored_rollouts(scored_file)]


@pytest.fixture(scope="module")
def summary(scored):
    summary = RunSummary(8)
    for one in scored:
        summary.add(one)
    return summary


@pytest.fixture(scope="module")
def tokens(scored):
    """Return each metric of all tokens as one array."""
    metrics = [token_metrics(one) for one in scored]
    names = ("sizes", "mass", "entropy", "log_ratio", "log_replayed_ratio", "is_missing")
    values = {name: np.concatenate([getattr(each, name) for each in metrics]) for name in names}
    values["position"] = np.concatenate([np.arange(len(each.sizes)) for each in metrics])
    return values


def test_entropy_is_that_of_the_distribution_within_the_set(rollouts):
    rollout = rollouts[0]
    metrics = token_metrics(ScoredRollout(rollout))
    for t, (_, logprobs) in enumerate(rollout.candidates):
        q = np.exp(logprobs.astype(np.float64))
        r = q / q.sum()
        assert metrics.entropy[t] == pytest.approx(-(r * np.log(r)).sum(), abs=1e-5)
        assert metrics.mass[t] == pytest.approx(q.sum(), rel=1e-6)


def test_the_verdict_is_exact(summary, scored, tokens):
    verdict = summary.to_json()["verdict"]
    known = ~np.isnan(tokens["mass"])
    assert verdict["rollouts"] == len(scored) == 24
    assert verdict["tokens"] == len(tokens["sizes"])
    assert verdict["appended"] == 3
    assert verdict["missing"] == 0
    assert verdict["aborts"] == 2
    assert verdict["sets"] == np.count_nonzero(tokens["sizes"])
    assert verdict["without_logprobs"] == len(scored[3].rollout.output_ids)
    assert verdict["mean_mass"] == pytest.approx(tokens["mass"][known].mean(), rel=1e-12)
    ratios = np.exp(tokens["log_ratio"][known])
    assert verdict["off"] == np.mean(np.abs(ratios - 1) > 0.1)
    assert verdict["off_from_ratios"]
    assert dict(verdict["reasons"]) == {"stop": 21, "abort": 2, "length": 1}
    assert dict(verdict["versions"])["9"] == 30


def test_histograms_count_every_token_once(summary, tokens):
    data = summary.to_json()
    sizes = tokens["sizes"][tokens["sizes"] > 0]
    mass = tokens["mass"][~np.isnan(tokens["mass"])]
    expected, _ = np.histogram(mass, [*data["mass"]["edges"][:-1], np.inf])
    assert data["mass"]["counts"] == expected.tolist()
    tops = data["size"]["tops"]
    lows = [0, *tops[:-1]]
    assert data["size"]["counts"] == [
        int(((sizes > low) & (sizes <= top)).sum()) for low, top in zip(lows, tops, strict=True)
    ]
    assert data["size"]["largest"] == sizes.max()
    assert data["size"]["p99"] == np.percentile(sizes, 99, method="inverted_cdf")
    assert data["size"]["median"] == np.percentile(sizes, 50, method="inverted_cdf")
    for name, key in (("without", "log_ratio"), ("with", "log_replayed_ratio")):
        logs = tokens[key][~np.isnan(tokens[key])]
        found = data["ratios"][name]
        edges = [-np.inf, *found["edges"], np.inf]
        assert sum(found["counts"]) == found["tokens"] == len(logs)
        assert found["counts"] == np.histogram(logs, edges)[0].tolist()
        assert found["mean"] == pytest.approx(np.exp(logs).mean())
        assert (found["least"], found["most"]) == pytest.approx((np.exp(logs.min()), np.exp(logs.max())))


@pytest.mark.parametrize(
    ("name", "key", "step"),
    [("size", "sizes", 0.01), ("mass", "mass", 1.3e-4), ("entropy", "entropy", 2.6e-3)],
)
def test_bands_are_percentiles_to_a_step(summary, tokens, name, key, step):
    bands = summary.to_json()["bands"][name]
    values = tokens[key].astype(float)
    is_known = (tokens["sizes"] > 0) & ~np.isnan(values)
    assert bands["width"] == 2  # rollouts are longer than 128 tokens
    for bucket, number in enumerate(bands["count"]):
        here = values[is_known & (tokens["position"] // 2 == bucket)]
        assert number == len(here)
        for q, band in ((10, "p10"), (50, "p50"), (90, "p90")):
            expected = np.percentile(here, q, method="inverted_cdf") if len(here) else None
            assert bands[band][bucket] == (
                None
                if expected is None
                else pytest.approx(expected, abs=step, rel=0.01 if name == "size" else 0)
            )


def test_bins_merge_as_rollouts_get_longer():
    bands = PositionBands(SIZE_GRID)
    bands.add(np.arange(100), np.full(100, 3))
    bands.add(np.arange(1000), np.full(1000, 5))
    found = bands.to_json()
    assert found["width"] == 8
    assert sum(found["count"]) == 1100
    assert found["count"][0] == 16
    assert (found["p10"][0], found["p90"][0], found["p50"][-1]) == (3, 5, 5)


@pytest.mark.parametrize("grid", [MASS_GRID, SIZE_GRID, ENTROPY_GRID])
def test_a_point_of_the_grid_is_itself(grid):
    assert np.array_equal(grid.index(grid.points), np.arange(len(grid)))
    assert grid.index(np.array([-5.0, 1e12])).tolist() == [0, len(grid) - 1]


def test_the_worst_tokens_are_the_worst_of_all(summary, tokens, scored):
    starts = np.cumsum([0] + [len(one.rollout.output_ids) for one in scored])
    worst = summary.worst_tokens()
    assert len(worst) == len({place for _, place in worst}) == 50
    for kind, values in (
        ("size", tokens["sizes"].astype(float)),
        ("mass", -tokens["mass"]),
        ("ratio", np.abs(tokens["log_ratio"])),
    ):
        found = [values[starts[place.row] + place.position] for name, place in worst if name == kind]
        best = np.sort(values[~np.isnan(values)])[::-1]
        assert found[0] == best[0]
        assert found == sorted(found, reverse=True)
        # Some of the worst tokens may already be in the list for another reason.
        assert min(found) >= best[50]


def test_the_table_has_a_row_per_rollout(summary, scored):
    table = summary.table.to_json()
    assert table["tokens"] == [len(one.rollout.output_ids) for one in scored]
    assert table["prompt"] == [i // 4 for i in range(24)]
    assert table["reward"][:5] == [0, 0.25, 0.5, 0.75, None]
    assert table["versions"][2] == "7, 8, 9"
    assert (table["mass"][3], table["least"][4], table["largest"][4]) == (None, None, 0)
    mass = token_metrics(scored[0]).mass
    assert (table["mass"][0], table["least"][0]) == pytest.approx((mass.mean(), mass.min()), abs=1e-6)


def test_missing_sets_are_counted(rollouts):
    rollout = rollouts[0]
    holes = CandidateSets.concat([rollout.candidates[:-2], CandidateSets.empty(2)])
    summary = RunSummary(1)
    summary.add(ScoredRollout(replace(rollout, candidates=holes)))
    summary.add(ScoredRollout(replace(rollout, candidates=None)))
    verdict = summary.to_json()["verdict"]
    assert verdict["missing"] == 2 + len(rollout.output_ids)
    assert summary.to_json()["ratios"] == {"without": None, "with": None}
    assert not verdict["off_from_ratios"]
