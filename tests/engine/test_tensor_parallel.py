"""Two tensor-parallel ranks on the CPU: one of them answers, its sets are exact."""

from __future__ import annotations

from pathlib import Path

from tests.engine.checks import checked_sets
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.running import run_engine

SAMPLING = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}


def test_two_ranks(model_path: Path, log_folder: Path) -> None:
    with run_engine(
        model_path,
        log_folder / "tp.log",
        "--tp-size",
        "2",
        env={
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "SGLANG_TOPP_MAX_CANDIDATES_PER_SAMPLE": str(40 * VOCAB_SIZE),
        },
    ) as engine:
        request = {
            "text": ["one", "two", "three"],
            "return_logprob": True,
            "top_logprobs_p": 0.9,
            "return_logprobs_in_base64": True,
            "logprob_start_len": 0,
        }
        for sampling in (SAMPLING, {**SAMPLING, "temperature": 0}, {**SAMPLING, "regex": "[a-z]+"}):
            for answer in engine.generate(sampling_params=sampling, **request):
                checked_sets(answer, 0.9)
        # Only one rank counts what is held; were the request ended there alone, the ranks would wait for
        # each other for ever.
        beyond = {**request, "text": "one", "top_logprobs_p": 1, "logprob_start_len": -1}
        answer = engine.post(sampling_params={**SAMPLING, "max_new_tokens": 200}, **beyond)
        assert answer.status_code == 413
        assert "for one sample" in answer.text
        for answer in engine.generate(sampling_params=SAMPLING, **request):
            checked_sets(answer, 0.9)
        assert engine.http.get("/server_info").json()["sglang_topp"]["active"] is True
