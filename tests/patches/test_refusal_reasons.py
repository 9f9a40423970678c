"""Server modes and settings without exact sets are refused, each with its reason."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches import refusal_reasons
from sglang_topp_patches.compat.releases import Feature, refused
from sglang_topp_patches.http.process_state import HTTP_SERVER, note_server_args
from tests.patches.make_http_process import http_process
from tests.skip_missing_features import needs


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("speculative_algorithm", "DFLASH", "--speculative-algorithm DFLASH"),
        ("dllm_algorithm", "LowConfidence", "diffusion"),
    ],
)
def test_modes_without_exact_sets_refuse(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(refusal_reasons, "status", lambda: SimpleNamespace(problems=()))
    args = {
        "speculative_algorithm": None,
        "dllm_algorithm": None,
        "disaggregation_mode": "null",
    }
    process = http_process()
    note_server_args(process, None, None, SimpleNamespace(**args))
    assert process.problems() == ()
    # A scheduler passes its own arguments.
    other = SimpleNamespace(**{**args, field: value})
    (reason,) = refusal_reasons.server_problems(other)
    assert words in reason
    note_server_args(process, None, None, other)
    assert process.problems() == (reason,)


def test_every_source_of_reasons_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_reasons, "status", lambda: SimpleNamespace(problems=("a seam is gone",)))
    process = http_process(dllm_algorithm="LowConfidence")
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    app = SimpleNamespace(middleware_stack=object())
    monkeypatch.setitem(sys.modules, HTTP_SERVER, SimpleNamespace(app=app))
    words = ("a seam is gone", "SGLANG_RUST_SERVER", "diffusion", "before its routes could be guarded")
    found = process.problems()
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))
    app.middleware_stack = None  # it has not begun to serve, and will be guarded then
    assert len(process.problems()) == len(words) - 1
    app.middleware_stack, process.is_guarded = object(), True
    assert len(process.problems()) == len(words) - 1


@needs(Feature.SPECULATIVE)
@pytest.mark.parametrize(
    "algorithm", ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "FROZEN_KV_MTP", "A_PLUGINS_OWN"]
)
def test_speculation_is_served_but_in_some_configurations(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    def reasons(**args: Any) -> tuple[str, ...]:
        args = {"speculative_algorithm": algorithm, "disaggregation_mode": "null", **args}
        return refusal_reasons._mode_problems(SimpleNamespace(**args))

    assert reasons(speculative_eagle_topk=4, enable_multi_layer_eagle=True, pp_size=1) == ()
    refusals = {
        "acceptance": {"speculative_accept_threshold_single": 0.9},
        "-acc below 1": {"speculative_accept_threshold_acc": 0.5},
        "--pp-size": {"pp_size": 2},
        "--disaggregation-mode": {"disaggregation_mode": "decode"},
    }
    for words, args in refusals.items():
        (reason,) = reasons(**args)
        assert reason.startswith(f"--speculative-algorithm {algorithm} with")
        assert words in reason or words == "acceptance"
    rejecting = reasons(speculative_use_rejection_sampling=True)
    reason = refused(Feature.REJECTION_SAMPLING)
    assert rejecting == ((f"--speculative-use-rejection-sampling: {reason}",) if reason else ())
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    assert "SGLANG_SIMULATE_ACC_LEN" in reasons()[0]
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")
    monkeypatch.setattr("sglang.srt.utils.is_npu", lambda: True)
    assert "on this accelerator" in reasons()[0]


@needs(Feature.SPECULATIVE)
@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("DFLASH", "not captured"),
        ("DSPARK", "CUDA graphs"),
        ("UNO", "no log-probs"),
    ],
)
def test_algorithms_with_another_verification_are_refused(algorithm: str, words: str) -> None:
    (reason,) = refusal_reasons._mode_problems(SimpleNamespace(speculative_algorithm=algorithm))
    assert reason.startswith(f"--speculative-algorithm {algorithm}: ")
    assert words in reason


def test_sampled_requests_are_refused_where_verification_is_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with_drafts = SimpleNamespace(speculative_algorithm="EAGLE")
    assert refusal_reasons.verification_problem(with_drafts, 1 << 30) == ""
    monkeypatch.setattr("sglang.srt.utils.is_hip", lambda: True)
    assert "only greedy requests" in refusal_reasons.verification_problem(with_drafts, 50)
    assert refusal_reasons.verification_problem(with_drafts, 1) == ""
    assert refusal_reasons.verification_problem(SimpleNamespace(speculative_algorithm=None), 50) == ""


@needs(Feature.DISAGGREGATION)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregated_servers_serve_but_in_some_modes(role: str) -> None:
    def reasons(**args: Any) -> tuple[str, ...]:
        return refusal_reasons._mode_problems(SimpleNamespace(disaggregation_mode=role, **args))

    assert reasons(disaggregation_transfer_backend="nixl", tokenizer_worker_num=1, pp_size=1) == ()
    assert "--enable-pd-role-switch" in reasons(enable_pd_role_switch=True)[0]
    assert "backend fake" in reasons(disaggregation_transfer_backend="fake")[0]
    assert "--pp-size" in reasons(pp_size=2)[0]
    # Any of several HTTP processes may get the question, but only one of them stores the sets.
    refused_anyway = bool(refused(Feature.HTTP_WORKERS))
    assert bool(reasons(tokenizer_worker_num=2)) is (role == "prefill" or refused_anyway)


@pytest.mark.parametrize("name", ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_GRAPH_POOL_BORROW"])
def test_settings_of_the_environment_that_refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for value, is_refused in (("1", True), ("true", True), ("Yes", True), ("0", False), ("", False)):
        monkeypatch.setenv(name, value)
        assert bool(refusal_reasons.environment_problems()) is is_refused
        assert bool(refusal_reasons._mode_problems(SimpleNamespace())) is is_refused


def test_logprobs_before_temperature_refuse_other_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_reasons.request_problem(0.6) == ""
    assert refusal_reasons.environment_notes() == ()
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    for temperature in (None, 0, 0.0, 1, 1.0):
        assert refusal_reasons.request_problem(temperature) == ""
    for temperature in (0.6, 1.5, "warm"):
        assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in refusal_reasons.request_problem(temperature)
    (note,) = refusal_reasons.environment_notes()
    assert "temperature other than 1" in note


@needs(Feature.SAMPLER_SOURCE)
@pytest.mark.parametrize(
    ("backend", "target", "words"),
    [
        ("pytorch", None, ()),
        ("flashinfer", None, ()),
        ("ascend", None, ("sampling backend 'ascend'",)),
        (None, "fsdp", ("sampling backend None", "--rl-on-policy-target")),
    ],
)
def test_what_the_sampler_could_draw_is_known_of_some_backends(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, target: str | None, words: tuple[str, ...]
) -> None:
    settings = SimpleNamespace(
        kernel=SimpleNamespace(sampling_backend=backend),
        deterministic=SimpleNamespace(rl_on_policy_target=target),
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: settings)
    found = refusal_reasons.source_problems()
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))


@needs(Feature.SAMPLER_SOURCE)
def test_a_process_that_does_not_know_the_backend_says_so() -> None:
    assert "is not known here" in refusal_reasons.source_problems()[0]
