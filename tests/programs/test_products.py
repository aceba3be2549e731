"""The products that `read_program` finds in programs for an H100 and for this CPU."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.programs._hlo import HloArray
from jmp_lite.programs._read import _read
from tests.support.compiled_programs import LT, PROGRAMS, VERSIONS, entry, f32, h100, program, row, x

ONE = 2 * 64 * 128 * 64  # A product of 64x128 with 128x64.


def square(dtype, result, arithmetic, accumulation, tensor_cores, operation="dot_general", target=LT):
    operands = f"{dtype}[64,128] {dtype}[64,128]"
    kept = (operands, f"{result}[64,64]", arithmetic, accumulation, tensor_cores, ONE, 1, operation)
    return ("gemm", target, *kept)


@pytest.mark.parametrize("version", VERSIONS)
def test_matrix_products_of_every_dtype_and_precision(version):
    """Of float32, the precisions asked for are the default, HIGHEST, and DotAlgorithmPreset.F32_F32_F32."""
    products = h100("products", version).matmuls
    assert sorted(map(row, products)) == sorted(
        [
            square("f16", "f16", "f16", "f32", True, 'a{b}"c/dot_general'),
            square("f32", "f32", "tf32", "f32", True),
            square("f32", "f32", "f32", "f32", False),
            square("f32", "f32", "f32", "f32", False),
            square("f64", "f64", "f64", "f64", False),
            square("s8", "s32", "s8", "s32", True),
            square("f8e4m3fn", "f32", "f8e4m3fn", "f32", True, target=f"{LT}$f8"),
            # Four of them.
            (
                *("gemm", LT, "bf16[4,64,128] bf16[4,64,128]", "bf16[4,64,64]"),
                *("bf16", "f32", True, 4 * ONE, 1, "dot_general"),
            ),
            # Four groups of rows, each times its own matrix: XLA makes one product of zeros in between.
            (
                *("gemm", LT, "bf16[64,512] bf16[512,64]", "bf16[64,64]"),
                *("bf16", "f32", True, 2 * 64 * 512 * 64, 1, "ragged_dot_general"),
            ),
        ]
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_share_on_tensor_cores_counts_products_of_at_most_16_bits(version):
    """Of 15 products of equal size tf32, two in f32 and one in f64 are not."""
    assert h100("products", version).tensor_core_share == pytest.approx(11 / 15)


def test_algorithms_of_products_in_xlas_own_kernels():
    """Kernels of XLA have the product inside, and the sum split: 8 sums of 16, or 16 of 8."""

    def split(dtype, parts, arithmetic):
        return (
            *("gemm", "dot", " ".join([f"{dtype}[64,{parts},{128 // parts}]"] * 2), f"f32[{parts},64,64]"),
            *(arithmetic, "f32", True, ONE, 1, "dot_general"),
        )

    found = h100("triton")
    assert sorted(map(row, found.matmuls)) == sorted(
        [
            split("f32", 8, "bf16"),
            split("f32", 16, "bf16_x3"),
            split("f32", 8, "tf32"),
            split("f16", 8, "f16"),
        ]
    )
    assert found.tensor_core_share == 3 / 4


@pytest.mark.parametrize(
    ("name", "dtype", "tensor_cores"), [("convolutions", "f16", True), ("precise_convolution", "f32", False)]
)
def test_convolutions_forward_and_backward(name, dtype, tensor_cores):
    """With strides of 2; in float32 only the kernel's precision is HIGHEST, which holds for both."""
    forward, to_kernel, to_images = h100(name).matmuls
    images, kernel, out = f"{dtype}[8,33,33,64]", f"{dtype}[128,3,3,64]", f"{dtype}[8,16,16,128]"
    flops = 2 * (8 * 16 * 16 * 128) * (3 * 3 * 64)
    same = (dtype, "f32", tensor_cores, flops, 1)
    assert row(forward)[0] == "convolution"
    assert row(forward)[1] in ("__cudnn$convForward", "__cudnn$convBiasActivationForward")
    assert row(forward)[2:] == (f"{images} {kernel}", out, *same, "jvp()/conv_general_dilated")
    backward = "transpose(jvp())/conv_general_dilated"
    expected = ("convolution", "__cudnn$convBackwardFilter", f"{images} {out}", kernel, *same, backward)
    assert row(to_kernel) == expected
    expected = ("convolution", "__cudnn$convBackwardInput", f"{out} {kernel}", images, *same, backward)
    assert row(to_images) == expected


def test_attention_forward_and_backward():
    """Two sequences of 256, four heads of 64: two products forward, four backward."""
    forward, backward = h100("attention").matmuls
    operands, result = " ".join(["bf16[2,256,4,64]"] * 3), "bf16[2,4,256,64]"
    product = 2 * 2 * 4 * 256 * 256 * 64
    expected = ("attention", "__cudnn$fmhaSoftmax", operands, result, "bf16", "f32", True, 2 * product, 1)
    assert row(forward) == (*expected, "jvp()/dot_product_attention_fwd")
    expected = ("attention", "__cudnn$fmhaSoftmaxBackward", operands, result, "bf16", "f32", True)
    assert row(backward) == (*expected, 4 * product, 1, "transpose(jvp())/dot_product_attention_bwd")


def test_a_library_that_does_not_say_what_it_sums_has_no_flops():
    """As a foreign function, whose configuration is no JSON; it may have no operands or results either."""
    found = entry(
        "  %p = bf16[64,128]{1,0} parameter(0)",
        '  %a = bf16[64,64]{1,0} custom-call(%p, %p), custom_call_target="deep_gemm", '
        "backend_config={tile = 64 : i32}",
        '  ROOT %b = () custom-call(), custom_call_target="deep_gemm_setup"',
    )
    assert [(each.target, each.flops, each.arithmetic) for each in found.matmuls] == [
        ("deep_gemm", 0, "bf16")
    ]
    assert found.kernels == 2
    assert found.bytes_moved == 2 * (2 * 64 * 128 + 64 * 64)


# Products of this CPU.


def test_a_matrix_product_on_the_cpu():
    def layer(a, b):
        with jax.named_scope("Dense_0"):
            return a @ b

    found = program(layer, x((64, 128), f32), x((128, 256), f32))
    kept = ("f32[64,128] f32[128,256]", "f32[64,256]", "f32", "f32", False, 2 * 64 * 128 * 256, 1)
    assert row(found.matmuls[0]) == ("gemm", "dot", *kept, "Dense_0/dot_general")
    assert len(found.matmuls) == 1
    assert found.device == "cpu"
    assert found.tensor_core_share == 0
    assert found.bytes_moved == 4 * (64 * 128 + 128 * 256 + 64 * 256)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float64, jnp.complex64])
def test_dtypes_of_products_on_the_cpu(dtype):
    with jax.enable_x64(True):
        dot = lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32 if dtype == jnp.int8 else None)
        (product,) = program(dot, x((8, 16), dtype), x((16, 4), dtype)).matmuls
    names = {jnp.int8: ("s8", "s32"), jnp.float64: ("f64", "f64"), jnp.complex64: ("c64", "c64")}
    assert (product.arithmetic, product.accumulation) == names[dtype]
    assert product.result == HloArray(names[dtype][1], (8, 4))
    assert product.flops == (8 if dtype == jnp.complex64 else 2) * 8 * 16 * 4


@pytest.mark.parametrize("strides", [1, 2])
def test_all_convolutions_of_a_gradient_have_as_many_flops(strides):
    """The gradient with strides is a convolution with zeros between its inputs, which do not count."""
    axes = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, k: lax.conv_general_dilated(x, k, (strides, strides), "SAME", dimension_numbers=axes)
    grads = jax.grad(lambda x, k: (conv(x, k) ** 2).sum(), (0, 1))
    found = program(grads, x((4, 16, 16, 8), f32), x((3, 3, 8, 32), f32))
    out = 4 * (16 // strides) ** 2 * 32
    expected = ("convolution", "f32", "f32", 2 * out * 3 * 3 * 8)
    assert [(p.kind, p.arithmetic, p.accumulation, p.flops) for p in found.matmuls] == [expected] * 3


def block_scaled(operand, scale, result):
    """The product of `jax.nn.scaled_dot_general` in a program for a B200: (4, 128, 256) and (4, 512, 256)."""
    return entry(
        f"  %a = {operand}[4,128,256]{{2,1,0}} parameter(0)",
        f"  %b = {operand}[4,512,256]{{2,1,0}} parameter(1)",
        f"  %c = {scale}[4,128,8]{{2,1,0}} parameter(2)",
        f"  %d = {scale}[4,512,8]{{2,1,0}} parameter(3)",
        f"  %call = ({result}[4,128,512]{{2,1,0}}, u8[0]{{0}}) custom-call(%a, %b, %c, %d), "
        'custom_call_target="__cudnn$blockScaledDot", metadata={op_name="jit(f)/scaled_matmul"}',
        f"  ROOT %r = {result}[4,128,512]{{2,1,0}} get-tuple-element(%call), index=0",
    )


@pytest.mark.parametrize(
    ("operand", "scale", "result"),
    [("f8e4m3fn", "f8e8m0fnu", "f32"), ("f8e4m3fn", "f8e8m0fnu", "bf16"), ("f4e2m1fn", "f8e4m3fn", "f32")],
)
def test_block_scaled_products(operand, scale, result):
    """MXFP8 and NVFP4. The operands with the scales of the blocks are no part of the product."""
    blocks = block_scaled(operand, scale, result)
    (product,) = blocks.matmuls
    operands = f"{operand}[4,128,256] {operand}[4,512,256]"
    flops = 2 * 4 * 128 * 512 * 256
    assert row(product) == (
        *("gemm", "__cudnn$blockScaledDot", operands, f"{result}[4,128,512]"),
        *(operand, "f32", True, flops, 1, "scaled_matmul"),
    )
    assert blocks.tensor_core_share == 1
    assert blocks.launches[-1].flops == flops


@pytest.mark.parametrize(
    ("capability", "arithmetic"), [("7.0", "f32"), ("7.5", "f32"), ("8.0", "tf32"), ("10.0", "tf32")]
)
def test_a_gpu_before_the_a100_has_no_tf32(capability, arithmetic):
    text = (PROGRAMS / f"products-{VERSIONS[-1]}.txt").read_text()
    gpu = types.SimpleNamespace(platform="cuda", device_kind="a GPU", compute_capability=capability)
    default = [p.arithmetic for p in _read(text, None, gpu).matmuls if str(p.operands[0]) == "f32[64,128]"]
    assert sorted(default) == sorted([arithmetic, "f32", "f32"])
