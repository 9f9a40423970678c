"""The command `sglang-topp rollouts`."""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp_client import Rollout, RolloutWriter, save_rollouts
from sglang_topp_server.cli import main


def rollout(sizes, mass, **changes):
    """Return sets of these sizes, each with this mass."""
    sizes = np.array(sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.concatenate([np.arange(size) for size in sizes]).astype(np.int32)
    sampled = np.zeros(len(sizes), np.int32)
    logprobs = np.log(mass / np.repeat(sizes, sizes)).astype(np.float32)
    sets = CandidateSets(ids, logprobs, offsets, sampled)
    made = Rollout(
        0, 0, "r", sampled[:2], sampled, "", sets.sampled_logprobs, sets, "stop", "v1", 0, 0.5, "sampler"
    )
    return replace(made, **changes)


@pytest.fixture
def path(tmp_path):
    """A directory with two parts, of one and of three rollouts."""
    path = tmp_path / "rollouts"
    with RolloutWriter(path) as writer:
        writer.write(rollout([1, 2, 2, 300], 0.9))
    empty = CandidateSets.empty(1)
    tool = rollout([4, 1], 0.8)
    tool = replace(tool, candidates=CandidateSets.concat([tool.candidates[:1], empty]))
    others = [
        replace(tool, finish_reason="length", weight_spans=(("v1", 1), ("v2", 1)), weight_version="v2"),
        rollout([2], 0.5, candidates=None, top_logprobs_source=None),
        replace(
            one := rollout([3], 1.0), candidates=one.candidates.without_logprobs(), top_logprobs_source=None
        ),
    ]
    with RolloutWriter(path, append=True) as writer:
        for other in others:
            writer.write(other)
    return path


def summary(captured):
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in captured.out.splitlines())


def test_a_directory_is_summarized(path, capsys):
    assert main.main(["rollouts", str(path)]) == 0
    size = sum(part.stat().st_size for part in path.iterdir())
    assert summary(capsys.readouterr()) == {
        "rollouts": "4: stop 3, length 1",
        "tokens": "8 generated, 6 of prompts",
        "weights": "v1 7, v2 1 (tokens)",
        "candidate sets": "6: sampler 2, no sets 1, another source 1 (rollouts)",
        "missing sets": "2: do not train on these tokens",
        "sizes": "mean 52.0, median 2, p99 300, largest 300",
        "kept mass": "mean 0.8800, least 0.8000",
        "bytes": f"{size:,} ({size / 8:.1f} per generated token)",
    }


def test_further_names_are_counted(tmp_path, capsys):
    path = tmp_path / "rollouts.parquet"
    save_rollouts(path, [rollout([1], 1.0, weight_version=f"step-{i % 7}") for i in range(15)])
    assert main.main(["rollouts", str(path)]) == 0
    assert summary(capsys.readouterr())["weights"] == (
        "step-0 3, step-1 2, step-2 2, step-3 2, step-4 2, … 2 more (tokens)"
    )


def test_a_file_of_no_rollouts_is_summarized(tmp_path, capsys):
    path = tmp_path / "rollouts.parquet"
    save_rollouts(path, [])
    assert main.main(["rollouts", str(path)]) == 0
    assert summary(capsys.readouterr())["rollouts"] == "0: none"


def test_rollouts_before_a_fault_are_summarized(path, capsys):
    last = max(path.iterdir())
    last.write_bytes(last.read_bytes()[:-1])
    size = sum(part.stat().st_size for part in path.iterdir())
    assert main.main(["rollouts", str(path)]) == 1
    captured = capsys.readouterr()
    assert summary(captured)["rollouts"] == "1: stop 1"
    assert summary(captured)["bytes"] == f"{size:,}"
    assert captured.err.startswith(f"sglang-topp: error: {last}: cannot be read, so it was cut or altered")


def test_a_file_that_is_not_parquet_is_an_error(tmp_path, capsys):
    (tmp_path / "other").write_bytes(b"{}")
    assert main.main(["rollouts", str(tmp_path / "other")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "other: cannot be read, so it was cut or altered" in captured.err


def test_a_missing_file_is_an_error(tmp_path, capsys):
    assert main.main(["rollouts", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_missing_extra_is_named(path):
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        f"from sglang_topp_server.cli.main import main; sys.exit(main(['rollouts', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'sglang-topp[data]'" in done.stderr


def test_a_directory_of_something_else_is_an_error(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main.main(["rollouts", str(tmp_path)]) == 1
    assert "a directory without Parquet files" in capsys.readouterr().err
