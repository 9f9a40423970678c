"""The branch of the model's forward: over sets of the whole vocabulary, it is TRL's own fused head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

from sglang_topp_integrations.trl import _add_candidate_head
from tests.integrations.trl.candidate_rows import PROMPT, WIDTH, random_rows

VOCAB = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8}),
        ("FalconH1", {"lm_head_multiplier": 0.3, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 4}),
        ("Phi", {}),  # its head has a bias
    ],
)
def test_over_the_whole_vocabulary_it_is_trls_head(family: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.normal_(0, 2)
        if head.bias is not None:
            head.bias.normal_()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    _add_candidate_head(model, 0.7)
    rows, input_ids = random_rows(VOCAB, set_size=VOCAB)
    labels = torch.full_like(input_ids, -100)
    labels[:, PROMPT:][rows.is_scored] = rows.targets
    expected = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
    scores = model(input_ids=input_ids, candidate_rows=rows, compute_entropy=True)
    assert expected.log_probs.std() > 0.1
    torch.testing.assert_close(scores["logprobs"], expected.log_probs[:, -WIDTH:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores["entropy"], expected.entropy[:, -WIDTH:], rtol=1e-5, atol=1e-5)
    assert "entropy" not in model(input_ids=input_ids, candidate_rows=rows)


def test_other_calls_are_the_models_own() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    _add_candidate_head(model, 1.0)
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)
