"""What a benchmark leaves behind says what was measured and on what kind of machine, not on which one."""

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

from benchmarks import results
from benchmarks.harness import compare, compare_counts

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
COMMITTED = sorted(results.FOLDER.glob("*.json"))


def fits(value: Any, schema: Any) -> bool:
    """Whether a JSON value is what `schema` says: a type, some values, alternatives, a list, an object."""
    if isinstance(schema, tuple):
        return any(fits(value, each) for each in schema)
    if isinstance(schema, set):
        return value in schema
    if isinstance(schema, list):
        return isinstance(value, list) and len(value) > 0 and all(fits(each, schema[0]) for each in value)
    if isinstance(schema, dict):
        return (
            isinstance(value, dict)
            and set(value) == set(schema)
            and all(fits(value[key], each) for key, each in schema.items())
        )
    return value is None if schema is None else type(value) is schema


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file of a benchmark that took two measurements, on a clock of our own."""
    seconds = {"loop": iter([9, 4e-3, 6e-3, 9e-3]), "sum": iter([9, 2e-3, 2e-3, 1e-3])}
    contenders = {label: partial(next, each) for label, each in seconds.items()}
    with results.recorded() as tables:
        compare("sums", contenders, rounds=3, warmup=1, clock=lambda contender: contender())
        compare_counts("sizes", "MB", {"all": 8, "some": 2}, target=3.5, picture="sizes")
    return results.write("sums", tables, tmp_path)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_have_the_schema(path):
    result = json.loads(path.read_text())
    assert fits(result, RESULT)
    # The second is a run on another SGLang than the newest.
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


def test_the_file_has_the_schema(written):
    result = json.loads(written.read_text())
    assert fits(result, RESULT)
    assert written.name == "sums.json"
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


def test_only_what_is_recorded_within_is_there():
    with results.recorded() as tables:
        compare_counts("one", "MB", {"all": 1})
    assert [table.title for table in tables] == ["one"]
    with results.recorded() as tables:
        assert tables == []


def test_the_machine_is_described_and_not_named(written):
    text = written.read_text()
    words = set(re.findall(r"[\w.-]+", text.lower()))
    for name in (socket.gethostname(), getpass.getuser(), os.environ.get("HOSTNAME", "")):
        assert name.lower() not in words
    for path in (Path.home(), Path.cwd(), sys.prefix):
        assert str(path) not in text
    assert_no_paths(text)


def assert_no_paths(text: str) -> None:
    assert not re.findall(r"(?<!\w)/\w|\\\\|[A-Z]:\\|://|@", text)


def test_the_commit_is_that_of_the_repository(written):
    commit = json.loads(written.read_text())["versions"]["commit"]
    folder = results.FOLDER.parent
    head = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        assert commit is None
    else:
        assert head.stdout.startswith(commit.rstrip("+"))
        assert len(commit.rstrip("+")) >= 10
