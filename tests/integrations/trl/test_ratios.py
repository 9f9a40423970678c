"""The real GRPOTrainer on the real engine: ratios of 1 with the sets, and the kept mass without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client import RolloutClient
from sglang_topp_integrations.trl import SGLangRollouts
from tests.integrations.trl.recording_trainer import (
    RecordedRollouts,
    ReplayTrainer,
    check_ratios,
    make_trainer,
)


@pytest.fixture(scope="module")
def trained(
    model_path: Path, client: RolloutClient, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, RecordedRollouts]:
    """Two steps, with a loss that has a KL and an entropy term, at a temperature other than 1."""
    rollouts = RecordedRollouts(client)
    trainer = make_trainer(
        model_path,
        rollouts,
        tmp_path_factory.mktemp("trained"),
        temperature=0.7,
        beta=0.1,
        entropy_coef=0.01,
        num_iterations=2,
        max_steps=4,
    )
    trainer.train()
    return trainer, rollouts


def test_every_generation_starts_at_a_ratio_of_one(trained: tuple[Any, RecordedRollouts]) -> None:
    trainer, _ = trained
    assert [each.is_fresh for each in trainer.micro_batches] == [True, False, True, False]
    check_ratios(trainer.micro_batches)
    # After a step the policy is another one, and so are the ratios.
    for each in trainer.micro_batches[1::2]:
        assert np.abs(each.ratios - 1).max() > 0.01


def test_the_old_log_probs_are_the_engines(trained: tuple[Any, RecordedRollouts]) -> None:
    trainer, rollouts = trained
    answers = {
        (tuple(each.prompt_ids.tolist()), tuple(each.output_ids.tolist())): each.masked_logprobs
        for each in rollouts.rollouts
    }
    assert {each.weight_version for each in rollouts.rollouts} == {"step-0-push-1", "step-2-push-2"}
    for batch in trainer.micro_batches:
        inputs = batch.inputs
        for row, mask in enumerate(batch.mask):
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
            ids = inputs["completion_ids"][row][mask]
            expected = answers[tuple(prompt.tolist()), tuple(ids.tolist())]
            np.testing.assert_array_equal(batch.old_logprobs[row][mask].numpy(), expected)


def test_over_the_vocabulary_the_ratio_is_the_kept_mass(trained: tuple[Any, RecordedRollouts]) -> None:
    for each in trained[0].micro_batches:
        if not each.is_fresh:
            continue
        ratios = (each.full_logprobs - each.old_logprobs)[each.mask].double().exp().numpy()
        mass = np.exp(np.concatenate([sets.log_kept_mass for sets in each.sets]).astype(np.float64))
        assert ratios.mean() == pytest.approx(mass.mean(), abs=1e-3)
        assert ratios.mean() < 0.9
        assert np.mean(np.abs(ratios - 1) > 0.1) > 0.5


def test_the_metrics_are_logged(trained: tuple[Any, RecordedRollouts]) -> None:
    trainer, _ = trained
    first, second, *_ = trainer.state.log_history
    assert first["replay/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert first["replay/tokens"] == trainer.micro_batches[0].mask.sum()
    # The mean ratio after a step can be 1 by chance, the largest one cannot.
    ratios = trainer.micro_batches[1].ratios
    assert second["replay/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert second["replay/ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)
    assert second["replay/ratio_max"] > 1.01
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] > 1e-4


def test_the_gradient_is_that_of_a_dense_mask(
    trained: tuple[Any, RecordedRollouts], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained
    model, inputs = trainer.model, trainer.micro_batches[-1].inputs

    def dense(_: Any, input_ids: Tensor, attention_mask: Tensor, width: int, **__: Any) -> tuple[Any, ...]:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        logits = logits[:, -width - 1 : -1] / trainer.temperature
        is_allowed = torch.zeros_like(logits, dtype=torch.bool)
        is_allowed[..., 0] = True  # padding: something must be possible
        for row, sets in enumerate(inputs["candidate_sets"]):
            is_allowed[row, : len(sets)] = False
            for t, (token_ids, _) in enumerate(sets):
                is_allowed[row, t, torch.tensor(token_ids)] = True
        logprobs = torch.log_softmax(logits.masked_fill(~is_allowed, -torch.inf), -1)
        ids = input_ids[:, -width:] * attention_mask[:, -width:]
        finite = logprobs.masked_fill(~is_allowed, 0)
        return logprobs.gather(-1, ids[..., None])[..., 0], -(logprobs.exp() * finite).sum(-1), None

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = GRPOTrainer._compute_loss(trainer, model, inputs)
        loss.backward()
        return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}

    trainer._rows = inputs["candidate_rows"]
    loss, ours = gradients()
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", dense)
    expected_loss, expected = gradients()
    model.zero_grad()
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5, abs=1e-6)  # it may be close to 0
    for name, grad in expected.items():
        assert grad.abs().max() > 1e-4, name
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=1e-5 * float(grad.abs().max()))


def test_sets_of_another_row_are_an_error(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    class Swapping(ReplayTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            output["candidate_sets"] = output["candidate_sets"][1:] + output["candidate_sets"][:1]
            return output

    trainer = make_trainer(model_path, SGLangRollouts(client), tmp_path, trainer_class=Swapping)
    with pytest.raises(InvalidInputError, match="of another response, or shifted"):
        trainer.train()


class LaggingClient:
    """Leaves out every push after the first, or repeats the first weights under the new name."""

    def __init__(self, client: RolloutClient, first: Path, *, repeats: bool) -> None:
        self._client, self._first, self._repeats, self._num_pushes = client, first, repeats, 0
        self.generate = client.generate

    def push_weights(self, model: Any, *, version: str) -> None:
        self._num_pushes += 1
        if self._num_pushes == 1:
            self._client.push_weights(model, version=version)
        elif self._repeats:
            self._client.push_weights(self._first, version=version)


def test_a_push_left_out_is_an_error(model_path: Path, client: RolloutClient, tmp_path: Path) -> None:
    lagging: Any = LaggingClient(client, model_path, repeats=False)
    trainer = make_trainer(model_path, SGLangRollouts(lagging), tmp_path)
    with pytest.raises(WireError, match="'step-0-push-1', expected 'step-1-push-2'"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_old_weights_under_the_new_name_fail_the_ratios(
    model_path: Path, client: RolloutClient, tmp_path: Path
) -> None:
    lagging: Any = LaggingClient(client, model_path, repeats=True)
    trainer = make_trainer(model_path, SGLangRollouts(lagging), tmp_path)
    trainer.train()
    check_ratios(trainer.micro_batches[:1])
    with pytest.raises(AssertionError):
        check_ratios(trainer.micro_batches[1:])


def test_a_second_training_pushes_the_weights_of_the_first(
    model_path: Path, client: RolloutClient, tmp_path: Path
) -> None:
    trainer = make_trainer(model_path, SGLangRollouts(client), tmp_path, max_steps=1)
    trainer.train()
    trainer.train()  # from step 0 again
    assert len(trainer.micro_batches) == 2
    check_ratios(trainer.micro_batches)
