"""Kernels compile for an H200, whether there is one or not; skipped without Triton, and where it
interprets kernels.
"""

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

TARGET = ("cuda", 90, 32)


def code(kernel, types, constants, aligned, **options):
    """The PTX of a kernel: types of its arguments, values of its constants, and which arguments 16
    divides.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*TARGET), options=options).asm["ptx"]


def test_a_step_moves_16_bytes_at_a_time():
    from fedensemble.engines.kernels.triton.sgd_step import _sgd_step

    tensors = {"theta": "*fp32", "grad": "*fp32", "rate": "*fp32", "copy": "*bf16"}
    types = {**tensors, "ROW_STRIDE": "i32", "TOTAL": "i32", "DECAY": "fp32"}
    ptx = code(
        _sgd_step,
        types,
        {"DECAYS": True, "COPIES": True, "BLOCK": 2048},
        [*tensors, "ROW_STRIDE", "TOTAL"],
    )
    assert ptx.count("ld.global.v4.b32") == 2 * 2048 // 4 // 128
    assert ptx.count("ld.global") - ptx.count("ld.global.v4.b32") == 2  # rates
    assert (
        ptx.count("st.global")
        == ptx.count("st.global.v4.b32")
        == 2048 // 4 // 128 + 2048 // 8 // 128
    )


@pytest.mark.parametrize("turned", [False, True])
def test_products_use_tensor_cores(turned):
    from fedensemble.engines.kernels.triton.implicit_gemm import _implicit_gemm

    tensors = dict.fromkeys(("x", "w", "bias", "out"), "*bf16")
    every = 2 if turned else 1
    constants = {
        "K": 1152,
        "H": 16,
        "W": 16,
        "C": 128,
        "OH": 16,
        "OW": 16,
        "O": 128,
        "STRIDE_H": every,
        "STRIDE_W": every,
        "PAD_H": 1,
        "PAD_W": 1,
        "KH": 3,
        "KW": 3,
        "BY_TAP": True,
        "EVERY_H": every,
        "EVERY_W": every,
        "TRANSPOSED": turned,
        "HAS_BIAS": False,
        "PRECISION": "tf32",
        "BLOCK_M": 64,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
    }
    types = {**tensors, "B": "i32", "W_STRIDE": "i32", "BIAS_STRIDE": "i32"}
    ptx = code(
        _implicit_gemm, types, constants, [*tensors, "B", "W_STRIDE"], num_warps=4, num_stages=3
    )
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx  # loads run ahead of products


def test_filter_gradients_use_tensor_cores():
    from fedensemble.engines.kernels.triton.conv_weight_grad import _conv_weight_grad, _sum_splits

    tensors = {"x": "*bf16", "grad_output": "*bf16", "out": "*fp32"}
    constants = {
        "K": 1152,
        "H": 16,
        "W": 16,
        "C": 128,
        "OH": 16,
        "OW": 16,
        "O": 128,
        "STRIDE_H": 1,
        "STRIDE_W": 1,
        "PAD_H": 1,
        "PAD_W": 1,
        "PARTS": 1,
        "KW": 3,
        "BY_TAP": True,
        "PRECISION": "tf32",
        "BLOCK_M": 32,
        "BLOCK_N": 128,
        "BLOCK_K": 128,
    }
    types = {
        **tensors,
        **dict.fromkeys(("B", "SPLIT", "SPLIT_ROWS", "J_STRIDE", "S_STRIDE"), "i32"),
    }
    assert "mma" in code(_conv_weight_grad, types, constants, tensors, num_warps=4, num_stages=3)
    types = {
        "parts": "*fp32",
        "out": "*fp32",
        **dict.fromkeys(("SPLIT", "EACH", "J_STRIDE"), "i32"),
    }
    assert "ld.global.v4" in code(
        _sum_splits, types, {"BLOCK": 1024}, ["parts", "out", "EACH", "J_STRIDE"]
    )


NUMBERS = dict.fromkeys(
    ("mean", "factor", "shift", "b", "d", "weight", "bias", "statistics", "scale", "partial_sums"),
    "*fp32",
)
IMAGES = dict.fromkeys(("x", "grad_output", "output", "masked_grad", "summand"), "*bf16")
COUNTS = dict.fromkeys(("ROWS", "C", "G", "SPLIT_ROWS", "SPLIT", "BATCH", "WEIGHT", "BIAS"), "i32")


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("back", [False, True])
# the second where an image has few pixels
@pytest.mark.parametrize(("rows", "channels"), [(32, 32), (16, 64)])
def test_norms_read_images_16_bytes_at_a_time(rows, channels, back, flat):
    from fedensemble.engines.kernels.triton.norm_reductions import apply_affine, reduce_channels

    for kernel, times, out, added, read in (
        (reduce_channels, 1, "*fp32", back, 3 if back else 1),
        (apply_affine, 2, "*bf16", not back, 2),
    ):
        types = {
            n: t
            for n, t in {**NUMBERS, **IMAGES, **COUNTS, "out": out}.items()
            if n in kernel.arg_names
        }
        constants = {
            "BACKWARD": back,
            "RELU": True,
            "ADDED": added,
            "BLOCK_R": rows,
            "BLOCK_C": times * channels,
        }
        ptx = code(kernel, types, {**constants, "FLAT": flat}, types)
        assert ptx.count("ld.global.v4.b32") >= read * times  # a thread's, of 128
        assert "ld.global.b16" not in ptx and "ld.global.v2" not in ptx
        assert ("div.s32" in ptx) == flat  # programs of many sets share an axis


@pytest.mark.parametrize(
    "ones", [(), ("SPLIT",), ("G", "SPLIT", "BATCH"), ("ROWS", "C", "G", "SPLIT", "BATCH")]
)
@pytest.mark.parametrize(
    ("groups", "channels", "warps"), [(2, 8, 1), (2, 256, 4), (1, 1, 1), (1, 4096, 8)]
)
def test_numbers_of_groups(groups, channels, warps, ones):
    """Arguments that are 1 are constants to Triton; nothing is added up in an order that chance
    decides.
    """
    from fedensemble.engines.kernels.triton.group_norm import (
        _input_grad_terms,
        _statistics,
        _weight_grads,
    )

    every = {**NUMBERS, "x": "*bf16", **COUNTS, "EPS": "fp32", "out": "*fp32"}
    every |= {
        "grad_weight": "*fp32",
        "grad_bias": "*fp32",
        "GRAD_WEIGHT": "i32",
        "GRAD_BIAS": "i32",
    }
    tile = {"BLOCK_G": groups, "BLOCK_C": channels}
    for kernel, blocks in (
        (_statistics, tile),
        (_input_grad_terms, tile),
        (_weight_grads, {"BLOCK_B": 32, "BLOCK_C": 32}),
    ):
        types = {
            name: kind
            for name, kind in every.items()
            if name in kernel.arg_names and name not in ones
        }
        constants = {**blocks, **{name: 1 for name in ones if name in kernel.arg_names}}
        assert "atom" not in code(kernel, types, constants, [], num_warps=warps)
