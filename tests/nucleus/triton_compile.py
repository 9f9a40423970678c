"""Compiles the kernels for NVIDIA GPUs, because the interpreter accepts code that the compiler refuses.

`test_triton_kernels` runs this file. It needs no GPU.
"""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_topp.nucleus import sampler_support_triton, top_p_triton

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
WARPS = {"cut": top_p_triton._WARPS}
KERNELS = {
    "maxima": (top_p_triton._maxima_kernel, {"BLOCK": 64, "BLOCKS": 64}),
    "cut": (
        top_p_triton._cut_kernel,
        {"HAS_SAMPLED": True, "BLOCK": 64, "HELD": 4096, "TILE": 512, "PIVOTS": 8},
    ),
    "place": (top_p_triton._place_kernel, {"TILE": 512}),
    "compact": (top_p_triton._compact_kernel, {"HAS_SAMPLED": True, "BLOCK": 64, "TILE": 512}),
    "count drawn": (sampler_support_triton._count_kernel, {"HAS_IDS": True, "TILE": 1024}),
    "compact drawn": (sampler_support_triton._compact_kernel, {"HAS_IDS": True, "TILE": 1024}),
}
KINDS = {
    "limits_ptr": "*fp64",
    "maxima_ptr": "*fp32",
    "highest_ptr": "*fp32",
    "sampled_ptr": "*i64",
    "starts_ptr": "*i64",
    "rows_ptr": "*i64",
    "is_drawn_ptr": "*u8",
    "lowest": "fp32",
}


def kind(argument: str, constants: dict[str, object], dtype: str) -> str:
    if argument in constants:
        return "constexpr"
    if argument == "logprobs_ptr":
        return POINTERS[dtype]
    return KINDS.get(argument, "*i32" if argument.endswith("_ptr") else "i32")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", POINTERS)
def test_compiles_for_nvidia(dtype, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants = KERNELS[name]
    source = ASTSource(
        fn=kernel,
        signature={argument: kind(argument, constants, dtype) for argument in kernel.arg_names},
        constexprs=dict(constants),
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS.get(name, 8)}
    )
    assert "cubin" in compiled.asm
