"""Two tensor-parallel ranks on the CPU: one of them answers, its sets are exact."""

from __future__ import annotations

from pathlib import Path

from sglang_topp import formats
from sglang_topp_patches.releases import Feature, refused
from tests.engine.candidate_set_checks import checked_sets
from tests.engine.start_servers import run_engine
from tests.skip_missing_features import grammar_problem

SAMPLING = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}


def test_two_ranks(model_path: Path, log_folder: Path) -> None:
    with run_engine(
        model_path,
        log_folder / "tp.log",
        "--tp-size",
        "2",
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE": "30000"},
    ) as engine:
        request = {
            "text": ["one", "two", "three"],
            "return_logprob": True,
            "top_logprobs_p": 0.9,
            "return_logprobs_in_base64": True,
            "logprob_start_len": 0,
        }
        constrained = [] if grammar_problem() else [{**SAMPLING, "regex": "[a-z]+"}]
        for sampling in (SAMPLING, {**SAMPLING, "temperature": 0}, *constrained):
            for answer in engine.generate(sampling_params=sampling, **request):
                checked_sets(answer, 0.9)
        if not refused(Feature.SAMPLER_SOURCE):
            # Sets from the sampler: each rank samples by itself, and must draw the same token.
            filters = {"top_k": 7, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8}
            for answer in engine.generate(
                text=["one", "two", "three"],
                sampling_params=[{**SAMPLING, **filters}, SAMPLING, {**SAMPLING, "temperature": 0}],
                return_logprob=True,
                return_logprobs_in_base64=True,
                top_logprobs_source="sampler",
            ):
                assert answer["meta_info"]["top_logprobs_source"] == "sampler"
                sets = formats.decode_top_p(answer["meta_info"], answer["output_ids"])
                assert sets.sizes.max() < 512
        # One rank counts the candidates. A request that is too large ends on both, and the others continue.
        for stream in (False, True):
            large = {"sampling_params": {**SAMPLING, "max_new_tokens": 150}, "return_logprob": True}
            large |= {"text": "x", "top_logprobs_p": 1.0, "return_logprobs_in_base64": True}
            if stream:
                last = engine.stream(**large)[-1]
                assert last["meta_info"]["finish_reason"]["status_code"] == 413
            else:
                answer = engine.post(**large)
                assert answer.status_code == 413
                assert "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE" in answer.text
            for whole in engine.generate(sampling_params=SAMPLING, **request):
                checked_sets(whole, 0.9)
        assert engine.http.get("/server_info").json()["sglang_topp"]["active"] is True
