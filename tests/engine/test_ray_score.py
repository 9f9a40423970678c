"""`examples/ray_score.py` on two real Ray nodes, one of which dies: each part has one whole output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_topp_client import Rollout, RolloutClient, RolloutWriter, load_rollouts
from tests.engine.start_servers import Engine
from tests.examples.two_node_cluster import run_example, two_node_cluster

pytest.importorskip("ray", reason="the group `ray` is not installed")
NUM_PARTS, PER_PART = 24, 3


def save_parts(engine: Engine, folder: Path) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 1.0, "n": PER_PART, "ignore_eos": True}
    with RolloutClient(engine.url) as client, RolloutWriter(folder, part_size=PER_PART) as writer:
        for rollout in client.generate([f"part {i}" for i in range(NUM_PARTS)], sampling, top_logprobs_p=0.9):
            writer.write(rollout)


def keys(rollouts: list[Rollout]) -> list[tuple[int, int]]:
    return [(rollout.prompt_index, rollout.sample_index) for rollout in rollouts]


def test_a_lost_node_loses_no_part_and_a_restart_skips_finished_ones(engine: Engine, tmp_path: Path) -> None:
    rollouts, scores = tmp_path / "rollouts", tmp_path / "scores"
    save_parts(engine, rollouts)
    parts = sorted(path.name for path in rollouts.glob("*.parquet"))
    assert len(parts) == NUM_PARTS
    arguments = [str(rollouts), str(scores), "--url", engine.url, "--at-a-time", "2"]

    def finished() -> list[str]:
        return sorted(path.name for path in scores.glob("part-*.parquet"))

    with two_node_cluster() as (address, kill_second_node):
        arguments += ["--address", address]
        with run_example("ray_score", arguments) as example:
            example.wait_for(lambda: len(finished()) >= 4, 240)
            kill_second_node()
            assert len(finished()) < NUM_PARTS, "the node died too late to matter"
            assert example.wait(300) == 0, example.text
        assert finished() == parts

        # A restart scores only what is missing, and removes what a killed run left.
        kept = {name: (scores / name).stat().st_mtime_ns for name in parts[2:]}
        for name in parts[:2]:
            (scores / name).unlink()
        (scores / f".{parts[0]}.left").write_bytes(b"half")
        with run_example("ray_score", arguments) as example:
            assert example.wait(240) == 0, example.text
        assert f"{NUM_PARTS - 2} of {NUM_PARTS} parts are scored already" in example.text
        assert {name: (scores / name).stat().st_mtime_ns for name in parts[2:]} == kept
    assert sorted(path.name for path in scores.iterdir()) == parts

    before, after = list(load_rollouts(rollouts)), list(load_rollouts(scores))
    assert keys(after) == keys(before)
    assert len(set(keys(after))) == len(after) == NUM_PARTS * PER_PART
    with RolloutClient(engine.url) as teacher:
        expected = teacher.score(before, top_logprobs_p=0.99)
    for old, new, score in zip(before, after, expected, strict=True):
        assert new.output_ids.tolist() == old.output_ids.tolist()
        assert score.candidates is not None
        assert new.candidates is not None
        assert new.candidates.sampled_ids.tolist() == old.output_ids.tolist()
        # Another batch may round differently.
        assert np.allclose(new.logprobs, score.logprobs, atol=1e-4)
        assert np.allclose(new.candidates.log_kept_mass, score.candidates.log_kept_mass, atol=1e-2)
        assert replace(new, candidates=None).finish_reason == old.finish_reason
