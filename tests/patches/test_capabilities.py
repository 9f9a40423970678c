"""Server modes and settings without exact sets are refused, each with its reason."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_topp_patches import capabilities
from sglang_topp_patches.http.process_state import note_server_args
from sglang_topp_patches.releases import Feature, refused
from tests.patches.make_http_process import http_process
from tests.skip_missing_features import needs


@pytest.fixture(autouse=True)
def hooks_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process, which loads no plugins, count as one whose hooks are all in place."""
    monkeypatch.setattr(capabilities, "status", lambda: SimpleNamespace(problems=()))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("speculative_algorithm", "DFLASH", "--speculative-algorithm DFLASH"),
        (
            "dllm_algorithm",
            "LowConfidence",
            "--dllm-algorithm: got 'LowConfidence', expected None: diffusion",
        ),
    ],
)
def test_modes_without_exact_sets_refuse(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, words: str
) -> None:
    args = {
        "speculative_algorithm": None,
        "dllm_algorithm": None,
        "disaggregation_mode": "null",
    }
    process = http_process()
    note_server_args(process, None, None, SimpleNamespace(**args))
    assert process.capabilities.problems == ()
    # A scheduler passes its own arguments.
    other = SimpleNamespace(**{**args, field: value})
    # A release may refuse all speculation, and this algorithm too.
    reasons = capabilities.Capabilities.of(other).problems
    assert any(words in reason for reason in reasons)
    note_server_args(process, None, None, other)
    assert process.capabilities.problems == reasons


@needs(Feature.ROUTES)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("enable_return_routed_experts", False, "without --enable-return-routed-experts"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("pp_size", 2, "--pp-size"),
        ("disaggregation_mode", "decode", "--disaggregation-mode"),
        ("speculative_algorithm", "NGRAM", "--speculative-algorithm"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("enable_pdmux", True, "--enable-pdmux"),
    ],
)
def test_modes_without_exact_routed_experts_refuse(field: str, value: Any, words: str) -> None:
    assert hasattr(ServerArgs, field)
    served = {"enable_return_routed_experts": True, "pp_size": 1, "disaggregation_mode": "null"}
    assert capabilities.Capabilities.of(SimpleNamespace(**served)).routes == ""
    assert words in capabilities.Capabilities.of(SimpleNamespace(**{**served, field: value})).routes


def test_every_source_of_reasons_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "status", lambda: SimpleNamespace(problems=("a seam is gone",)))
    process = http_process(dllm_algorithm="LowConfidence")
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    words = ("a seam is gone", "SGLANG_RUST_SERVER", "diffusion")
    found = process.capabilities.problems
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))


def drawing_arguments() -> dict[str, Any]:
    """Return the arguments of the installed SGLang that may change what is drawn, with their defaults."""
    prefixes = ("speculative_", "watermark", "enable_watermark", "dllm")
    parameters = inspect.signature(ServerArgs).parameters.values()
    return {each.name: each.default for each in parameters if each.name.startswith(prefixes)}


@pytest.mark.parametrize("name", sorted(drawing_arguments()))
def test_every_argument_that_may_change_what_is_drawn_is_refused_or_checked(name: str) -> None:
    default = drawing_arguments()[name]
    assert not list(capabilities._unchecked_arguments(SimpleNamespace(**{name: default})))
    for other in ("x", not default, 0.5):
        found = list(capabilities._unchecked_arguments(SimpleNamespace(**{name: other})))
        assert bool(found) is (name not in capabilities._CHECKED_ARGUMENTS and other != default)
        assert all(reason.startswith(f"--{name.replace('_', '-')}: got {other!r}, ") for reason in found)


def test_a_new_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release may add one that nobody has read about."""

    def of_a_new_release(model_path: str, speculative_magic: float = 1.0) -> None: ...

    monkeypatch.setattr("sglang.srt.server_args.ServerArgs", of_a_new_release)
    assert not list(capabilities._unchecked_arguments(SimpleNamespace(speculative_magic=1.0)))
    (reason,) = capabilities._mode_problems(SimpleNamespace(speculative_magic=0.9))
    assert reason.startswith("--speculative-magic: got 0.9, expected 1.0: accepted drafts")


@pytest.mark.parametrize(
    "name",
    [
        *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
        *("speculative_use_block_verification", "enable_watermark", "watermark_key", "dllm_algorithm"),
    ],
)
def test_arguments_that_are_known_to_change_what_is_drawn_are_not_allowed(name: str) -> None:
    assert name not in capabilities._CHECKED_ARGUMENTS


@pytest.mark.parametrize(
    ("platform", "is_refused"), [(None, False), ("", False), ("sglang_topp_cpu", False), ("ascend", True)]
)
def test_a_platform_with_which_sglang_drops_this_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, platform: str | None, is_refused: bool
) -> None:
    """SGLang excludes the package without a word, so that `doctor` and `serve` have to say it."""
    from sglang.srt.plugins import _get_excluded_dists

    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if platform is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", platform)
    assert ("sglang-topp" in _get_excluded_dists()) is is_refused
    problems = capabilities.environment_problems()
    assert bool(problems) is is_refused
    assert all("SGLANG_PLATFORM: got 'ascend'" in problem and "unset it" in problem for problem in problems)


@needs(Feature.SPECULATIVE)
@pytest.mark.parametrize(
    "algorithm", ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "FROZEN_KV_MTP", "A_PLUGINS_OWN"]
)
def test_speculation_is_served_but_in_some_configurations(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    def reasons(**args: Any) -> tuple[str, ...]:
        args = {"speculative_algorithm": algorithm, "disaggregation_mode": "null", **args}
        return capabilities._mode_problems(SimpleNamespace(**args))

    assert reasons(speculative_eagle_topk=4, enable_multi_layer_eagle=True, pp_size=1) == ()
    refusals = {
        "--pp-size": {"pp_size": 2},
        "--disaggregation-mode": {"disaggregation_mode": "decode"},
    }
    for words, args in refusals.items():
        # A release may refuse the other argument too, without speculation.
        (reason,) = (each for each in reasons(**args) if each.startswith("--speculative-algorithm"))
        assert reason.startswith(f"--speculative-algorithm {algorithm} with")
        assert words in reason
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
    (reason,) = capabilities._mode_problems(SimpleNamespace(speculative_algorithm=algorithm))
    assert reason.startswith(f"--speculative-algorithm {algorithm}: ")
    assert words in reason


def test_sampled_requests_are_refused_where_verification_is_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy_only(algorithm: str | None) -> str:
        return capabilities.Capabilities.of(SimpleNamespace(speculative_algorithm=algorithm)).speculative

    assert greedy_only("EAGLE") == ""
    monkeypatch.setattr("sglang.srt.utils.is_hip", lambda: True)
    assert "only greedy requests" in greedy_only("EAGLE")
    assert greedy_only(None) == ""


@needs(Feature.DISAGGREGATION)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregated_servers_serve_but_in_some_modes(role: str) -> None:
    def reasons(**args: Any) -> tuple[str, ...]:
        return capabilities._mode_problems(SimpleNamespace(disaggregation_mode=role, **args))

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
        assert bool(capabilities.environment_problems()) is is_refused
        assert bool(capabilities._mode_problems(SimpleNamespace())) is is_refused


def test_logprobs_before_temperature_refuse_other_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capabilities.request_problem(0.6) == ""
    assert capabilities.environment_notes() == ()
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    for temperature in (None, 0, 0.0, 1, 1.0):
        assert capabilities.request_problem(temperature) == ""
    for temperature in (0.6, 1.5, "warm"):
        assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in capabilities.request_problem(temperature)
    (note,) = capabilities.environment_notes()
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
    found = capabilities.Capabilities.of(None).sampler
    assert bool(found) == bool(words)
    assert all(word in found for word in words)


@needs(Feature.SAMPLER_SOURCE)
def test_a_process_that_does_not_know_the_backend_says_so() -> None:
    assert "is not known here" in capabilities.Capabilities.of(None).sampler
