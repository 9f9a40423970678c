"""The sidecar's package exports no name, and imports neither torch nor SGLang."""

import subprocess
import sys

import sglang_topp_server


def test_the_package_exports_nothing():
    assert sglang_topp_server.__all__ == []


def test_the_command_and_the_supervisor_import_nothing_heavy():
    imported = "sglang_topp_server.cli.main, sglang_topp_server.process.engine_supervisor"
    code = f"import sys, {imported}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "sglang",
        "fastapi",
        "starlette",
        "uvicorn",
        "pydantic",
        "aiohttp",
        "httpx",
        "transformers",
    }
    assert not heavy & set(done.stdout.split())


def test_the_sidecar_imports_neither_torch_nor_sglang():
    code = "import sys, sglang_topp_server.process.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "sglang", "transformers"} & set(done.stdout.split())
