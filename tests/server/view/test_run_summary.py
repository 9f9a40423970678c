"""The statistics of a page equal statistics over all tokens at once."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp_client import ScoredRollout, load_scored_rollouts
from sglang_topp_server.view.run_summary import EDGES, RunSummary, token_metrics


@pytest.fixture(scope="module")
def scored(scored_file):
    return [one for _, one in load_scored_rollouts(scored_file)]


@pytest.fixture(scope="module")
def summary(scored):
    summary = RunSummary()
    for one in scored:
        summary.add(one)
    return summary


@pytest.fixture(scope="module")
def tokens(scored):
    """Return each metric of all tokens as one array."""
    metrics = [token_metrics(one) for one in scored]
    return {name: np.concatenate([each[name] for each in metrics]) for name in EDGES}


def test_entropy_is_that_of_the_distribution_within_the_set(rollouts):
    rollout = rollouts[0]
    metrics = token_metrics(ScoredRollout(rollout))
    for t, (_, logprobs) in enumerate(rollout.candidates):
        q = np.exp(logprobs.astype(np.float64))
        r = q / q.sum()
        assert metrics["entropy"][t] == pytest.approx(-(r * np.log(r)).sum(), abs=1e-5)
        assert metrics["mass"][t] == pytest.approx(q.sum(), rel=1e-6)


def test_the_verdict_is_exact(summary, scored, tokens):
    verdict = summary.to_json()["verdict"]
    known = ~np.isnan(tokens["mass"])
    assert verdict["rollouts"] == len(scored) == 24
    assert verdict["tokens"] == len(tokens["sizes"])
    assert verdict["appended"] == 3
    assert verdict["missing"] == 0
    assert verdict["sets"] == np.count_nonzero(tokens["sizes"])
    assert verdict["without_logprobs"] == len(scored[3].rollout.output_ids)
    means = {name: each["mean"] for name, each in summary.to_json()["metrics"].items()}
    assert means["mass"] == pytest.approx(tokens["mass"][known].mean(), rel=1e-12)
    assert means["start"] == pytest.approx(tokens["ratio"][known].mean(), rel=1e-12)
    assert means["replayed"] == pytest.approx(tokens["replayed"][known].mean(), rel=1e-12)
    assert verdict["off_1"] == np.mean(np.abs(tokens["ratio"][known] - 1) > 0.01)
    assert verdict["off_10"] == np.mean(np.abs(tokens["ratio"][known] - 1) > 0.1)
    assert verdict["ratios_known"] == np.count_nonzero(known)
    sizes = tokens["sizes"][tokens["sizes"] > 0]
    assert verdict["p99_size"] == np.percentile(sizes, 99, method="inverted_cdf")
    assert verdict["median_size"] == np.percentile(sizes, 50, method="inverted_cdf")
    assert dict(verdict["reasons"]) == {"stop": 21, "abort": 2, "length": 1}
    assert dict(verdict["versions"])["9"] == 30


@pytest.mark.parametrize("name", EDGES)
def test_the_bins_count_every_token_once(summary, tokens, name):
    values = tokens[name][tokens["sizes"] > 0]
    values = values[~np.isnan(values)]
    found = summary.to_json()["metrics"][name]
    edges = [-np.inf, *EDGES[name], np.inf]
    expected = [
        int(np.count_nonzero((values > low) & (values <= high))) for low, high in itertools.pairwise(edges)
    ]
    assert found["counts"] == expected
    assert sum(expected) == len(values)
    assert found["mean"] == pytest.approx(values.mean())
    assert (found["least"], found["largest"]) == (values.min(), values.max())


def test_the_worst_rollouts_are_the_worst_of_all(summary, scored):
    metrics = [token_metrics(one) for one in scored]
    values = {
        "size": [each["sizes"].max(initial=0) for each in metrics],
        "mass": [-np.nanmin([2, *each["mass"]]) for each in metrics],
        "ratio": [np.nanmax([-2, *np.abs(np.log(each["ratio"]))]) for each in metrics],
    }
    ranks = [sorted(range(24), key=lambda row, worst=worst: (-worst[row], row)) for worst in values.values()]
    in_turn = list(dict.fromkeys(row for rows in zip(*ranks, strict=True) for row in rows))
    assert summary.worst_rows(1 << 40)[: len(in_turn)] == in_turn
    assert sorted(summary.worst_rows(1 << 40)) == list(range(24))
    assert summary.worst_rows(sum(summary.num_listed[row] for row in in_turn[:7])) == in_turn[:7]


def test_the_table_has_a_row_per_rollout(summary, scored):
    table = {name: [row[name] for row in summary.rows] for name in summary.rows[0]}
    assert table["tokens"] == [len(one.rollout.output_ids) for one in scored]
    assert table["prompt"] == [i // 4 for i in range(24)]
    assert table["reward"][:5] == [0, 0.25, 0.5, 0.75, None]
    assert table["versions"][2] == "7, 8, 9"
    assert (table["mass"][3], table["least"][4], table["largest"][4]) == (None, None, None)
    metrics = token_metrics(scored[0])
    assert (table["mass"][0], table["least"][0]) == pytest.approx(
        (metrics["mass"].mean(), metrics["mass"].min()), abs=1e-6
    )
    assert table["least_at"][0] == metrics["mass"].argmin()
    assert table["largest_at"][0] == metrics["sizes"].argmax()
    assert table["worst_ratio_at"][0] == np.abs(np.log(metrics["ratio"])).argmax()


def test_missing_sets_are_counted(rollouts):
    rollout = rollouts[0]
    holes = CandidateSets.concat([rollout.candidates[:-2], CandidateSets.empty(2)])
    summary = RunSummary()
    summary.add(ScoredRollout(replace(rollout, candidates=holes)))
    summary.add(ScoredRollout(replace(rollout, candidates=None)))
    verdict = summary.to_json()["verdict"]
    assert verdict["missing"] == 2 + len(rollout.output_ids)
    assert summary.to_json()["metrics"]["ratio"] is None
    assert verdict["ratios_known"] == 0
