"""The public names of the core: a change here is a change of the API."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PUBLIC = {
    "sglang_topp": ["CandidateSets", "SglangToppError"],
    "sglang_topp.answers": [],
    "sglang_topp.answers.fields": [
        "FLOAT32",
        "INT32",
        "Decoded",
        "b64array",
        "b64bytes",
        "b64text",
        "check_count",
        "check_range",
        "check_vocab",
        "entry_rows",
        "integers",
        "naming",
        "numbers",
        "shown",
        "token_ids_of",
    ],
    "sglang_topp.answers.sampled": ["FIELD", "sampled_logprobs"],
    "sglang_topp.answers.sampling_mask": ["decode"],
    "sglang_topp.answers.top_k": ["decode_output", "encode_top_k", "merge_top_k"],
    "sglang_topp.answers.top_p": [
        "NO_DISTRIBUTION",
        "Side",
        "decode",
        "decode_output",
        "encode_sets",
        "has_output_sets",
    ],
    "sglang_topp.candidates": ["NO_TOKEN", "CandidateSets"],
    "sglang_topp.compact": ["MAX_ERROR", "Packed", "logprob_step", "pack", "unpack"],
    "sglang_topp.engine_request": [
        "GRAMMARS",
        "Model",
        "check_sampling_params",
        "check_token_ids",
        "overlong_param",
        "overlong_text",
    ],
    "sglang_topp.errors": [
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
        "TruncatedFileError",
        "WireError",
    ],
    "sglang_topp.nucleus": ["support_candidates", "top_p_candidates"],
    "sglang_topp.nucleus.reference": ["nucleus", "support_candidates", "top_p_candidates"],
    "sglang_topp.nucleus.select": ["falling", "top_p_candidates"],
    "sglang_topp.nucleus.support": ["support_candidates"],
    "sglang_topp.resumable": ["BEGINS_ANEW", "HOLDS", "INTERNAL", "RESUMED", "cut_problem"],
    "sglang_topp.stop_regex": ["MAX_STEPS", "search_steps"],
    "sglang_topp.tensors": ["CandidateTensors", "to_torch"],
    "sglang_topp.wire": [
        "NO_DISTRIBUTION",
        "decode_input_sets",
        "decode_output_sets",
        "encode_sets",
        "encode_top_k",
        "has_output_sets",
        "merge_output_fields",
        "pack",
        "pack_base64",
        "pack_parts",
        "unpack",
        "unpack_base64",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_all_is_pinned(module):
    imported = importlib.import_module(module)
    assert imported.__all__ == PUBLIC[module]
    for name in imported.__all__:
        assert getattr(imported, name) is not None


@pytest.mark.parametrize("module", ["sglang_topp", "sglang_topp.wire", "sglang_topp.engine_request"])
def test_the_core_needs_numpy_and_pybase64_only(module):
    code = (
        f"import sys, {module}; "
        "print(*sorted(set(sys.modules) & {'torch', 'sglang', 'httpx', 'fastapi', 'pydantic', 'tensordict'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
