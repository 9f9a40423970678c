"""Replaying the sets of real rollouts with the same weights gives importance ratios of 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_topp import CandidateSets
from sglang_topp.replay import (
    Scores,
    replay_metrics,
    replayed_old_logprobs,
    score,
    score_logits,
)
from sglang_topp_client import RolloutClient
from tests.engine.start_servers import Engine

PROMPTS = ["The quick brown fox", "a", "0123456789" * 8]


@pytest.mark.parametrize(("top_p", "temperature"), [(0.8, 1.0), (0.95, 0.7), (1.0, 1.3)])
def test_ratios_are_one(engine: Engine, model_path: Path, top_p: float, temperature: float) -> None:
    with RolloutClient(engine.url, kind="sglang") as client:
        rollouts = client.generate(
            PROMPTS,
            {"top_p": top_p, "temperature": temperature, "n": 2, "max_new_tokens": 40, "ignore_eos": True},
            top_logprobs_p=top_p,
        )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    weight = model.get_output_embeddings().weight.detach().requires_grad_()

    hidden = []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.output_ids])).long()
        with torch.no_grad():
            states = model.model(ids[None]).last_hidden_state[0]
        hidden.append(states[len(rollout.prompt_ids) - 1 : -1])
    hidden_TH = torch.cat(hidden)
    targets = torch.from_numpy(np.concatenate([rollout.output_ids for rollout in rollouts])).long()
    sets = CandidateSets.concat([r.candidates for r in rollouts if r.candidates is not None])
    assert len(sets) == len(targets) == 240

    old = replayed_old_logprobs(sets, output_ids=targets.numpy())
    logits_TV = hidden_TH @ weight.detach().T
    scores: dict[str, Scores] = {
        "from hidden states": score(hidden_TH, weight, targets, sets, temperature=temperature),
        "from logits": score_logits(logits_TV, targets, sets, temperature=temperature, full=True),
    }
    for name, scored in scores.items():
        ratios = (scored.logprobs.detach() - old).exp()
        assert (ratios - 1).abs().max() < 1e-4, name
    # Without the mask, the ratios are off by exactly the kept mass.
    full = scores["from logits"].full_logprobs
    assert full is not None
    kept_mass = torch.tensor(sets.log_kept_mass).exp()
    torch.testing.assert_close((full - old).exp(), kept_mass, rtol=1e-4, atol=1e-5)

    metrics = replay_metrics(scores["from hidden states"].logprobs.detach(), old, sets)
    assert metrics.tokens == len(sets)
    assert abs(metrics.summary()["replay/ratio_mean"] - 1) < 1e-5
    scores["from hidden states"].logprobs.sum().backward()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
