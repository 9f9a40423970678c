"""GRPOConfig's options on the real engine: each generation starts at ratios of 1, whatever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_integrations.trl import SGLangRollouts
from tests.integrations.trl.recording_trainer import PROMPTS, RecordedRollouts, check_ratios, make_trainer

TWO_OF_FOUR = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("config", "fresh"),
    [
        # Two micro-batches for a step, and two steps for a generation.
        ({**TWO_OF_FOUR, "steps_per_generation": 4}, [True, True, False, False]),
        # Two generations for a step.
        ({**TWO_OF_FOUR, "steps_per_generation": 1, "max_steps": 1}, [True, True]),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, [True, True]),
        ({"top_k": 20, "min_p": 0.05}, [True, True]),
        ({"gradient_checkpointing": True}, [True, True]),
        ({"loss_type": "vespo", "num_iterations": 2, "top_entropy_quantile": 0.5}, [True, False]),
    ],
    ids=["steps", "generations", "gspo", "top_k-min_p", "checkpointing", "vespo"],
)
def test_every_generation_starts_at_a_ratio_of_one(
    model_path: Path, client: RolloutClient, tmp_path: Path, config: dict[str, Any], fresh: list[bool]
) -> None:
    trainer = make_trainer(model_path, SGLangRollouts(client), tmp_path, **config)
    trainer.train()
    assert [each.is_fresh for each in trainer.micro_batches] == fresh
    check_ratios(trainer.micro_batches)


@pytest.mark.parametrize("via", ["disk", "tensor", "distributed"])
def test_every_transport_pushes_the_weights(
    model_path: Path, client: RolloutClient, tmp_path: Path, via: Any
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    rollouts = SGLangRollouts(client, via=via, folder=folder if via == "disk" else None)
    trainer = make_trainer(model_path, rollouts, tmp_path)
    trainer.train()
    assert len(trainer.micro_batches) == 2
    check_ratios(trainer.micro_batches)
    assert not any(folder.iterdir())


CHATS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
    [{"role": "user", "content": "And now?"}],
]


def test_chats(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    rollouts = RecordedRollouts(client)
    trainer = make_trainer(model_path, rollouts, tmp_path, prompts=CHATS, max_steps=1)
    trainer.train()
    check_ratios(trainer.micro_batches)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rendered = {
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS
    }
    assert {tokenizer.decode(each.prompt_ids) for each in rollouts.rollouts} == rendered


def model_that_ends(model_path: Path, folder: Path) -> Path:
    """Save a model that ends about half of its samples within 12 tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():  # the direction that all states share raises the end token's logit
        ids = torch.randint(1, 256, (8, 16), generator=torch.Generator().manual_seed(0))
        mean = model.model(ids).last_hidden_state.mean((0, 1))
        model.lm_head.weight[0] = 3.6 * mean / mean.norm()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("masks_truncated", [False, True])
def test_completions_of_mixed_length(
    model_path: Path, client: RolloutClient, tmp_path: Path, masks_truncated: bool
) -> None:
    trainer = make_trainer(
        model_that_ends(model_path, tmp_path / "model"),
        RecordedRollouts(client),
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        mask_truncated_completions=masks_truncated,
        max_steps=1,
        beta=0.1,
    )
    trainer.train()
    rollouts = trainer.rollout_func.rollouts
    ended = [each.output_ids[-1] == 0 for each in rollouts]
    assert any(ended)
    assert not all(ended)
    scored = [int(row.sum()) for each in trainer.micro_batches for row in each.mask]
    if masks_truncated:
        expected = [len(each.output_ids) if end else 0 for each, end in zip(rollouts, ended, strict=True)]
    else:
        expected = [len(each.output_ids) for each in rollouts]
    assert sorted(scored) == sorted(expected)
    check_ratios(trainer.micro_batches)


def test_a_batch_that_is_truncated_as_a_whole(
    model_path: Path, client: RolloutClient, tmp_path: Path
) -> None:
    rollouts = SGLangRollouts(client, sampling_params={"min_new_tokens": 12})  # no sample ends by itself
    trainer = make_trainer(model_path, rollouts, tmp_path, mask_truncated_completions=True, max_steps=1)
    before = {name: each.clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    (batch,) = trainer.micro_batches
    assert not batch.mask.any()
    for name, each in trainer.model.named_parameters():
        torch.testing.assert_close(each, before[name], rtol=0, atol=0)


def test_evaluation(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    trainer = make_trainer(
        model_path,
        SGLangRollouts(client),
        tmp_path,
        arguments={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[2:]})},
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        max_steps=1,
    )
    trainer.train()
    assert [each.mode for each in trainer.micro_batches] == ["train", "eval"]
    check_ratios(trainer.micro_batches)
    (logged,) = (each for each in trainer.state.log_history if "eval_loss" in each)
    assert logged["eval_replay/ratio_mean"] == pytest.approx(1, abs=1e-4)

    # `load_best_model_at_end` changes the weights without a step. Each evaluation pushes them once.
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
    pushed = trainer.rollout_func._num_pushes
    assert trainer.evaluate()["eval_replay/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert trainer.rollout_func._num_pushes == pushed + 1


def test_evaluation_without_replay(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    """A trainer without the mixin does not say where an evaluation begins."""
    rollouts = RecordedRollouts(client)
    trainer = make_trainer(
        model_path,
        rollouts,
        tmp_path,
        trainer_class=GRPOTrainer,
        arguments={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[2:]})},
        per_device_eval_batch_size=4,
        num_generations_eval=2,
    )
    trainer.evaluate()
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
    trainer.evaluate()
    assert [each.weight_version for each in rollouts.rollouts[::4]] == ["step-0-push-1", "step-0-push-2"]


def test_the_off_policy_mask_drops_no_sequence_on_equal_weights(
    model_path: Path, client: RolloutClient, tmp_path: Path
) -> None:
    trainer = make_trainer(
        model_path, SGLangRollouts(client), tmp_path, off_policy_mask_threshold=0.1, max_steps=1
    )
    trainer.train()
    (batch,) = trainer.micro_batches
    drift, without_replay = (
        ((batch.old_logprobs - logprobs) * batch.mask).sum(1) / batch.mask.sum(1)
        for logprobs in (batch.logprobs, batch.full_logprobs)
    )
    assert drift.abs().max() < 1e-4
    # Over the vocabulary, the kept mass looks like drift: every sequence of negative advantage is dropped.
    is_negative = batch.inputs["advantages"] < 0
    assert is_negative.any()
    assert (without_replay[is_negative] > 0.1).all()


def test_tools_answer_in_an_override(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    answer = [65, 66, 67]

    class WithATool(RecordedRollouts):
        def generate(self, prompt_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[Rollout]:
            sampling_params = sampling_params | {"ignore_eos": True}  # every turn has the same length
            first = super().generate(prompt_ids, sampling_params | {"max_new_tokens": 5})
            called = [rollout.extend(answer) for rollout in first]
            return self.client.resume(
                called, sampling_params | {"max_new_tokens": 4}, top_logprobs_source="sampler"
            )

    trainer = make_trainer(model_path, WithATool(client), tmp_path, max_steps=1)
    trainer.train()
    check_ratios(trainer.micro_batches)
    (batch,) = trainer.micro_batches
    assert batch.mask.tolist() == [[True] * 5 + [False] * 3 + [True] * 4] * 8
    assert (batch.inputs["completion_ids"][:, 5:8] == torch.tensor(answer)).all()


def test_sampling_parameters_that_the_sets_show(
    model_path: Path, client: RolloutClient, tmp_path: Path
) -> None:
    rollouts = RecordedRollouts(client, sampling_params={"min_new_tokens": 4, "stop": ["a"]})
    model = model_that_ends(model_path, tmp_path / "model")
    trainer = make_trainer(model, rollouts, tmp_path, top_p=1.0, min_p=1e-6, max_steps=1)
    trainer.train()
    check_ratios(trainer.micro_batches)
    # The stop string may come before four tokens, the end token may not.
    (stop,) = AutoTokenizer.from_pretrained(model_path)("a").input_ids
    assert all(len(each.output_ids) >= 4 or each.output_ids[-1] == stop for each in rollouts.rollouts)
    # The end token is possible only after four tokens.
    allowed = [[0 in ids for ids, _ in each.candidates or ()] for each in rollouts.rollouts]
    assert not any(any(each[:4]) for each in allowed)
    assert any(any(each[4:]) for each in allowed)


def test_bf16_autocast(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    """The engine computes in float32 and the trainer in bfloat16, so the ratios scatter around 1."""
    trainer = make_trainer(
        model_path,
        SGLangRollouts(client),
        tmp_path,
        bf16=True,
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=64,
        max_steps=1,
    )
    trainer.train()
    (batch,) = trainer.micro_batches
    assert len(batch.ratios) > 1000
    check_ratios([batch], of_mean=1e-3, of_token=0.05)
