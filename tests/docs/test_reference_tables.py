"""The reference lists every exception, metric, option, and limit that there is, and no other."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sglang_topp import errors
from sglang_topp_server.error_responses import http_status
from sglang_topp_server.metrics import Metrics
from tests.docs.conftest import Served
from tests.documentation_blocks import DOCS


def rows_of(page: str, header: str) -> list[list[str]]:
    """Return the cells of all tables of a page whose first column has this header."""
    rows: list[list[str]] = []
    in_table = False
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and cells[0] == header:
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not re.fullmatch(r"-+", cells[0]):
            rows.append(cells)
    return rows


def test_every_exception_has_its_cause_and_cure() -> None:
    rows = rows_of("reference/errors.md", "class")
    assert sorted(cells[0] for cells in rows) == sorted(f"`{name}`" for name in errors.__all__)
    for name, cause, cure, _ in rows:
        assert cause, name
        assert cure, name


def test_the_http_statuses_are_those_of_the_sidecar() -> None:
    expected = {
        "InvalidInputError": errors.InvalidInputError("x"),
        "WireError": errors.WireError("x", "y"),
        "MissingCandidateSetsError": errors.MissingCandidateSetsError("x", "y"),
        "SampledTokenMissingError": errors.SampledTokenMissingError("x", "y"),
        "PatchError": errors.PatchError("x"),
        "TransportError": errors.TransportError("x"),
        "RequestTimeoutError": errors.RequestTimeoutError("x"),
        "OverloadedError": errors.OverloadedError("x"),
    }
    documented = {cells[0].strip("`"): cells[3] for cells in rows_of("reference/errors.md", "class")}
    for name, error in expected.items():
        assert documented[name] == str(http_status(error)), name


def documented_metrics() -> dict[str, tuple[str, set[str]]]:
    rows = rows_of("reference/metrics.md", "metric")
    return {name.strip("`"): (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}


def test_every_metric_of_the_registry_is_documented() -> None:
    """Names, types, and labels."""
    metrics = Metrics()
    metrics.requests.labels("ok")
    metrics.errors.labels("ServerError", "500")
    metrics.tokens.labels("prompt")
    expected = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for family in metrics.registry.collect()
    }
    assert documented_metrics() == expected


def test_the_server_serves_the_documented_metrics(served: Served) -> None:
    families = text_string_to_metric_families(httpx.get(f"{served.sidecar}/metrics", timeout=60).text)
    names = {family.name for family in families}
    assert {name for name in names if not name.endswith("_created")} == set(documented_metrics())


def test_queries_name_metrics_that_exist() -> None:
    names = set(documented_metrics())
    used = set(re.findall(r"\bsglang_topp_\w+", (DOCS / "reference" / "metrics.md").read_text()))
    for name in used:
        assert re.sub(r"_(total|bucket|count|sum)$", "", name) in names, name


def test_every_command_is_documented() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "sglang_topp_server.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    commands = set(re.findall(r"^    (\w+)(?: |$)", shown, re.M))
    page = (DOCS / "reference" / "cli.md").read_text()
    assert commands == set(re.findall(r"^```\{program-output\} sglang-topp (\w+) --help$", page, re.M))
