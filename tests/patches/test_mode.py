"""Modes and settings in which the sets cannot be exact refuse them, each with its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches import mode
from sglang_topp_patches.releases import Feature, refused
from tests.features import needs


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("speculative_algorithm", "EAGLE", "speculative"),
        ("dllm_algorithm", "LowConfidence", "diffusion"),
    ],
)
def test_modes_without_exact_sets_refuse(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(mode, "_refusals", ())
    args = {
        "speculative_algorithm": None,
        "dllm_algorithm": None,
        "disaggregation_mode": "null",
    }
    mode.note_server_args(None, None, SimpleNamespace(**args))
    assert mode.refusals() == ()
    mode.note_server_args(None, None, SimpleNamespace(**{**args, field: value}))
    (reason,) = mode.refusals()
    assert words in reason


@needs(Feature.DISAGGREGATION)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregated_servers_serve_but_in_some_modes(role: str) -> None:
    def reasons(**args: Any) -> tuple[str, ...]:
        return mode.refusals_of(SimpleNamespace(disaggregation_mode=role, **args))

    assert reasons(disaggregation_transfer_backend="nixl", tokenizer_worker_num=1, pp_size=1) == ()
    assert "--enable-pd-role-switch" in reasons(enable_pd_role_switch=True)[0]
    assert "backend fake" in reasons(disaggregation_transfer_backend="fake")[0]
    assert "--pp-size" in reasons(pp_size=2)[0]
    # Several HTTP processes may ask; the one that is asked must be the one that keeps.
    refused_anyway = bool(refused(Feature.HTTP_WORKERS))
    assert bool(reasons(tokenizer_worker_num=2)) is (role == "prefill" or refused_anyway)


def test_the_rust_server_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_refused in (("1", True), ("true", True), ("Yes", True), ("0", False), ("", False)):
        monkeypatch.setenv("SGLANG_RUST_SERVER", value)
        assert bool(mode.environment_refusals()) is is_refused
        assert bool(mode.refusals_of(SimpleNamespace())) is is_refused


def test_logprobs_before_temperature_refuse_other_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode.temperature_refusal(0.6) == ""
    assert mode.environment_notes() == ()
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    for temperature in (None, 0, 0.0, 1, 1.0):
        assert mode.temperature_refusal(temperature) == ""
    for temperature in (0.6, 1.5, "warm"):
        assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in mode.temperature_refusal(temperature)
    (note,) = mode.environment_notes()
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
    found = mode.source_refusals()
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))


@needs(Feature.SAMPLER_SOURCE)
def test_a_process_that_does_not_know_the_backend_says_so() -> None:
    assert "is not known here" in mode.source_refusals()[0]
