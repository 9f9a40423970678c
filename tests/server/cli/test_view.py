"""The command `sglang-topp view`."""

import sys

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp_client import Rollout, save_rollouts
from sglang_topp_server.cli import main


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Write a file with one rollout to the current directory."""
    ids = np.array([3, 1], np.int32)
    sets = CandidateSets([3, 4, 1], np.log([0.6, 0.3, 1.0]), [0, 2, 3], ids)
    rollout = Rollout(
        0, 0, "r", ids, ids, "text", sets.sampled_logprobs, sets, "stop", "v1", 0, 0.5, "sampler"
    )
    save_rollouts(tmp_path / "step-0.parquet", [rollout])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "step-0.parquet"


def test_a_page_is_named_after_the_file(path, capsys):
    assert main.main(["view", str(path)]) == 0
    assert (
        capsys.readouterr().out == f"step-0.html: {path.with_suffix('.html').stat().st_size / 1e6:.2f} MB\n"
    )
    assert path.with_suffix(".html").read_bytes().startswith(b"<!doctype html>")


def test_a_page_can_be_named_and_is_replaced(path, tmp_path):
    out = tmp_path / "other.html"
    for _ in range(2):
        assert main.main(["view", str(path), "-o", str(out), "--megabytes", "1"]) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other.html", "step-0.parquet"]


def test_progress_is_shown_on_a_terminal(path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main.main(["view", str(path)]) == 0
    assert "reading: 1 rollouts, 2 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.parquet"], "No such file or directory: 'none.parquet'"),
        (
            ["step-0.parquet", "-o", "step-0.parquet"],
            "-o: got step-0.parquet, expected the name of an HTML file",
        ),
        (["step-0.parquet", "-o", "none/x.html"], "No such file or directory"),
        (["step-0.parquet", "--tokenizer", "none"], "--tokenizer: got none, expected a tokenizer.json"),
        (["altered.parquet"], "altered.parquet: cannot be read, so it was cut or altered"),
        (["step-0.parquet", "empty"], "empty: got no rollouts, expected one or more"),
    ],
)
def test_errors_leave_no_page(path, capsys, arguments, message):
    path.with_name("altered.parquet").write_bytes(path.read_bytes()[:-1])
    path.with_name("empty").mkdir()
    before = sorted(path.parent.iterdir())
    assert main.main(["view", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert sorted(path.parent.iterdir()) == before


def test_a_page_of_no_rollouts_is_refused(path):
    with pytest.raises(SystemExit):
        main.main(["view", str(path), "--megabytes", "0"])
