"""Compare an answer with log-probs that transformers computes from the weights that the answer names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sglang_topp import CandidateSets, formats
from sglang_topp_client import Score
from tests.engine.candidate_set_checks import check_nucleus
from tests.engine.transformers_reference import MODEL_TOLERANCE, reference_logprobs
from tests.soak.random_requests import Ask

__all__ = ["Truth"]

# The engine computes a prompt in different batches, so log-probs differ a little. Other weights differ by
# nats.
_TOLERANCE = 10 * MODEL_TOLERANCE


class Truth:
    """Models by the version under which their weights are pushed."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = folders
        self._models = {
            version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for version, folder in folders.items()
        }

    def check_score(self, score: Score, p: float | None) -> None:
        """Check that all of a score comes from the weights that it names."""
        ids = score.token_ids.tolist()
        assert (score.candidates is not None) == bool(p)
        self._check(score.weight_version, ids, score.start, score.logprobs, score.candidates, p)

    def check_prompt(self, chunk: dict[str, Any], ask: Ask) -> None:
        """Check that all of a prompt's sets come from the weights of the first token."""
        meta_info = chunk["meta_info"]
        reported = meta_info["input_token_logprobs"]
        # SGLang reports the last id of the vocabulary as 0, so compare with the ids that were sent.
        ids = ask.prompt if isinstance(ask.prompt, list) else [token_id for _, token_id, _ in reported]
        sets = formats.decode_top_p(meta_info, ids, side="input")[1:]
        logprobs = np.array([logprob for logprob, _, _ in reported[1:]], np.float32)
        version = meta_info["weight_versions"][0]["version"]
        self._check(version, ids, 1, logprobs, sets, ask.p)

    def _check(
        self,
        version: str | None,
        ids: list[int],
        start: int,
        logprobs: np.ndarray,
        sets: CandidateSets | None,
        p: float | None,
    ) -> None:
        assert version in self._models, f"version {version!r} was never pushed"
        assert len(logprobs) == len(ids) - start
        if len(ids) == start:
            return
        expected = reference_logprobs(self._models[version], ids[:start], ids[start:], 1.0)
        off = np.abs(expected[np.arange(len(expected)), ids[start:]] - logprobs)
        assert off.max() < _TOLERANCE, (
            f"position {start + int(off.argmax())} of {len(ids)} is off by {off.max():.3g} from {version}"
        )
        for t, (token_ids, kept) in enumerate(sets or ()):
            assert kept is not None
            apart = np.abs(expected[t, token_ids] - kept).max()
            assert apart < _TOLERANCE, (
                f"position {start + t}: a candidate is off by {apart:.3g} from {version}"
            )
            if p is not None:
                check_nucleus(token_ids, kept, ids[start + t], p, start + t)
