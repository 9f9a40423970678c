"""Result files follow the schema, describe the kind of machine, and contain nothing that identifies it."""

from __future__ import annotations

import datetime
import getpass
import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import result_files
from benchmarks.harness.paired_timing import compare, compare_counts

SPREAD = {"median": float, "min": float, "max": float}
ROW = {"label": str, "figure": SPREAD, "ratio": SPREAD}
TABLE = {
    "title": str,
    "unit": str,
    "better": {"faster", "less"},
    "rounds": int,
    "rows": [ROW],
    "target": (float, int, None),
    "picture": (str, None),
}
GPU = {"name": str, "memory_gib": float}
RESULT = {
    "benchmark": str,
    "date": str,
    "machine": {
        "cpu": str,
        "cores": int,
        "memory_gib": float,
        "gpu": (GPU, None),
        "os": str,
        "load": float,
    },
    "versions": {
        "python": str,
        "torch": str,
        "numpy": str,
        "sglang": (str, None),
        "sglang-topp": str,
        "commit": (str, None),
    },
    "tables": [TABLE],
}
COMMITTED = sorted(result_files.FOLDER.glob("*.json"))


def matches(value: Any, schema: Any) -> bool:
    """Return whether a JSON value matches `schema`.

    A schema is a type, a set of values, a tuple of alternatives, a list with the schema of its entries, or a
    dict of schemas.
    """
    if isinstance(schema, tuple):
        return any(matches(value, each) for each in schema)
    if isinstance(schema, set):
        return value in schema
    if isinstance(schema, list):
        return isinstance(value, list) and len(value) > 0 and all(matches(each, schema[0]) for each in value)
    if isinstance(schema, dict):
        return (
            isinstance(value, dict)
            and set(value) == set(schema)
            and all(matches(value[key], each) for key, each in schema.items())
        )
    return value is None if schema is None else type(value) is schema


@pytest.fixture
def result_file(tmp_path: Path) -> Path:
    """The result file of a benchmark with two tables, timed by a fake clock."""
    seconds = {"loop": iter([9, 4e-3, 6e-3, 9e-3]), "sum": iter([9, 2e-3, 2e-3, 1e-3])}
    contenders = {label: partial(next, each) for label, each in seconds.items()}
    with result_files.collect_tables() as tables:
        compare("sums", contenders, rounds=3, warmup=1, clock=lambda contender: contender())
        compare_counts("sizes", "MB", {"all": 8, "some": 2}, target=3.5, picture="sizes")
    return result_files.write("sums", tables, tmp_path)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_have_the_schema(path):
    result = json.loads(path.read_text())
    assert matches(result, RESULT)
    # The second form is the result of an older SGLang release.
    name, sglang = result["benchmark"], result["versions"]["sglang"]
    assert path.stem in (name, f"{name}_{sglang}")
    assert_no_paths(path.read_text())
    for table in result["tables"]:
        assert table["rows"][0]["ratio"] == {"median": 1, "min": 1, "max": 1}
        for row in table["rows"]:
            for spread in (row["figure"], row["ratio"]):
                assert 0 <= spread["min"] <= spread["median"] <= spread["max"]
        if table["picture"] is not None:
            assert path.with_name(f"{table['picture']}.png").exists()


def test_written_results_have_the_schema(result_file):
    result = json.loads(result_file.read_text())
    assert matches(result, RESULT)
    assert result_file.name == "sums.json"
    datetime.date.fromisoformat(result["date"])
    times, sizes = result["tables"]
    assert [row["label"] for row in times["rows"]] == ["loop", "sum"]
    assert (times["unit"], times["better"], times["rounds"]) == ("ms", "faster", 3)
    assert times["rows"][1]["figure"] == {"median": 2, "min": 1, "max": 2}
    assert times["rows"][1]["ratio"] == {"median": 3, "min": 2, "max": 9}
    assert sizes["rows"][1] == {
        "label": "some",
        "figure": {"median": 2, "min": 2, "max": 2},
        "ratio": {"median": 4, "min": 4, "max": 4},
    }
    assert (sizes["target"], sizes["picture"]) == (3.5, "sizes")


def test_tables_recorded_earlier_are_not_collected():
    with result_files.collect_tables() as tables:
        compare_counts("one", "MB", {"all": 1})
    assert [table.title for table in tables] == ["one"]
    with result_files.collect_tables() as tables:
        assert tables == []


def test_result_file_does_not_identify_the_machine(result_file):
    text = result_file.read_text()
    words = set(re.findall(r"[\w.-]+", text.lower()))
    for name in (socket.gethostname(), getpass.getuser(), os.environ.get("HOSTNAME", "")):
        assert name.lower() not in words
    for path in (Path.home(), Path.cwd(), sys.prefix):
        assert str(path) not in text
    assert_no_paths(text)


def assert_no_paths(text: str) -> None:
    assert not re.findall(r"(?<!\w)/\w|\\\\|[A-Z]:\\|://|@", text)


def test_result_file_names_the_commit_of_the_repository(result_file):
    commit = json.loads(result_file.read_text())["versions"]["commit"]
    folder = result_files.FOLDER.parent
    head = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        assert commit is None
    else:
        assert head.stdout.startswith(commit.rstrip("+"))
        assert len(commit.rstrip("+")) >= 10
