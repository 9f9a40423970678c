"""`examples/ray_rollouts.py` on two real Ray nodes with an engine each, one of which dies."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_topp_client import load_rollouts
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import check_rollout
from tests.examples.two_node_cluster import run_example, two_node_cluster
from tests.skip_missing_features import skip_without

skip_without(Feature.SAMPLER_SOURCE)

NUM_PROMPTS, SAMPLES, TOKENS = 24, 2, 150


def test_a_lost_node_loses_no_prompt_and_doubles_none(model_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "rollouts.parquet"
    arguments = ["--model-path", str(model_path), "--output", str(output), "--in-flight", "2"]
    arguments += ["--prompts", str(NUM_PROMPTS), "--samples", str(SAMPLES), "--max-new-tokens", str(TOKENS)]
    with (
        two_node_cluster() as (address, kill_second_node),
        run_example("ray_rollouts", ["--address", address, *arguments]) as example,
    ):
        example.wait_for(lambda: "4 of 24 prompts finished" in example.text, 400)
        kill_second_node()
        assert "24 of 24" not in example.text, "the node died too late to matter"
        assert example.wait(300) == 0, example.text
    assert "2 engines are ready" in example.text
    # The prompts of the dead worker, and of no other. Until Ray knows that it is dead, it is unavailable.
    assert 1 <= len(re.findall(" again: Actor(?:Died|Unavailable)Error", example.text)) <= 2, example.text
    assert "mean importance ratio 1.0000" in example.text

    rollouts = list(load_rollouts(output))
    assert [(rollout.prompt_index, rollout.sample_index) for rollout in rollouts] == [
        (i, j) for i in range(NUM_PROMPTS) for j in range(SAMPLES)
    ]
    for rollout in rollouts:
        assert len(rollout.output_ids) == TOKENS
        check_rollout(rollout, 0.8)
