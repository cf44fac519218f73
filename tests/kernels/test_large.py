"""Matrices of weights may have more numbers than 32 bits can count; skipped where Triton is not
there or interprets.
"""

import os
import re
from importlib import import_module

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

SQUARES = {
    "K": 36,
    "H": 8,
    "W": 8,
    "C": 4,
    "OH": 8,
    "OW": 8,
    "O": 16,
    "STRIDE_H": 1,
    "STRIDE_W": 1,
    "PAD_H": 1,
    "PAD_W": 1,
    "KH": 3,
    "KW": 3,
    "BY_TAP": False,
    "EVERY_H": 1,
    "EVERY_W": 1,
    "TRANSPOSED": False,
    "HAS_BIAS": True,
    "PARTS": 1,
    "PRECISION": "tf32",
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "BLOCK_K": 16,
}
CASES = [  # kernel, distances between rows, constants
    ("implicit_gemm", "_implicit_gemm", ["W_STRIDE", "BIAS_STRIDE"], SQUARES),
    ("conv_weight_grad", "_conv_weight_grad", ["J_STRIDE", "S_STRIDE"], SQUARES),
    ("conv_weight_grad", "_sum_splits", ["J_STRIDE"], {"BLOCK": 1024}),
    (
        "batch_norm",
        "_statistics",
        ["MEAN", "VARIANCE", "WEIGHT", "BIAS"],
        {"SPLITS": 4, "BLOCK_C": 64},
    ),
    ("batch_norm", "input_grad_terms", ["GRAD_WEIGHT", "GRAD_BIAS"], {"SPLITS": 4, "BLOCK_C": 64}),
    ("group_norm", "_statistics", ["WEIGHT", "BIAS"], {"BLOCK_G": 2, "BLOCK_C": 64}),
    (
        "group_norm",
        "_weight_grads",
        ["GRAD_WEIGHT", "GRAD_BIAS"],
        {"BLOCK_B": 32, "BLOCK_C": 32},
    ),
    ("sgd_step", "_gather_rows", ["P", "ROW_STRIDE"], {"BLOCK": 2048}),
    (
        "linear",
        "_weight_grad",
        ["STRIDE"],
        {"PRECISION": "tf32", "BLOCK_N": 16, "BLOCK_O": 16, "BLOCK_I": 16},
    ),
]


@pytest.mark.parametrize(
    ("module", "name", "distances", "constants"), CASES, ids=[case[1] for case in CASES]
)
def test_rows_are_found_by_64_bits(module, name, distances, constants):
    """A visit's number times what lies between rows: 200 models of 11 million weights do not fit
    into 32 bits.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"fedensemble.engines.kernels.triton.{module}"), name)
    signature, values = {}, {}
    for n, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[n,] = "constexpr", constants[argument]
        elif argument in ("EPS", "MOMENTUM"):
            signature[argument] = "fp32"
        elif argument == "index":
            signature[argument] = "*i64"
        else:
            signature[argument] = "i32" if argument.isupper() else "*fp32"
    compiled = triton.compile(
        ASTSource(kernel, signature, values, {}), target=GPUTarget("cuda", 90, 32)
    )
    # Triton 3.4 calls the arguments %arg0, %arg1 and so on; later versions call them by name.
    head, _, body = compiled.asm["ttir"].partition("tt.func public")[2].partition("\n")
    passed = [argument for argument in kernel.arg_names if argument not in constants]
    printed = dict(zip(passed, re.findall(r"(%\w+): ", head), strict=True))
    for distance in distances:
        value = printed[distance]
        uses = [line.strip() for line in body.splitlines() if re.search(rf"{value}\b", line)]
        assert uses and all(f"arith.extsi {value} : i32 to i64" in line for line in uses), distance
