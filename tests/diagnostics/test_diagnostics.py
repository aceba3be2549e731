"""What `read_program` says of programs compiled for this CPU, and of H100 programs kept in `programs/`."""

import json
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_lite.diagnostics import read_program
from jmp_lite.diagnostics._hlo import Array, parse
from jmp_lite.diagnostics._program import _read

H100 = types.SimpleNamespace(platform="cuda", device_kind="NVIDIA H100 80GB HBM3")
PROGRAMS = pathlib.Path(__file__).parent / "programs"
VERSIONS = ["0.10.2", "0.12.0.1"]

x = jax.ShapeDtypeStruct
f16, bf16, f32 = jnp.float16, jnp.bfloat16, jnp.float32


def compiled(fun, *args, **jit):
    return jax.jit(fun, **jit).lower(*args).compile()


def program(fun, *args, **jit):
    """Of the CPU."""
    return read_program(compiled(fun, *args, **jit))


def h100(name, version=VERSIONS[-1]):
    return _read((PROGRAMS / f"{name}-{version}.txt").read_text(), None, H100)


def entry(*lines):
    """A program of some lines that no small step on one device compiles to."""
    return _read("\n".join(["HloModule made_up", "", "ENTRY %main () -> f32[] {", *lines, "}"]), None, H100)


def row(product):
    """All that a product says, in words."""
    return (
        product.kind,
        product.target,
        " ".join(map(str, product.operands)),
        str(product.result),
        product.arithmetic,
        product.accumulation,
        product.on_tensor_cores,
        product.flops,
        product.times,
        product.operation,
    )


# Products of an H100.

LT = "__cublas$lt$matmul"
ONE = 2 * 64 * 128 * 64  # A product of 64x128 with 128x64.


def square(dtype, result, arithmetic, accumulation, tensor_cores, operation="dot_general", target=LT):
    operands = f"{dtype}[64,128] {dtype}[64,128]"
    kept = (operands, f"{result}[64,64]", arithmetic, accumulation, tensor_cores, ONE, 1, operation)
    return ("gemm", target, *kept)


@pytest.mark.parametrize("version", VERSIONS)
def test_matrix_products_of_every_dtype_and_precision(version):
    """Of float32, the precisions asked for are the default, HIGHEST, and DotAlgorithmPreset.F32_F32_F32."""
    products = h100("products", version).products
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
def test_the_share_on_tensor_cores_counts_what_is_in_16_bits_or_less(version):
    """Of 15 products of equal size tf32, two in f32 and one in f64 are not."""
    assert h100("products", version).tensor_core_share == pytest.approx(11 / 15)


def test_algorithms_of_products_in_xlas_own_kernels():
    """Kernels of XLA have the product inside, and the sum split: 8 sums of 16, or 16 of 8."""
    split = lambda dtype, parts, arithmetic: (
        *("gemm", "dot", " ".join([f"{dtype}[64,{parts},{128 // parts}]"] * 2), f"f32[{parts},64,64]"),
        *(arithmetic, "f32", True, ONE, 1, "dot_general"),
    )
    found = h100("triton")
    assert sorted(map(row, found.products)) == sorted(
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
    forward, to_kernel, to_images = h100(name).products
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
    forward, backward = h100("attention").products
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
    assert [(each.target, each.flops, each.arithmetic) for each in found.products] == [
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
    assert row(found.products[0]) == ("gemm", "dot", *kept, "Dense_0/dot_general")
    assert len(found.products) == 1
    assert found.device == "cpu"
    assert found.tensor_core_share == 0
    assert found.bytes_moved == 4 * (64 * 128 + 128 * 256 + 64 * 256)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float64, jnp.complex64])
def test_dtypes_of_products_on_the_cpu(dtype):
    with jax.enable_x64(True):
        dot = lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32 if dtype == jnp.int8 else None)
        (product,) = program(dot, x((8, 16), dtype), x((16, 4), dtype)).products
    names = {jnp.int8: ("s8", "s32"), jnp.float64: ("f64", "f64"), jnp.complex64: ("c64", "c64")}
    assert (product.arithmetic, product.accumulation) == names[dtype]
    assert product.result == Array(names[dtype][1], (8, 4))
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
    assert [(p.kind, p.arithmetic, p.accumulation, p.flops) for p in found.products] == [expected] * 3


# Loops and conditionals.


@pytest.mark.parametrize("version", VERSIONS)
def test_loops_of_an_h100(version):
    """Five times three, a loop whose length nobody knows, and a conditional."""
    found = h100("loops", version)
    assert [each.times for each in found.products] == [15, 1, 1]
    assert {each.flops for each in found.products} == {2 * 64**3}
    assert found.conditionals == 1
    assert found.host_syncs == ("while, of a length that the device decides", "conditional")


def test_a_scan_counts_as_often_as_it_runs():
    once = program(lambda x: jnp.tanh(x @ x), x((32, 32), f32))
    step = lambda x, _: (jnp.tanh(x @ x), None)
    seven, nine = (program(lambda x, n=n: lax.scan(step, x, length=n)[0], x((32, 32), f32)) for n in (7, 9))
    assert ([p.times for p in seven.products], [p.times for p in nine.products]) == ([7], [9])
    assert seven.products[0].flops == once.products[0].flops == 2 * 32**3
    # Beside the step a loop adds to its counter and compares it.
    assert nine.kernels - seven.kernels == 2 * (once.kernels + 2)
    assert 0 < nine.bytes_moved - seven.bytes_moved - 2 * once.bytes_moved < 2 * 64
    assert (seven.host_syncs, seven.conditionals) == ((), 0)


def test_nested_scans_multiply():
    inner = lambda x, w: (jnp.tanh(x @ w), None)
    outer = lambda x, ws: (lax.scan(inner, x, ws)[0], None)
    found = program(lambda x, ws: lax.scan(outer, x, ws)[0], x((8, 8), f32), x((5, 3, 8, 8), f32))
    assert [each.times for each in found.products] == [15]
    assert 15 * 4 <= found.kernels < 15 * 10


def test_a_fori_loop_with_static_bounds():
    found = program(lambda x: lax.fori_loop(2, 6, lambda _, x: jnp.sin(x @ x), x), x((8, 8), f32))
    assert [each.times for each in found.products] == [4]
    assert found.host_syncs == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_scan_moves_a_slice_an_iteration_of_what_it_reads_and_writes(version):
    """tanh(x), x @ w of 64x64 in float16, six times. In 0.12 the product reads w and writes y in place."""
    found = h100("scan", version)
    whole, index = 64 * 64 * 2, 4
    product, tanh, count, compare = 3 * whole, 2 * whole, 2 * index, index + 1
    # Each slice is copied before and after the product, where these are not one with it.
    copies = 2 * (2 * whole + index) if version == "0.10.2" else index
    start = 2 * whole + 2 * index + 6 * whole  # x and the counter are copied, the outputs are zeroed.
    assert found.bytes_moved == 6 * (product + tanh + count + compare + copies) + start
    assert found.kernels == 6 * (4 + 2 * (version == "0.10.2")) + 3
    assert [(each.times, each.flops) for each in found.products] == [(6, 2 * 64**3)]


def test_a_scan_over_twice_as_many_weights_moves_twice_the_bytes():
    step = lambda x, w: (jnp.tanh(x @ w), x * 2)
    of = lambda n: program(lambda x, w: lax.scan(step, x, w), x((32, 32), f32), x((n, 32, 32), f32))
    four, eight, sixteen = (of(n).bytes_moved for n in (4, 8, 16))
    assert sixteen - eight == 2 * (eight - four) > 0


def test_a_while_loop_of_unknown_length_is_a_host_sync_and_counted_once():
    loop = lambda x: lax.while_loop(lambda x: x.sum() < 10, lambda x: jnp.tanh(x @ x), x)
    found = program(loop, x((8, 8), f32))
    assert [each.times for each in found.products] == [1]
    assert found.host_syncs == ("while, of a length that the device decides",)
    assert found.conditionals == 0


def test_a_conditional_counts_both_branches_and_syncs():
    branches = lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: jnp.tanh(x) @ x, x)
    found = program(branches, x((), jnp.bool_), x((8, 8), f32))
    assert [each.times for each in found.products] == [1, 1]
    assert (found.conditionals, found.host_syncs) == (1, ("conditional",))
    branches = lambda i, x: lax.switch(i, [jnp.sin, lambda x: x @ x, jnp.cos], x)
    found = program(branches, x((), jnp.int32), x((8, 8), f32))
    assert (len(found.products), found.conditionals) == (1, 1)


def test_calls_back_to_python_are_host_syncs():
    def pure(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((8,), f32), x) * 2

    def debug(x):
        jax.debug.callback(lambda x: None, x)
        return x * 2

    for fun in (pure, debug):
        (reason,) = program(fun, x((8,), f32)).host_syncs
        assert "callback" in reason
    assert program(lambda x: x * 2, x((8,), f32)).host_syncs == ()


# Bytes.


def test_a_kernel_reads_and_writes_each_array_once():
    found = program(lambda a, b: jnp.tanh(a) * a + b, x((512, 512), f32), x((512, 512), f32))
    assert (found.kernels, found.bytes_moved) == (1, 3 * 4 * 512 * 512)


@pytest.mark.parametrize("version", VERSIONS)
def test_lookups_updates_and_copies_of_a_table_on_an_h100(version):
    """Of 1000 rows of 256 bytes."""
    row = 64 * 4
    lookup = 4 * row + 4 * 4 + 4 * row
    update = row + 4 + row
    added = 4 * row + 4 * row + 4 * 4 + 4 * row
    copy = 2 * 1000 * row
    found = h100("traffic", version)
    assert (found.kernels, found.bytes_moved) == (4, lookup + update + added + copy)


TABLE = x((1000, 64), f32)
ROW = 64 * 4


def test_a_lookup_reads_the_rows_that_it_looks_up():
    found = program(lambda table, places: table[places] * 2, TABLE, x((4,), jnp.int32))
    assert 2 * 4 * ROW + 16 <= found.bytes_moved < 2 * 4 * ROW + 100


def test_an_update_in_place_writes_the_slice_and_one_that_is_not_copies_the_rest():
    update = lambda table, new, i: lax.dynamic_update_slice(table, new * 2, (i, jnp.int32(0)))
    args = TABLE, x((1, 64), f32), x((), jnp.int32)
    assert 2 * ROW < program(update, *args, donate_argnums=0).bytes_moved < 2 * ROW + 100
    assert 2 * 1001 * ROW < program(update, *args).bytes_moved < 2 * 1001 * ROW + 100


def test_an_update_that_the_kernel_reads_again_reads_all_of_it():
    update = lambda table, new: jnp.tanh(lax.dynamic_update_slice(table, new, (3, 0)))
    found = program(update, TABLE, x((1, 64), f32))
    assert found.kernels == 1
    assert found.bytes_moved == 2 * 1000 * ROW + ROW


def test_an_update_of_what_a_kernel_makes_writes_all_of_it():
    kernel = """%fused (p0: f32[1,64]) -> f32[1000,64] {
  %p0 = f32[1,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[1000,64]{1,0} broadcast(%zero), dimensions={}
  %place = s32[] constant(3)
  ROOT %update = f32[1000,64]{1,0} dynamic-update-slice(%zeros, %p0, %place, %place)
}

ENTRY %main (new: f32[1,64]) -> f32[1000,64] {
  %new = f32[1,64]{1,0} parameter(0)
  ROOT %fusion = f32[1000,64]{1,0} fusion(%new), kind=kLoop, calls=%fused
}"""
    assert _read(kernel, None, H100).bytes_moved == 1001 * ROW
    in_place = kernel.replace("broadcast(%zero), dimensions={}", "parameter(1)")
    in_place = in_place.replace("fusion(%new)", "fusion(%new, %new)")
    assert _read(in_place, None, H100).bytes_moved == 2 * ROW


def test_updates_and_lookups_outside_kernels_count_as_inside():
    start = "  %t = f32[1000,64]{1,0} parameter(0)", "  %i = s32[] parameter(1)"
    new = "  %n = f32[1,64]{1,0} parameter(2)"
    update = "  ROOT %u = f32[1000,64]{1,0} dynamic-update-slice(%t, %n, %i, %i)"
    lookup = "  ROOT %s = f32[1,64]{1,0} dynamic-slice(%t, %i, %i), dynamic_slice_sizes={1,64}"
    assert entry(*start, new, update).bytes_moved == 2 * ROW + 8
    assert entry(*start, lookup).bytes_moved == 2 * ROW + 8


def test_a_copy_counts_and_a_workspace_does_not():
    assert program(jnp.copy, TABLE).bytes_moved == 2 * 1000 * ROW
    text = (PROGRAMS / "scan-0.12.0.1.txt").read_text()
    assert "s8[33554432]" in text  # Of cuBLAS: 32 MB, more than all that is counted.
    assert h100("scan").bytes_moved < 33554432
    # Bytes that the program itself computes do count.
    assert program(lambda x: x + x, x((1024,), jnp.int8)).bytes_moved == 2048


def test_no_kernel_runs_for_an_array_without_elements():
    empty = program(lambda x: (x * 2, jnp.sum(x)), x((0, 4), f32))
    assert empty.bytes_moved <= 8
    line = "  ROOT %c = f32[0,4]{1,0} copy(%p)"
    assert entry("  %p = f32[0,4]{1,0} parameter(0)", line).kernels == 0
    assert entry("  %p = f32[2,4]{1,0} parameter(0)", line.replace("[0,", "[2,")).kernels == 1


def test_what_is_waited_for_later_counts_once():
    """A start names its operands beside its results."""
    found = entry(
        "  %p = f32[256]{0} parameter(0)",
        "  %s = (f32[256]{0}, f32[256]{0:S(5)}, u32[]) copy-start(%p)",
        "  ROOT %d = f32[256]{0:S(5)} copy-done(%s)",
    )
    assert (found.kernels, found.bytes_moved) == (1, 2 * 1024)
    found = entry(
        "  %p = f32[64,64]{1,0} parameter(0)",
        f"  %s = ((f32[64,64], f32[64,64]), (f16[64,64]), u32[]) custom-call-start(%p, %p), "
        f'custom_call_target="{LT}"',
        "  %u = ((f32[64,64], f32[64,64]), (f16[64,64]), u32[]) custom-call-update(%s)",
        "  ROOT %d = f16[64,64] custom-call-done(%u)",
    )
    assert (found.kernels, found.bytes_moved) == (1, 64 * 64 * (4 + 4 + 2))
    assert [str(each.result) for each in found.products] == ["f16[64,64]"]


# Memory.


def test_memory_with_and_without_donation():
    step = lambda state, grads: (state - 0.1 * grads, (grads * grads).sum())
    args = x((256, 256), f32), x((256, 256), f32)
    state = 256 * 256 * 4
    plain, donated = program(step, *args), program(step, *args, donate_argnums=0)
    assert (plain.argument_bytes, donated.argument_bytes) == (2 * state, 2 * state)
    assert (plain.aliased_bytes, donated.aliased_bytes) == (0, state)
    for each in (plain, donated):
        assert state + 4 <= each.output_bytes <= state + 64  # With the table of a tuple.


def test_temporary_memory_is_what_is_kept_between_kernels():
    found = program(lambda x: (x @ x) @ (x.T @ x.T), x((128, 128), f32))
    assert 2 * 128 * 128 * 4 <= found.temporary_bytes < 3 * 128 * 128 * 4 + 4096


# Collectives.


def shards(fun, *arrays):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return program(mapped, *arrays)


@pytest.mark.parametrize(
    ("kind", "fun"),
    [
        ("all-reduce", lambda x: lax.psum(x, "d")),
        ("all-gather", lambda x: lax.all_gather(x, "d", tiled=True)),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "d", tiled=True)),
        ("all-to-all", lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True)),
        ("collective-permute", lambda x: lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)])),
    ],
)
def test_collectives_of_eight_cpus(kind, fun):
    """Each has 8 rows of 128 float32 of the 64."""
    (found,) = shards(fun, x((64, 128), f32)).collectives
    assert (found.kind, found.dtypes, found.size, found.times) == (kind, ("f32",), 8 * 128 * 4, 1)
    assert found.operation.startswith("shard_map/")


def test_a_collective_in_a_scan_counts_as_often_as_it_runs():
    step = lambda x, _: (lax.psum(jnp.tanh(x), "d"), None)
    found = shards(lambda x: lax.scan(step, x, length=5)[0], x((64, 128), f32))
    assert [(each.kind, each.times) for each in found.collectives] == [("all-reduce", 5)]


@pytest.mark.parametrize("version", VERSIONS)
def test_collectives_of_eight_h100s(version):
    """Some are started and waited for later; each is there once."""
    found = h100("collectives", version)
    kinds = {
        "shard_map/psum": ("all-reduce", "f32[8,128]", 8 * 128 * 4, 1),
        "shard_map/all_gather": ("all-gather", "bf16[8,128]", 8 * 128 * 2, 1),
        "shard_map/reduce_scatter": ("reduce-scatter", "f32[8,128]", 8 * 128 * 4, 1),
        "shard_map/all_to_all": ("all-to-all", "f32[8,128]", 8 * 128 * 4, 1),
        "shard_map/ppermute": ("collective-permute", "f32[8,128]", 8 * 128 * 4, 1),
    }
    body = "eval_jaxpr" if version == "0.12.0.1" else "closed_call"
    kinds[f"shard_map/while/body/{body}/psum"] = ("all-reduce", "f32[8,128]", 8 * 128 * 4, 5)
    assert len(found.collectives) == 6
    assert {
        each.operation: (each.kind, *map(str, each.arrays), each.size, each.times)
        for each in found.collectives
    } == kinds
    assert "all-reduce-start" in (PROGRAMS / f"collectives-{version}.txt").read_text()


def test_a_collective_of_several_arrays_and_one_in_a_computation_of_its_own():
    text = """%wrapped (a: f32[16], b: bf16[16]) -> (f32[16], bf16[16]) {
  %a = f32[16]{0} parameter(0)
  %b = bf16[16]{0} parameter(1)
  ROOT %both = (f32[16]{0}, bf16[16]{0}) all-reduce(%a, %b), to_apply=%add
}

ENTRY %main (p: f32[16], q: bf16[16]) -> (f32[16], bf16[16]) {
  %p = f32[16]{0} parameter(0)
  %q = bf16[16]{0} parameter(1)
  %s = ((f32[16], bf16[16]), (f32[16], bf16[16]), u32[]) async-start(%p, %q), calls=%wrapped
  ROOT %d = (f32[16]{0}, bf16[16]{0}) async-done(%s)
}"""
    found = _read(text, None, H100)
    (both,) = found.collectives
    assert (both.kind, both.dtypes, both.size, both.times) == ("all-reduce", ("bf16", "f32"), 96, 1)
    assert (found.kernels, found.bytes_moved) == (0, 0)


# The text.


def test_the_table_names_what_is_in_float32_where_most_is_half():
    lines = str(h100("products")).split("\n")
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "runs product operands multiplies adds in result GFLOP"
    table = words[1 : lines.index("in float32 or wider:")]
    assert "2 gemm bf16 x bf16 bf16 f32 bf16 0.0" in table
    assert "1 gemm f8e4m3fn x f8e4m3fn f8e4m3fn f32 f32 0.0" in table
    assert len(table) == 7
    assert lines.count("    dot_general  f32[64,128] x f32[64,128]") == 3
    assert lines.count("    dot_general  f64[64,128] x f64[64,128]") == 1
    share = "on NVIDIA H100 80GB HBM3: 73.3% of the products' FLOPs in 16 bits on Tensor Cores"
    assert share in lines
    assert "11 kernels and library calls, 1.03 MB read and written" in lines


def test_flops_and_runs_in_the_table_are_totals():
    """Forward, and the gradients to the kernel and to the images, of 0.302 GFLOP each."""
    line = str(h100("convolutions")).split("\n")[1]
    assert " ".join(line.split()) == "3 convolution f16 x f16 f16 f32 f16 0.9"
    assert str(h100("loops")).split("\n")[1].split()[0] == "17"


def test_all_in_float32_is_not_listed_and_more_than_eight_are_counted():
    dots = lambda x: sum(jnp.dot(x, jnp.sin(x + i)) for i in range(10))
    whole = str(program(dots, x((8, 8), f32)))
    assert "wider" not in whole
    assert whole.split("\n")[1].split()[0] == "10"
    mixed = lambda x, y: (dots(x), lax.dot(y, y, preferred_element_type=jnp.int32))
    lines = str(program(mixed, x((8, 8), f32), x((8, 8), jnp.int8))).split("\n")
    listed = lines[lines.index("in float32 or wider:") + 1 :]
    assert listed[:8] == ["    dot_general  f32[8,8] x f32[8,8]"] * 8
    assert listed[8] == "    and 2 more"


def test_the_totals_of_the_text():
    step = lambda x: x * 2
    text = str(program(step, x((500, 500), f32), donate_argnums=0))
    assert "on cpu: no products" in text
    assert "1 kernels and library calls, 2.00 MB read and written" in text
    assert "memory: 1.00 MB arguments, 1.00 MB outputs (1.00 MB in place), 0.00 MB temporary" in text
    assert text.endswith("0 conditionals, 0 host syncs")
    assert "1 conditionals, 2 host syncs while, of a length that the device decides, conditional" in str(
        h100("loops")
    )
    assert "     5  all-reduce of 0.00 MB in f32" in str(h100("collectives")).split("\n")


@pytest.mark.parametrize("name", ["products", "collectives", "loops"])
def test_to_dict_is_json_and_complete(name):
    found = h100(name)
    data = json.loads(json.dumps(found.to_dict()))
    assert set(data) == {*(field for field in vars(found)), "tensor_core_share"}
    assert data["tensor_core_share"] == found.tensor_core_share
    assert data["bytes_moved"] == found.bytes_moved
    assert data["host_syncs"] == list(found.host_syncs)
    for product, entry in zip(found.products, data["products"], strict=True):
        assert set(entry) == set(vars(product))
        assert entry["operands"] == [str(array) for array in product.operands]
        assert (entry["result"], entry["flops"]) == (str(product.result), product.flops)
    for collective, entry in zip(found.collectives, data["collectives"], strict=True):
        assert set(entry) == set(vars(collective))
        assert entry["arrays"] == [str(array) for array in collective.arrays]


# Errors.


def test_what_is_not_compiled_is_refused_with_what_to_do():
    step = jax.jit(lambda x: x * 2)
    for wrong in (step, step.lower(x((8,), f32)), (lambda x: x)):
        with pytest.raises(TypeError, match=r"got \w+. Give jax.jit\(step\).lower\(\*args\).compile\(\)"):
            read_program(wrong)


@pytest.mark.parametrize("text", ["", "nonsense", "module @jit_f { func.func public @main() }"])
def test_no_program_is_a_value_error(text):
    with pytest.raises(ValueError, match="no ENTRY computation was found"):
        parse(text)


# What a program may hold.


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *[("pred", 7), ("s8", 7), ("f8e4m3fn", 7), ("f8e5m2", 7), ("f16", 14), ("bf16", 14), ("f32", 28)],
        *[("c64", 56), ("f64", 56), ("c128", 112), ("s4", 4), ("u4", 4), ("s2", 2), ("f4e2m1fn", 4)],
        *[("token", 0)],
    ],
)
def test_the_bytes_of_seven_of_each_dtype(dtype, size):
    assert Array(dtype, (7,)).size == size
    line = f"  ROOT %p = {dtype}[7]{{0}} parameter(0)"
    (found,) = parse(f"ENTRY %main (p: {dtype}[7]) -> {dtype}[7] {{\n{line}\n}}").entry
    assert found.arrays == (Array(dtype, (7,)),)


def test_dtypes_of_this_machine():
    double = lambda *xs: [jnp.logical_not(x) if x.dtype == bool else x + x for x in xs]
    dtypes = [jnp.bool_, jnp.int4, jnp.uint4, jnp.float8_e4m3fn, jnp.complex64]
    found = program(double, *[x((64,), dtype) for dtype in dtypes])
    assert found.bytes_moved == 2 * (64 + 32 + 32 + 64 + 512)


def test_programs_without_inputs_products_or_outputs():
    constants = program(lambda: (jnp.arange(4.0) * jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones((2, 3))))
    assert (constants.argument_bytes, constants.products, constants.tensor_core_share) == (0, (), 1)
    nothing = program(lambda: ())
    assert (nothing.kernels, nothing.bytes_moved, nothing.products) == (0, 0, ())
    nested = program(lambda tree: jax.tree.map(jnp.sin, tree), {"a": (x((3,), f32), [x((), f32)])})
    assert nested.bytes_moved == 2 * (12 + 4)


def test_long_tuples_are_numbered_in_between():
    args = [x((8 + i,), f32) for i in range(20)]
    step = compiled(lambda *xs: tuple(x * 2 for x in xs), *args)
    assert "/*index=15*/" in step.as_text()
    found = read_program(step)
    assert found.kernels == 20
    assert found.bytes_moved == 2 * sum(4 * (8 + i) for i in range(20))
    assert [array.shape for array in parse(step.as_text()).entry.root.arrays] == [(8 + i,) for i in range(20)]


@pytest.mark.parametrize(
    "name",
    [
        'a{b}"c',
        "a)b(c",
        "back\\slash, =\n %x{",
        " calls=%nothing body=%none",
        "é\u2028\x0bß",
        "}, ROOT %y = f32[",
    ],
)
def test_any_scope_is_read_back(name):
    def step(x):
        with jax.named_scope(name):
            return x @ jnp.tanh(x)

    (product,) = program(step, x((8, 8), f32)).products
    assert product.operation == f"{name}/dot_general"


def test_constants_with_braces_are_no_computations():
    table = jnp.array([[1, 2], [3, 4]], jnp.int32)
    step = compiled(lambda i: table[i] * 2, x((), jnp.int32))
    assert "constant({ {" in step.as_text()
    found = read_program(step)
    assert found.kernels >= 1
    assert math.prod(parse(step.as_text()).entry.root.arrays[0].shape) == 2
