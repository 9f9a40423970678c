import importlib
import subprocess
import sys

import pytest

NAMES = {
    "sglang_topp_server": [],
    "sglang_topp_server.app": ["Siblings", "create_app"],
    "sglang_topp_server.body": ["Bodies", "HungUpError"],
    "sglang_topp_server.channel": ["Channel"],
    "sglang_topp_server.cli": ["main"],
    "sglang_topp_server.connection": ["Connection", "connection_of", "http_protocol"],
    "sglang_topp_server.engine": ["Engine", "FailedPrompt"],
    "sglang_topp_server.engine_status": ["EngineProbe", "EngineStatus", "Phase"],
    "sglang_topp_server.exchange": ["Exchange"],
    "sglang_topp_server.flight": ["Flight"],
    "sglang_topp_server.forms": ["NDJSON", "Form", "Frames", "Lines", "accepted_form", "encode"],
    "sglang_topp_server.given": ["read_resumed_tokens", "read_rollouts"],
    "sglang_topp_server.guard": ["OPEN_PATHS", "RequireKey"],
    "sglang_topp_server.heap": ["return_large_blocks"],
    "sglang_topp_server.held": ["Held", "Share", "num_bytes_of"],
    "sglang_topp_server.keeper": ["main"],
    "sglang_topp_server.launch": [
        "check_free",
        "engine_command",
        "engine_environment",
        "run",
        "url_of",
    ],
    "sglang_topp_server.limits": ["MIN_BYTES_PER_S", "Limits"],
    "sglang_topp_server.metrics": ["Families", "Metrics", "SizeHistogram"],
    "sglang_topp_server.pace": ["Pace"],
    "sglang_topp_server.pieces": ["PIECE_BYTES", "Record", "in_pieces"],
    "sglang_topp_server.problems": [
        "answer_of",
        "as_known_error",
        "headers_of",
        "status_of",
        "upstream_error",
    ],
    "sglang_topp_server.rollouts": ["main"],
    "sglang_topp_server.start_sglang": ["KEY_VARIABLE", "main"],
    "sglang_topp_server.schema": [
        "AbortAnswer",
        "AbortRequest",
        "ErrorAnswer",
        "Info",
        "Prompts",
        "RequestId",
        "RolloutRecord",
        "RolloutRequest",
        "RolloutsAnswer",
        "SampleBody",
        "Stream",
        "Threshold",
        "TimeoutS",
        "num_prompts",
        "parse_abort",
        "parse_request",
        "read_body",
    ],
    "sglang_topp_server.serving": ["Server", "Settings"],
    "sglang_topp_server.score_schema": ["ScoreBody", "ScoreRecord", "ScoresAnswer", "parse_scores"],
    "sglang_topp_server.worker": ["main"],
    "sglang_topp_server.workers": ["Workers"],
    "sglang_topp_server.work": ["ROLLOUTS", "SCORES", "Work", "place_of"],
}


@pytest.mark.parametrize("module", NAMES)
def test_exports_exactly_these(module):
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == sorted(NAMES[module])
    assert all(hasattr(loaded, name) for name in loaded.__all__)


def test_the_command_and_the_keeper_import_nothing_heavy():
    code = "import sys, sglang_topp_server.cli, sglang_topp_server.keeper; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "sglang", "fastapi", "starlette", "uvicorn", "pydantic", "httpx", "transformers"}
    assert not heavy & set(done.stdout.split())


def test_the_sidecar_imports_neither_torch_nor_sglang():
    code = "import sys, sglang_topp_server.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "sglang", "transformers"} & set(done.stdout.split())
