"""The public names of the core's packages, and of the two modules that users import by name."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PUBLIC = {
    "sglang_topp": ["CandidateSets", "SglangToppError"],
    "sglang_topp.candidates": ["NO_TOKEN", "CandidateSets"],
    "sglang_topp.formats": [
        "NO_DISTRIBUTION",
        "Side",
        "decode_sampling_mask",
        "decode_top_p",
        "encode_top_k",
        "encode_top_p",
        "has_top_p",
        "merge_stream_chunks",
        "pack",
        "pack_base64",
        "unpack",
        "unpack_base64",
    ],
    "sglang_topp.nucleus": ["support_candidates", "top_p_candidates"],
    "sglang_topp.errors": [
        "AbortedError",
        "AuthenticationError",
        "BadRequestError",
        "InvalidCandidateSetsError",
        "InvalidInputError",
        "MissingCandidateSetsError",
        "OverloadedError",
        "PatchError",
        "RequestError",
        "RequestTimeoutError",
        "ResponseError",
        "RolloutError",
        "SampledTokenMissingError",
        "ServerError",
        "SglangToppError",
        "TransportError",
        "WeightPushError",
        "WireError",
    ],
    "sglang_topp_integrations.trl": ["SUPPORTED_TRL", "ReplayMixin", "SGLangRollouts", "rollout_fields"],
    "sglang_topp_client.plots": ["kept_mass", "over_positions", "ratios", "set_sizes"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_all_is_pinned(module):
    imported = importlib.import_module(module)
    assert imported.__all__ == PUBLIC[module]
    for name in imported.__all__:
        assert getattr(imported, name) is not None


@pytest.mark.parametrize("module", ["sglang_topp", "sglang_topp.formats", "sglang_topp.engine_contract"])
def test_the_core_needs_numpy_and_pybase64_only(module):
    others = {"torch", "sglang", "aiohttp", "httpx", "fastapi", "pydantic", "tensordict"}
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {others}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
