"""Two data-parallel replicas without a tokenizer (`--skip-tokenizer-init`) answer with exact sets.

Both replicas count the candidates in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.engine.candidate_set_checks import check_whole
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.start_servers import Engine, run_engine

SAMPLING = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
WHOLE = {"return_logprob": True, "top_logprobs_p": 0.8, "top_logprobs_num": VOCAB_SIZE}


@pytest.fixture(scope="module")
def replicas(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    arguments = ["--dp-size", "2", "--skip-tokenizer-init"]
    # The cores of each rank. Before 0.5.20, SGLang counts ranks within a replica.
    cores = "0|1" if Version(version("sglang")) >= Version("0.5.20") else "0-1"
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": cores}
    with run_engine(model_path, log_folder / "dp.log", *arguments, env=environment) as running:
        yield running


@pytest.mark.parametrize("base64", [True, False], ids=["base64", "list"])
def test_both_replicas_answer_with_exact_sets(replicas: Engine, base64: bool) -> None:
    def ask(i: int) -> Any:
        prompt = [70 + i, 80, 90]
        answer = replicas.generate(
            input_ids=prompt,
            sampling_params=SAMPLING,
            logprob_start_len=0,
            return_logprobs_in_base64=base64,
            **WHOLE,
        )
        assert len(check_whole(answer, 0.8, prompt)) == 16
        assert "text" not in answer
        return answer["meta_info"]["dp_rank"]

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(8))) == {0, 1}


def test_a_batch_and_a_stream(replicas: Engine) -> None:
    prompts = [[70 + i] for i in range(5)]
    for answer in replicas.generate(input_ids=prompts, sampling_params={**SAMPLING, "n": 2}, **WHOLE):
        assert len(check_whole(answer, 0.8)) == 16
    chunks = replicas.stream(input_ids=[70, 71], sampling_params=SAMPLING, **WHOLE)
    assert [len(check_whole(chunk, 0.8)) for chunk in chunks][-1] == 16


def test_both_replicas_are_patched(replicas: Engine) -> None:
    info = replicas.http.get("/server_info").json()
    assert info["sglang_topp"]["active"] is True
    assert [state["sglang_topp"]["active"] for state in info["internal_states"]] == [True, True]
