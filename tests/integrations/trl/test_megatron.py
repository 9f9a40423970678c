"""A step of TRL's adapter, repeated by Megatron's: ratios of 1 to the engine, and the same gradient."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from sglang_topp_client import RolloutClient
from tests.integrations.trl.recording_trainer import RecordedRollouts, check_ratios, make_trainer

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".integrations/bin/python"
LAYOUTS = ["one", "tp2-sp", "cp2"]

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="Megatron-core is in the environment of `make integrations`"
)


@pytest.fixture(scope="module")
def repeated(
    model_path: Path, client: RolloutClient, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What each rank of Megatron's found, by the layout of its ranks."""
    folder = tmp_path_factory.mktemp("megatron")
    engine = RecordedRollouts(client)
    trainer = make_trainer(
        model_path,
        engine,
        folder,
        temperature=0.7,
        loss_type="dr_grpo",
        learning_rate=5e-4,
        num_iterations=2,
    )
    trainer.train()
    check_ratios(trainer.micro_batches)
    inputs = trainer.micro_batches[-1].inputs
    trainer._rows = inputs["candidate_rows"]
    trainer.model.zero_grad()
    GRPOTrainer._compute_loss(trainer, trainer.model, inputs).backward()
    by_tokens = {(*each.prompt_ids, *each.output_ids): each for each in engine.rollouts}
    tokens, masks = (
        torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")
    )
    torch.save(
        {
            "config": trainer.model.config.to_dict(),
            "start": AutoModelForCausalLM.from_pretrained(model_path).state_dict(),
            "end": trainer.model.state_dict(),
            "gradient": {name: each.grad for name, each in trainer.model.named_parameters()},
            "rollouts": [
                by_tokens[tuple(row[mask.bool()].tolist())] for row, mask in zip(tokens, masks, strict=True)
            ],
            "advantages": inputs["advantages"].tolist(),
            "normalizer": len(tokens) * trainer.max_completion_length,
            "temperature": trainer.temperature,
        },
        folder / "step.pt",
    )
    done = subprocess.run(
        [PYTHON, "-m", "tests.integrations.megatron.trl_step", folder / "step.pt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert [*answer] == LAYOUTS
    return answer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ratios_to_the_engine_are_one(repeated: dict[str, Any], layout: str) -> None:
    for rank in repeated[layout]:
        assert np.abs(np.array(rank["ratios"]) - 1).max() < 1e-5
        # Over the vocabulary, the ratio is the kept mass.
        assert np.mean(rank["full_ratios"]) < 0.9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_trl(repeated: dict[str, Any], layout: str) -> None:
    for rank in repeated[layout]:
        # After two steps, some tokens are clipped.
        assert np.abs(np.array(rank["later_ratios"]) - 1).max() > 0.2
        assert rank["gradient"] < 1e-5
