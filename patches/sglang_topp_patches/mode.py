"""Modes and settings of the server in which candidate sets cannot be exact: there the feature is refused,
with the reason."""

from __future__ import annotations

import os
from typing import Any

from sglang_topp_patches import routes
from sglang_topp_patches.releases import Feature, internals, refused

__all__ = [
    "environment_notes",
    "environment_refusals",
    "note_server_args",
    "refusals",
    "refusals_of",
    "source_refusals",
    "temperature_refusal",
]

_TRUE = ("1", "true", "yes", "y", "on", "t")

# Backends whose filters were read, and are what SGLang captures for its own mask.
_SAMPLING_BACKENDS = ("flashinfer", "pytorch")

_refusals: tuple[str, ...] = ()


def refusals() -> tuple[str, ...]:
    """Why this server's mode rules candidate sets out; empty where it does not."""
    return _refusals


def refusals_of(server_args: Any) -> tuple[str, ...]:
    """The same for given server arguments and this process's environment."""
    reasons = {
        "speculative decoding (--speculative-algorithm): an accepted token is not drawn from one nucleus": (
            getattr(server_args, "speculative_algorithm", None)
        ),
        "diffusion decoding (--dllm-algorithm): tokens are not drawn one by one": (
            getattr(server_args, "dllm_algorithm", None)
        ),
        **_disaggregation_reasons(server_args),
        "watermarking (--watermark-config): tokens are not drawn from the distribution that is reported": (
            getattr(server_args, "watermark_config", None)
        ),
    }
    used = {
        Feature.PIPELINE: getattr(server_args, "pp_size", 1) > 1,
        Feature.DISAGGREGATION: getattr(server_args, "disaggregation_mode", None) not in (None, "null"),
        Feature.HTTP_WORKERS: getattr(server_args, "tokenizer_worker_num", 1) > 1,
    }
    of_release = tuple(
        f"{feature}: {reason}"
        for feature, is_used in used.items()
        if is_used and (reason := refused(feature))
    )
    return (
        environment_refusals() + of_release + tuple(reason for reason, applies in reasons.items() if applies)
    )


def _disaggregation_reasons(server_args: Any) -> dict[str, Any]:
    """Of servers that only prefill or only decode."""
    role = getattr(server_args, "disaggregation_mode", "null")
    if role in (None, "null"):
        return {}
    mode = f"disaggregated prefill and decode (--disaggregation-mode {role})"
    return {
        f"{mode} with --enable-pd-role-switch: the first token's set would be asked of the wrong role": (
            getattr(server_args, "enable_pd_role_switch", False)
        ),
        f"{mode} with --disaggregation-transfer-backend fake: nobody drew the first token": (
            getattr(server_args, "disaggregation_transfer_backend", "") == "fake"
        ),
        f"{mode} with --pp-size: was never tried": getattr(server_args, "pp_size", 1) > 1,
        f"{mode} with --tokenizer-worker-num: the first token's set is not kept where it is asked for": (
            role == "prefill" and getattr(server_args, "tokenizer_worker_num", 1) > 1
        ),
    }


def source_refusals() -> tuple[str, ...]:
    """Why this server cannot tell what its sampler could draw; empty where it can."""
    if reason := refused(Feature.SAMPLER_SOURCE):
        return (reason,)
    try:
        backend, on_policy = internals().sampling()
    except ValueError as error:  # a process that SGLang has not told
        return (f"the sampling backend is not known here: {error}",)
    reasons = []
    if backend not in _SAMPLING_BACKENDS:
        reasons.append(
            f"the filters of the sampling backend {backend!r} are not known exactly; those of"
            f" {' and '.join(_SAMPLING_BACKENDS)} are (--sampling-backend)"
        )
    if on_policy:
        reasons.append(
            "with --rl-on-policy-target the reported log-probs are rounded, and not those that are drawn from"
        )
    return tuple(reasons)


def environment_refusals() -> tuple[str, ...]:
    """Why this process's environment rules candidate sets out."""
    if _is_set("SGLANG_RUST_SERVER"):
        return ("SGLANG_RUST_SERVER: that HTTP server passes the field over and cannot be patched; unset it",)
    return ()


def environment_notes() -> tuple[str, ...]:
    """What this process's environment rules out for some requests."""
    if _is_set("SGLANG_RETURN_ORIGINAL_LOGPROB"):
        return (f"requests at a temperature other than 1 are refused: {_ORIGINAL_LOGPROB}",)
    return ()


def temperature_refusal(temperature: Any) -> str:
    """Why a request at this temperature cannot have sets here, or nothing.

    A greedy one can (SGLang reads 0 as temperature 1 with one candidate); what is no number is SGLang's
    to refuse.
    """
    if not _is_set("SGLANG_RETURN_ORIGINAL_LOGPROB") or temperature in (None, 0, 1):
        return ""
    return f"got {temperature!r} where only temperature 1 has exact sets: {_ORIGINAL_LOGPROB}"


_ORIGINAL_LOGPROB = (
    "with SGLANG_RETURN_ORIGINAL_LOGPROB the log-probs are those before temperature, another distribution"
    " than the one that is sampled from"
)


def note_server_args(result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `TokenizerManager.__init__`."""
    global _refusals
    _refusals = refusals_of(server_args)
    routes.guard_served_app()


def _is_set(name: str) -> bool:
    """As SGLang reads a flag of its environment."""
    return os.environ.get(name, "").strip().lower() in _TRUE
