"""The sets against oracles that share no code with the plugin.

One is transformers' forward pass of the same weights, with the definition applied to it. The other is
SGLang's own `return_sampling_mask` in the same request: the tokens that its sampler could have drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.candidate_set_checks import checked_sets
from tests.engine.start_servers import Engine
from tests.engine.transformers_reference import MODEL_TOLERANCE, is_robust, nucleus, reference_logprobs
from tests.skip_missing_features import needs_native_masks

PROMPTS = ["The quick brown fox", "a", "0123456789" * 20, "Zürich, 東京"]
SAMPLING = {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference_model(model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.mark.parametrize(("p", "temperature"), [(0.8, 1.0), (0.95, 1.0), (0.5, 0.7), (0.99, 1.0)])
def test_sets_equal_the_definition_on_transformers_logprobs(
    engine: Engine, model_path: Path, reference_model: Any, p: float, temperature: float
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    answers = engine.generate(
        input_ids=prompts,
        sampling_params={**SAMPLING, "temperature": temperature, "top_p": 0.9},
        return_logprob=True,
        top_logprobs_p=p,
        return_logprobs_in_base64=True,
    )
    compared = total = 0
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        sets = checked_sets(answer, p)
        expected = reference_logprobs(reference_model, prompt_ids, answer["output_ids"], temperature)
        for t, (token_ids, logprobs) in enumerate(sets):
            np.testing.assert_allclose(logprobs, expected[t, token_ids], atol=MODEL_TOLERANCE)
            total += 1
            if is_robust(expected[t], p):
                compared += 1
                assert set(token_ids.tolist()) == nucleus(expected[t], p) | {answer["output_ids"][t]}
    assert compared > total / 3, f"only {compared} of {total} positions were clear of rounding"


@needs_native_masks()
@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_p": 0.7, "temperature": 0.8},
        {"top_p": 0.9, "frequency_penalty": 1.0},
        {"top_p": 0.9, "logit_bias": {"70": 4.0}},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_sets_agree_with_the_native_sampling_mask(engine: Engine, sampling: dict[str, Any]) -> None:
    p = sampling["top_p"]
    answers = engine.generate(
        text=PROMPTS,
        sampling_params={**SAMPLING, **sampling, "top_k": 512},
        return_logprob=True,
        return_sampling_mask=True,
        top_logprobs_p=p,
        return_logprobs_in_base64=True,
    )
    compared = 0
    for answer in answers:
        sets = checked_sets(answer, p)
        masks = answer["meta_info"]["output_token_sampling_mask"]
        assert len(masks) == len(sets)
        for (token_ids, logprobs), native in zip(sets, masks, strict=True):
            mass = np.exp(logprobs.astype(np.float64))
            at_cutoff = logprobs == logprobs[-1]
            # The native mask cuts a sorted row: it keeps some of a tie at the cutoff, we keep all.
            rounding = abs(mass[:-1].sum() - p) < 1e-5 or abs(mass.sum() - p) < 1e-5
            if at_cutoff.sum() > 1 or rounding:
                continue
            compared += 1
            assert set(token_ids.tolist()) == set(native)
    assert compared > 100
