"""Compiles the kernels for NVIDIA GPUs, because the interpreter accepts code that the compiler refuses.

`test_gathered_products_triton` runs this file. It needs no GPU.
"""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_topp.replay import gathered_products_triton

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
CONSTANTS = {"ENTRIES": 4, "BLOCK": 1024, "PIECE": 128}
OF_THE_INPUTS = {"left_ptr", "right_ptr", "source_ptr", "out_ptr"}
FLOAT32 = {"weights_ptr", "partial_ptr"}


KERNELS = [
    ("_dot_kernel", {}),
    ("_piece_kernel", {"ADDS": False}),
    ("_piece_kernel", {"ADDS": True}),
    ("_join_kernel", {"ADDS": False}),
    ("_join_kernel", {"ADDS": True}),
]


def kind(kernel, name: str, dtype: str, constants: dict) -> str:
    if name in constants:
        return "constexpr"
    if name == "out_ptr" and constants.get("ADDS"):
        return "*fp32"  # a buffer under half precision
    if name in FLOAT32 or (kernel is gathered_products_triton._dot_kernel and name == "out_ptr"):
        return "*fp32"
    if name in OF_THE_INPUTS:
        return POINTERS[dtype]
    return "*i64" if name.endswith("_ptr") else "i32"


@pytest.mark.parametrize(("name", "options"), KERNELS)
@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_nvidia(capability, dtype, name, options, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(gathered_products_triton, name)
    constants = {name: value for name, value in CONSTANTS.items() if name in kernel.arg_names} | options
    source = ASTSource(
        fn=kernel,
        signature={argument: kind(kernel, argument, dtype, constants) for argument in kernel.arg_names},
        constexprs=constants,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "cubin" in compiled.asm
