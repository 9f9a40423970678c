import importlib
import subprocess
import sys

import pytest

NAMES = {
    "sglang_topp_client": [
        "AsyncRolloutClient",
        "Rollout",
        "RolloutClient",
        "RolloutWriter",
        "Score",
        "load_rollouts",
        "save_rollouts",
    ],
    "sglang_topp_client.aborts": ["TIMEOUT_S", "Aborts"],
    "sglang_topp_client.checks": [
        "MAX_BODY_CHARS",
        "MAX_MESSAGE_CHARS",
        "MAX_REQUEST_ID",
        "check_request_id",
        "fresh_id",
        "is_text",
        "seconds",
        "shown",
        "whole_number",
    ],
    "sglang_topp_client.calls": ["ROLLOUTS", "SCORES", "Calls", "Parts", "Result", "Work"],
    "sglang_topp_client.client": ["AsyncRolloutClient"],
    "sglang_topp_client.files": ["Share", "limit", "shortage"],
    "sglang_topp_client.sync_client": ["RolloutClient"],
    "sglang_topp_client.fleet": ["Fleet", "Member"],
    "sglang_topp_client.interruption": ["Interruption"],
    "sglang_topp_client.link": ["Kind", "Link"],
    "sglang_topp_client.partials": ["Partials"],
    "sglang_topp_client.resuming": [
        "OnAbort",
        "check_on_abort",
        "check_resumable",
        "continuation",
        "ended",
        "interruptible",
        "join",
        "nothing_generated",
        "plan_resume",
    ],
    "sglang_topp_client.http": ["Connections", "Server"],
    "sglang_topp_client.lanes": ["Lanes"],
    "sglang_topp_client.loop_thread": ["LoopThread"],
    "sglang_topp_client.messages": ["frame_head", "frames", "lines", "whole"],
    "sglang_topp_client.packed_record": ["MAGIC", "MEDIA_TYPE", "PackedRecord", "from_packed"],
    "sglang_topp_client.packed_frame": ["FLOAT32", "INT32", "OpenFrame", "PackedFrame"],
    "sglang_topp_client.progress": ["Progress"],
    "sglang_topp_client.record": [
        "check_ids",
        "check_kept_mass",
        "check_seconds",
        "check_sets",
        "count_of",
        "error_from_record",
        "error_to_record",
        "float32_of",
        "from_record",
        "ids_of",
        "rollout_of",
        "text_of",
        "to_record",
    ],
    "sglang_topp_client.record_columns": [
        "check_rollout",
        "num_bytes_of",
        "pyarrow",
        "schema",
        "to_rollouts",
        "to_table",
    ],
    "sglang_topp_client.record_frames": [
        "HEAD_BYTES",
        "MAGIC",
        "VERSION",
        "Frame",
        "check_magic",
        "check_pages",
        "head_of",
        "walk",
    ],
    "sglang_topp_client.record_groups": ["VERSION_KEY", "Footer", "decode", "encode"],
    "sglang_topp_client.records": ["RolloutWriter", "load_rollouts", "save_rollouts"],
    "sglang_topp_client.request": [
        "DISTRIBUTION",
        "SAMPLER",
        "Prompts",
        "SampleRequest",
        "SamplingParams",
        "TopLogprobsP",
        "TopLogprobsSource",
        "as_token_ids",
        "check_source",
        "one_each",
        "plan",
        "prompts_of",
        "thresholds_of",
    ],
    "sglang_topp_client.retry": ["delay_s", "is_refusal", "is_retryable"],
    "sglang_topp_client.rollout": ["ABORT", "EXTENDED", "Rollout"],
    "sglang_topp_client.score": ["Score"],
    "sglang_topp_client.score_record": [
        "MAGIC",
        "MEDIA_TYPE",
        "PackedScore",
        "score_from_packed",
        "score_from_record",
        "score_to_record",
    ],
    "sglang_topp_client.score_request": ["ScoreRequest", "Sequences", "Start", "plan_scores"],
    "sglang_topp_client.servers": ["Servers"],
    "sglang_topp_client.sglang_api": ["GenerateExchange", "StreamedExchange"],
    "sglang_topp_client.sglang_fields": [
        "field_of",
        "text_of",
        "token_ids_of",
        "token_logprobs",
        "weight_version_of",
    ],
    "sglang_topp_client.sglang_scores": ["GenerateScoreExchange"],
    "sglang_topp_client.sidecar_api": ["SERVICE", "RolloutsExchange", "SidecarExchange"],
    "sglang_topp_client.sidecar_scores": ["ScoresExchange"],
    "sglang_topp_client.turns": ["LONG_BYTES", "Turns"],
    "sglang_topp_client.versions": [
        "WeightSpans",
        "join_spans",
        "per_token",
        "spans_from_json",
        "spans_to_json",
    ],
}


@pytest.mark.parametrize("module", NAMES)
def test_exports_exactly_these(module):
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == sorted(NAMES[module])
    assert all(hasattr(loaded, name) for name in loaded.__all__)


def test_import_brings_nothing_beyond_the_base_install():
    code = "import sys, sglang_topp_client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "sglang", "fastapi", "starlette", "uvicorn", "pydantic", "ray", "tqdm", "transformers"}
    heavy |= {"pyarrow", "pandas", "datasets"}
    assert not heavy & set(done.stdout.split())
