"""Make weights to push, and check answers whose tokens come from several versions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_tiny_model
from sglang_topp import CandidateSets
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.start_servers import Engine
from tests.engine.transformers_reference import is_robust, nucleus, reference_logprobs

__all__ = ["check_answer", "check_sets", "make_weights", "restore_weights", "versions_of"]

# `MODEL_TOLERANCE` for the long answers of these tests (measured: 1.6e-5 up to position 1,800). The log-probs
# of two versions differ by about 1.
_TOLERANCE = 3e-5


def restore_weights(engine: Engine, model_path: Path) -> None:
    """Continue generation, and push the first weights once the last test's requests have ended.

    SGLang refuses to flush its cache while an aborted request is still in its last pass.
    """
    assert engine.http.post("/continue_generation", json={}).status_code == 200
    order = {"model_path": str(model_path), "weight_version": "default"}
    deadline = time.monotonic() + 60
    while (answer := engine.http.post("/update_weights_from_disk", json=order)).status_code != 200:
        assert "still running or queued" in answer.text, answer.text
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def make_weights(model_path: Path, folder: Path, vocab_size: int) -> dict[str, Path]:
    """Make two models that differ from `model_path` in the LM head alone, and two that differ in everything.

    Another LM head leaves hidden states, and so the KV cache, as they were. If a pause keeps the cache, each
    position's distribution is still known exactly.

    Returns:
        Each model's folder by its version. "default" is `model_path`.
    """
    folders = {"default": model_path}
    for seed in (1, 2):
        other, head = folder / f"other-{seed}", folder / f"head-{seed}"
        folders[other.name] = make_tiny_model(other, vocab_size=vocab_size, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        donor = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
        model.lm_head.weight.data.copy_(donor.lm_head.weight.data)
        model.save_pretrained(head)
        folders[head.name] = head
    return folders


def versions_of(answer: dict[str, Any]) -> list[str]:
    """Return each token's version. Check that the spans cover the tokens."""
    spans, num_tokens = answer["meta_info"]["weight_versions"], len(answer["output_ids"])
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == num_tokens
    assert all(a["version"] != b["version"] for a, b in itertools.pairwise(spans))
    assert answer["meta_info"]["weight_version"] == spans[-1]["version"]
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


def check_answer(answer: dict[str, Any], p: float, references: dict[str, Any]) -> list[str]:
    """Check that there is one set per token, and that each belongs to the version the answer names for it.

    Returns:
        Each token's version.
    """
    sets = checked_sets(answer, p)
    versions = versions_of(answer)
    assert len(versions) == len(sets) == len(answer["output_ids"])
    check_sets(sets, p, versions, answer["prompt_token_ids"], answer["output_ids"], references)
    return versions


def check_sets(
    sets: CandidateSets,
    p: float,
    versions: Sequence[str],
    prompt_ids: list[int],
    output_ids: list[int],
    references: dict[str, Any],
) -> None:
    """Check the versions of sets that a client has decoded."""
    if not output_ids:
        return
    expected = {
        version: reference_logprobs(model, prompt_ids, output_ids, 1.0)
        for version, model in references.items()
    }
    for t, (token_ids, logprobs) in enumerate(sets):
        off = {version: np.abs(each[t, token_ids] - logprobs).max() for version, each in expected.items()}
        assert min(off, key=lambda version: off[version]) == versions[t], f"position {t}: {off}"
        assert off[versions[t]] < _TOLERANCE
        exact = expected[versions[t]][t]
        if is_robust(exact, p, _TOLERANCE):
            assert set(token_ids.tolist()) == nucleus(exact, p) | {output_ids[t]}
