"""Runs `head_triton_cases` in its own process: the interpreter is chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).parent / "head_triton_cases.py"


def run_cases(interpret: bool) -> None:
    pytest.importorskip("triton", reason="torch brings Triton on Linux only")
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    if interpret:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, env=environment, cwd=CASES.parents[2], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_in_the_interpreter():
    run_cases(interpret=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_the_gpu():
    run_cases(interpret=False)


POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_nvidia(capability, dtype, tmp_path, monkeypatch):
    """The interpreter takes more than the compiler does; the compiler runs without a GPU."""
    triton = pytest.importorskip("triton", reason="torch brings Triton on Linux only")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_topp.replay import head_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = {"left_ptr", "right_ptr", "source_ptr", "out_ptr"}
    kinds = {"weights_ptr": "*fp32", "partial_ptr": "*fp32"}
    constants = {"ENTRIES": 4, "BLOCK": 1024, "PIECE": 128}
    for kernel in (head_triton._dot_kernel, head_triton._piece_kernel, head_triton._join_kernel):
        signature = {}
        for name in kernel.arg_names:
            if name in constants:
                signature[name] = "constexpr"
            elif name in given and not (name == "out_ptr" and kernel is head_triton._dot_kernel):
                signature[name] = POINTERS[dtype]
            elif name.endswith("_ptr"):
                signature[name] = kinds.get(name, "*fp32" if name == "out_ptr" else "*i64")
            else:
                signature[name] = "i32"
        used = {name: constants[name] for name in kernel.arg_names if name in constants}
        source = ASTSource(fn=kernel, signature=signature, constexprs=used)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert "cubin" in compiled.asm
