"""`sglang.Engine` in the test's own process: exact sets, however they are requested."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.candidate_set_checks import ROUNDING, checked_sets
from tests.engine.start_servers import START_LIMIT_S

VOCAB = 512
PER_SAMPLE = 100_000


@pytest.fixture(scope="module")
def answers(model_path: Path, log_folder: Path) -> Any:
    """Return the answer to every request of `offline_engine_script`."""
    path, log = log_folder / "in_process.json", log_folder / "in_process.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.offline_engine_script", str(model_path), str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE": str(PER_SAMPLE)},
            timeout=START_LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    return json.loads(path.read_text())


def full_distribution(meta_info: dict[str, Any]) -> np.ndarray:
    """Return float32 [T, V]: the distributions that the same answer has in `top_logprobs_num`."""
    if "output_top_logprobs_shape" in meta_info:
        raw = [base64.b64decode(meta_info[f"output_top_logprobs_{part}_base64"]) for part in ("val", "idx")]
        values, ids = np.frombuffer(raw[0], "<f4"), np.frombuffer(raw[1], "<i4")
        values, ids = values.reshape(-1, VOCAB), ids.reshape(-1, VOCAB)
    else:
        rows = np.array([[each[:2] for each in row] for row in meta_info["output_top_logprobs"]])
        values, ids = rows[..., 0].astype(np.float32), rows[..., 1].astype(int)
    full = np.empty_like(values)
    np.put_along_axis(full, ids, values, axis=1)
    return full


def check(answer: Any, p: float, tokens: int = 12) -> None:
    """Check that the sets equal the definition on the whole distribution."""
    sets = checked_sets(answer, p)
    assert len(sets) == tokens
    for (token_ids, logprobs), full, sampled_id in zip(
        sets, full_distribution(answer["meta_info"]), answer["output_ids"], strict=True
    ):
        np.testing.assert_array_equal(logprobs, full[token_ids])
        mass = np.exp(full.astype(np.float64))
        above = np.array([mass[full > each].sum() for each in full])
        kept = set(token_ids.tolist())
        assert set(np.flatnonzero(above < p - ROUNDING).tolist()) <= kept
        assert kept <= set(np.flatnonzero(above < p + ROUNDING).tolist()) | {sampled_id}


@pytest.mark.parametrize(
    "name",
    [
        *("list", "base64", "custom_params list", "custom_params base64", "input_ids", "positional"),
        *("attributes of the request", "async", "after all that"),
    ],
)
def test_sets_in_process(answers: Any, name: str) -> None:
    answer = answers[name]
    is_base64 = "base64" in name or "request" in name
    assert ("output_top_p_logprobs_val_base64" in answer["meta_info"]) is is_base64
    check(answer, 0.8)


@pytest.mark.parametrize(("name", "n"), [("batch", 1), ("batch of n", 2)])
def test_a_threshold_for_each_prompt(answers: Any, name: str, n: int) -> None:
    assert len(answers[name]) == 3 * n
    for i, answer in enumerate(answers[name]):
        if p := [0.9, None, 0.5][i // n]:
            check(answer, p)
        else:
            assert not [key for key in answer["meta_info"] if "top_p" in key]


def test_several_samples(answers: Any) -> None:
    assert len({tuple(answer["output_ids"]) for answer in answers["n"]}) == 3
    for answer in answers["n"]:
        check(answer, 0.8)


def test_prompt_sets(answers: Any) -> None:
    lengths = answers["prompt"]["meta_info"]["input_top_p_logprobs_lengths"]
    assert lengths[0] == -1
    assert min(lengths[1:]) > 0
    assert len(lengths) == answers["prompt"]["meta_info"]["prompt_tokens"]
    check(answers["prompt"], 0.8)


@pytest.mark.parametrize("name", ["stream", "async stream"])
def test_every_chunk_of_a_stream_has_the_sets_of_its_tokens(answers: Any, name: str) -> None:
    chunks = answers[name]
    assert len(chunks) > 1  # SGLang merges chunks if its HTTP process falls behind
    for chunk in chunks:
        check(chunk, 0.8, len(chunk["output_ids"]))
    assert len(chunks[-1]["output_ids"]) == 12


def test_calls_side_by_side_keep_their_own_fields(answers: Any) -> None:
    for answer, p in zip(answers["async side by side"], [0.9, None, 0.3, None, 0.8], strict=True):
        if p:
            check(answer, p)
        else:
            assert not [key for key in answer["meta_info"] if "top_p" in key]


@pytest.mark.parametrize("name", ["not asked", "asked for nothing"])
def test_who_does_not_ask_is_answered_without(answers: Any, name: str) -> None:
    meta_info = answers[name]["meta_info"]
    assert len(meta_info["output_top_logprobs"]) == 12
    assert not [key for key in meta_info if "top_p" in key or "base64" in key or "sglang_topp" in key]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("too large", "ValueError", "top_logprobs_p: got 7"),
        ("async too large", "ValueError", "top_logprobs_p: got 7"),
        ("custom_params too large", "ValueError", "sampling_params.custom_params.top_logprobs_p: got 7"),
        ("of another length", "ValueError", "top_logprobs_p: got 2 values for 3 prompts"),
        ("without return_logprob", "ValueError", "top_logprobs_p: needs return_logprob"),
        ("another keyword", "TypeError", "unexpected keyword argument 'top_logprobs'"),
        ("over budget", "HTTPException", f"expected at most {PER_SAMPLE} for one sample"),
    ],
)
def test_what_is_wrong_is_raised_in_words(answers: Any, name: str, kind: str, words: str) -> None:
    assert kind in answers[name]["types"]
    assert words in answers[name]["words"]
    if kind == "ValueError":
        assert "InvalidInputError" in answers[name]["types"]


def test_a_stream_beyond_its_budget_ends_with_the_reason(answers: Any) -> None:
    meta_info = answers["stream over budget"]["meta_info"]
    assert meta_info["finish_reason"]["type"] == "abort"
    assert f"expected at most {PER_SAMPLE}" in meta_info["finish_reason"]["message"]
    assert "output_top_p_logprobs_lengths" not in meta_info
