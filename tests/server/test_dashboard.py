"""`deploy/grafana.json`: every query reads metrics and labels that a live sidecar exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
# Prometheus adds it to everything that it scrapes.
INSTANCE = "instance"


@pytest.fixture
def exported(sidecar: Any) -> dict[str, set[str]]:
    """The metrics of a sidecar that has served one request of each kind, with their labels."""
    assert sidecar.rollouts().status_code == 200
    assert sidecar.scores([[5, 6, 7]]).status_code == 200
    assert sidecar.rollouts(fault="refuse").status_code == 400
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(sidecar.http.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def parsed(query: str) -> Any:
    """The query as Grafana sends it, with values in place of its variables."""
    return promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$instance", ".*"))


def nodes_of(expression: Any) -> Iterator[Any]:
    yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (below := getattr(expression, name, None)) is not None:
            yield from nodes_of(below)
    for argument in getattr(expression, "args", []):
        yield from nodes_of(argument)


def selectors_of(expression: Any) -> list[Any]:
    return [node for node in nodes_of(expression) if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[title for title, _ in QUERIES])
def test_a_query_reads_what_the_sidecar_exports(exported: dict[str, set[str]], query: str) -> None:
    expression = parsed(query)
    selectors = selectors_of(expression)
    assert selectors
    for selector in selectors:
        assert selector.name in exported
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= exported[selector.name] | {INSTANCE}
    for node in nodes_of(expression):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            (selector,) = selectors_of(node)
            assert set(node.modifier.labels) <= exported[selector.name]


@pytest.mark.parametrize(
    ("title", "query", "legend"),
    [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
        if "{{" in target["legendFormat"]
    ],
)
def test_a_legend_names_labels_that_the_query_keeps(title: str, query: str, legend: str) -> None:
    expression = parsed(query)
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == set(expression.modifier.labels), title


def test_every_metric_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = {selector.name for _, query in QUERIES for selector in selectors_of(parsed(query))}
    suffix = re.compile(r"_(total|bucket|sum|count|created)$")
    metrics = {suffix.sub("", name) for name in exported if name.startswith("sglang_topp_")}
    assert metrics == {suffix.sub("", name) for name in shown}


def test_the_list_of_sidecars_is_read_from_a_metric(exported: dict[str, set[str]]) -> None:
    (query,) = [
        variable["query"]["query"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
    assert found is not None
    assert found[1] in exported
    assert found[2] == INSTANCE


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
