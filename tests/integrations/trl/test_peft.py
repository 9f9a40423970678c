"""LoRA on the real engine: each push merges the adapter, and the base model's weights stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin

from sglang_topp.errors import InvalidInputError
from sglang_topp_client import RolloutClient
from sglang_topp_integrations import trl as adapter
from sglang_topp_integrations.trl import SGLangRollouts
from tests.integrations.trl.recording_trainer import check_ratios, make_trainer


def lora(**options: Any) -> peft.LoraConfig:
    """Return an adapter that changes the policy from the start."""
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **options
    )


@pytest.mark.parametrize("via", ["disk", "tensor"])
def test_every_generation_starts_at_a_ratio_of_one(
    model_path: Path, client: RolloutClient, tmp_path: Path, via: Any
) -> None:
    trainer = make_trainer(
        model_path,
        SGLangRollouts(client, via=via),
        tmp_path,
        arguments={"peft_config": lora()},
        learning_rate=1e-2,
        num_iterations=2,
        max_steps=4,
    )
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert [each.is_fresh for each in trainer.micro_batches] == [True, False, True, False]
    check_ratios(trainer.micro_batches)
    for each in trainer.micro_batches[1::2]:
        assert np.abs(each.ratios - 1).max() > 0.01
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, before[name]) is not weight.requires_grad, name


def test_the_reference_is_the_base_model(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    config: dict[str, Any] = {"beta": 0.1, "max_steps": 1, "num_iterations": 2}
    trainer = make_trainer(
        model_path, SGLangRollouts(client), tmp_path, arguments={"peft_config": lora()}, **config
    )
    trainer.train()
    check_ratios(trainer.micro_batches)
    (batch,) = trainer.micro_batches
    with torch.no_grad(), trainer.model.disable_adapter():
        trainer._rows = batch.inputs["candidate_rows"]
        base, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch.inputs["prompt_ids"], batch.inputs["completion_ids"]], 1),
            torch.cat([batch.inputs["prompt_mask"], batch.inputs["completion_mask"]], 1),
            batch.mask.shape[1],
        )
    reference = batch.inputs["ref_per_token_logps"]
    torch.testing.assert_close(reference[batch.mask], base[batch.mask], rtol=0, atol=1e-5)
    assert (reference - batch.logprobs)[batch.mask].abs().max() > 0.1


def test_an_adapter_that_does_not_merge(model_path: Path, tmp_path: Path) -> None:
    config = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(InvalidInputError, match="peft_config: got an adapter that does not merge"):
        make_trainer(model_path, no_rollouts, tmp_path, arguments={"peft_config": config})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda trainer: setattr(trainer.model.get_base_model(), "hf_quantizer", object()), "of a quantized"),
        (
            lambda trainer: setattr(
                trainer.accelerator.state, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2)
            ),
            "and FSDP, expected DDP: not tested",
        ),
    ],
    ids=["quantized", "fsdp"],
)
def test_untested_adapters(model_path: Path, tmp_path: Path, change: Any, problem: str) -> None:
    trainer = make_trainer(model_path, no_rollouts, tmp_path, arguments={"peft_config": lora()})
    change(trainer)
    with pytest.raises(InvalidInputError, match=f"peft_config: got an adapter {problem}"):
        adapter._check_trainer(trainer)


def no_rollouts(prompts: Any, trainer: Any) -> Any:
    raise AssertionError("a rollout began")
