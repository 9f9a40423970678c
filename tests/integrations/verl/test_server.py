"""verl's server on a real SGLang: sets, log-probs, and requests that are not replayed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_topp import formats
from sglang_topp.errors import MissingCandidateSetsError
from sglang_topp_integrations.verl import FIELD
from tests.engine.transformers_reference import is_robust, nucleus, reference_logprobs
from tests.integrations.verl.conftest import TOP_P, Run

PROMPT = list(range(10, 40))
SAMPLER = {"temperature": 1.0, "top_p": TOP_P, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def test_sets_are_those_of_the_definition(server: Any, run: Run, model_path: Path) -> None:
    output = run(server.generate(PROMPT, {**SAMPLER, "max_tokens": 48, "ignore_eos": True}, "definition"))

    sets = formats.unpack(output.extra_fields[FIELD])
    assert sets.sampled_ids.tolist() == output.token_ids
    assert output.log_probs == sets.masked_logprobs.tolist()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected = reference_logprobs(model, PROMPT, output.token_ids, 1.0)
    compared = [t for t in range(len(sets)) if is_robust(expected[t], TOP_P)]
    assert len(compared) > 40
    for t in compared:
        ids, logprobs = sets[t]
        assert set(ids.tolist()) == nucleus(expected[t], TOP_P) | {output.token_ids[t]}
        np.testing.assert_allclose(logprobs, expected[t][ids], atol=2e-5)


def test_other_samplers_get_no_sets_and_verl_log_probs(server: Any, run: Run) -> None:
    for changed in ({"temperature": 0}, {"top_p": 1.0}, {"repetition_penalty": 1.2}, {"min_p": 0.1}):
        output = run(
            server.generate(PROMPT, {**SAMPLER, "max_tokens": 4, **changed}, f"other-{min(changed)}")
        )

        assert FIELD not in output.extra_fields
        assert len(output.log_probs) == len(output.token_ids) == 4


def test_an_answer_without_sets_is_an_error(server: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from an SGLang whose process has not loaded the plugin."""
    original = server.tokenizer_manager.generate_request

    async def unpatched(*args: Any) -> AsyncIterator[dict[str, Any]]:
        async for answer in original(*args):
            kept = {key: value for key, value in answer["meta_info"].items() if "top_p" not in key}
            yield {**answer, "meta_info": kept}

    monkeypatch.setattr(server.tokenizer_manager, "generate_request", unpatched)
    with pytest.raises(MissingCandidateSetsError, match="output_top_p_logprobs: the response holds no"):
        run(server.generate(PROMPT, {**SAMPLER, "max_tokens": 4}, "unpatched"))
