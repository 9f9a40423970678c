"""`logit_scale` against the models that scale their logits, in transformers."""

from __future__ import annotations

import pytest
import torch
from replay_oracle import error, random_sets, scores, targets_of
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from sglang_topp.replay import score

V, T = 61, 7
SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def cohere() -> tuple[PreTrainedModel, float]:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)), 0.25


def granite() -> tuple[PreTrainedModel, float]:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)), 1 / 8.0


def falcon_h1() -> tuple[PreTrainedModel, float]:
    mamba = {
        "mamba_d_ssm": 16,
        "mamba_n_heads": 2,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    }
    return FalconH1ForCausalLM(FalconH1Config(**SIZES, **mamba, lm_head_multiplier=0.125)), 0.125


@pytest.mark.parametrize("make", [cohere, granite, falcon_h1])
def test_logits_of_the_model(make):
    torch.manual_seed(0)
    model, logit_scale = make()
    ids = torch.arange(T)[None] * 5 % V
    with torch.no_grad():
        logits = model(ids).logits[0].double()
        hidden = model.model(ids).last_hidden_state[0]
    weight, sets = model.lm_head.weight, random_sets([3, 1, V, 5, 2, 9, 4], V)
    targets = targets_of(sets)
    got = score(hidden, weight, targets, sets, logit_scale=logit_scale, entropy=True)
    want = scores(logits, targets, sets)
    assert error(got.logprobs, want["logprobs"]) < 1e-5
    assert error(got.entropy, want["entropy"]) < 1e-5
    whole = score(hidden, weight, targets, logit_scale=logit_scale)
    assert error(whole.logprobs, torch.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]) < 1e-5
    # The scale matters here: without it, the log-probs differ.
    assert error(score(hidden, weight, targets, sets).logprobs, want["logprobs"]) > 1e-3
