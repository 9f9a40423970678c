"""Two plugins that hook the same functions both work, in either order."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.candidate_set_checks import check_whole
from tests.engine.second_plugin import KEY, install
from tests.engine.start_servers import Engine, run_engine
from tests.skip_missing_features import hooks_here

SAMPLING = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
WITH_SETS = {"return_logprob": True, "top_logprobs_p": 0.9, "top_logprobs_num": 512}
# The hooks that a single server calls for such requests, without grammar, pause, or pipeline.
CALLED = (
    "GenerateReqInput.normalize_batch_and_arguments",
    "GenerateReqInput.__getitem__",
    "ForwardBatch.init_new",
    "ModelRunner.sample",
    "TokenizerManager._handle_batch_output",
    "TokenizerManager.add_logprob_to_meta_info",
    "TokenizerManager.generate_request",
)
HAS_OUTPUTS = importlib.util.find_spec("sglang.srt.managers.auxiliary_output") is not None


@pytest.fixture(scope="module", params=["before", "after"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(order: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"second-plugin-{order}")


@pytest.fixture(scope="module")
def both(order: str, folder: Path, model_path: Path, log_folder: Path) -> Iterator[Engine]:
    """A server with two plugins, the second loaded before or after ours."""
    env = install(folder, first=order == "before")
    with run_engine(model_path, log_folder / f"second-plugin-{order}.log", env=env) as engine:
        yield engine


def check_theirs(answer: dict[str, Any]) -> None:
    if HAS_OUTPUTS:
        assert answer["meta_info"][KEY] == [token_id + 1 for token_id in answer["output_ids"]]


def test_sets_are_exact_and_the_others_output_is_whole(both: Engine) -> None:
    answers = both.generate(
        text=["hello", "The quick brown fox"], sampling_params={**SAMPLING, "n": 2}, **WITH_SETS
    )
    assert len(answers) == 4
    for answer in answers:
        assert len(check_whole(answer, 0.9)) == 20
        check_theirs(answer)


def test_streams_have_both(both: Engine) -> None:
    *_, last = both.stream(text="hello", sampling_params=SAMPLING, **WITH_SETS)
    assert len(check_whole(last, 0.9)) == 20
    check_theirs(last)


def test_who_asks_for_no_sets_has_the_others_alone(both: Engine) -> None:
    answer = both.generate(text="hello", sampling_params=SAMPLING)
    assert "output_top_p_logprobs" not in answer["meta_info"]
    check_theirs(answer)


def test_bad_input_is_still_a_400(both: Engine) -> None:
    refused = both.post(text="hello", sampling_params=SAMPLING, return_logprob=True, top_logprobs_p=2)
    assert refused.status_code == 400
    assert "top_logprobs_p" in refused.text


def test_the_patch_set_holds_and_the_others_hooks_were_called(both: Engine, folder: Path, order: str) -> None:
    report = both.http.get("/server_info").json()["sglang_topp"]
    assert report["active"] is True
    assert report["problems"] == []
    both.generate(text=["a", "b"], sampling_params=SAMPLING, **WITH_SETS)
    calls = set((folder / "calls").read_text().splitlines())
    assert {each for each in calls if each.startswith("loaded")} == {f"loaded {order} ours"}
    hooked = {hook.target for hook in hooks_here()}
    for name in CALLED:
        (target,) = {target for target in hooked if target.endswith(f".{name}")}
        assert {f"{kind} {target}" for kind in ("before", "around", "after")} <= calls
