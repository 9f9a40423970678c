"""SGLang's detokenizer process runs no hook, and imports none of their modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.skip_missing_features import hooks_here

# SGLang's own entry point of the process, until it would begin to serve.
DETOKENIZER = """
import json, sys
from sglang.srt.managers import detokenizer_manager
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import PortArgs, prepare_server_args

server_args = prepare_server_args(sys.argv[1:])
before = set(sys.modules)

class Manager:
    def __init__(self, server_args, port_args):
        imported = set(sys.modules) - before
        print(json.dumps([sorted(HookRegistry._patched), sorted(imported)]))
        sys.exit(0)

detokenizer_manager.run_detokenizer_process(server_args, PortArgs.init_new(server_args), Manager)
"""


def test_no_hook_is_loaded(model_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DETOKENIZER, "--model-path", str(model_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    patched, imported = json.loads(ended.stdout.splitlines()[-1])
    assert not {hook.target for hook in hooks_here()} & set(patched)
    ours = {name for name in imported if name.startswith("sglang_topp_patches.")}
    assert not ours & {f"sglang_topp_patches.{name}" for name in ("http", "scheduler")}
    assert not {"sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server"} & set(imported)
