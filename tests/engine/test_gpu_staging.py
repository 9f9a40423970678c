"""The real engine with the extraction code for GPUs, which runs in Triton's interpreter.

The staging area is so small that most sets do not fit in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_topp import formats
from sglang_topp_patches.releases import Feature, refused
from tests.engine.candidate_set_checks import check_whole
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.start_servers import Engine, run_engine

SAMPLING = {"max_new_tokens": 8, "ignore_eos": True}
P = [0.3, 0.9, 0.99, 1.0]


@pytest.fixture(scope="module")
def staging_engine(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    env = {"TRITON_INTERPRET": "1", "SGLANG_TOPP_STAGED_CANDIDATES_PER_ROW": "4"}
    with run_engine(model_path, log_folder / "staging.log", env=env) as running:
        yield running


def test_every_set_is_exact_whatever_fits(staging_engine: Engine) -> None:
    """One batch has requests by threshold, with the prompt's sets, and from the sampler."""
    wanted = {"return_logprob": True, "return_logprobs_in_base64": True}
    answers = staging_engine.generate(
        text=[f"prompt {i}" for i in range(8)],
        sampling_params=[{**SAMPLING, "temperature": 1.0}] * 8,
        top_logprobs_p=P * 2,
        top_logprobs_num=VOCAB_SIZE,
        logprob_start_len=0,
        return_prompt_token_ids=True,
        **wanted,
    )
    sizes = []
    for answer, p in zip(answers, P * 2, strict=True):
        sets = check_whole(answer, p, prompt_ids=answer["prompt_token_ids"])
        assert len(sets) == SAMPLING["max_new_tokens"]
        sizes += sets.sizes.tolist()
    assert min(sizes) < 4
    assert max(sizes) == VOCAB_SIZE

    if not refused(Feature.SAMPLER_SOURCE):
        filters = [{"top_k": 20}, {"top_p": 0.95, "temperature": 1.4}, {"min_p": 0.05}, {}]
        filters = [{"top_k": 511, **each} for each in filters] + [{"temperature": 0, "top_k": 50}]
        answers = staging_engine.generate(
            text=["a"] * len(filters),
            sampling_params=[{**SAMPLING, **each} for each in filters],
            top_logprobs_source="sampler",
            return_sampling_mask=True,
            **wanted,
        )
        for answer in answers:
            meta_info = answer["meta_info"]
            sets = formats.decode_top_p(meta_info, answer["output_ids"], vocab_size=VOCAB_SIZE)
            for (token_ids, _), native in zip(sets, meta_info["output_token_sampling_mask"], strict=True):
                assert sorted(token_ids.tolist()) == sorted(native)

    staging = staging_engine.http.get("/server_info").json()["sglang_topp"]["staging"]
    assert staging["rows_staged"] > 8 * SAMPLING["max_new_tokens"]
    assert 0 < staging["rows_taken_again"] < staging["rows_staged"]
    assert staging["max_bytes"] >= 8 * 4 * 16
