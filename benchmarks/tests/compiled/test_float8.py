"""The H100 program of a block of a transformer in fp8: products, kernels, bytes, collectives."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from benchmarks.compiled import float8
from jmp_lite.programs import compile_for, mesh_for, read_program

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:autocast.*'float8'")]


# `milliseconds` are the estimates for bfloat16 and fp8. The last three columns are the estimate, the bytes of
# all kernels that are not products, and the memory, each beside bfloat16.
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("width", "triton", "flash", "kernels", "milliseconds", "times", "elsewhere", "held"),
    [
        (2048, True, True, 75, (5.28, 4.13), 1.27, 1.30, 1.08),
        (2048, False, True, 96, (5.42, 4.45), 1.21, 1.41, 1.05),
        (4096, True, False, 90, (20.08, 14.90), 1.34, 1.17, 1.0),
        (4096, True, True, 75, (17.82, 12.60), 1.41, 1.32, 0.73),
        (2048, True, False, 90, (7.37, 6.24), 1.175, 1.11, 1.02),
        (4096, False, False, 113, (20.52, 15.73), 1.30, 1.222, 1.0),
    ],
)
def test_all_dense_products_of_a_block_run_in_fp8_and_gain(
    width, triton, flash, kernels, milliseconds, times, elsewhere, held
):
    costs = float8.measure(width, triton, flash)
    bfloat16, fp8 = costs["bfloat16"], costs["float8"]
    assert fp8.products == bfloat16.products == (12 if flash else 18)
    assert (bfloat16.fp8, fp8.fp8) == (0, 12)
    assert fp8.kernels <= kernels
    assert fp8.product_bytes < 0.95 * bfloat16.product_bytes
    assert fp8.other_bytes < elsewhere * bfloat16.other_bytes
    assert fp8.temporary_bytes < held * bfloat16.temporary_bytes
    assert 1e3 * bfloat16.seconds < milliseconds[0]
    assert 1e3 * fp8.seconds < milliseconds[1]
    assert bfloat16.seconds / fp8.seconds >= times


@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_under_fsdp_the_weights_cross_in_fp8(order):
    mesh = mesh_for("h100", {"data": 8})
    on = lambda shape, *axes: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*axes))
    )
    params = {"in": on((2048, 8192), "data"), "out": on((8192, 2048), "data")}
    x = on((16, 2048, 2048), "data")

    def loss(params, x):
        return jnp.mean(jnp.square(jax.nn.gelu(x @ params["in"]) @ params["out"]))

    if order == "grad(autocast)":
        grads = jax.grad(jmp.autocast(loss, "float8"))
    else:
        grads = jmp.autocast(jax.grad(loss), "float8")
    jitted = jax.jit(grads, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))
    program = read_program(compile_for("h100", jitted, params, x, mesh=mesh))
    gathers = [c for c in program.collectives if c.kind == "all-gather" and c.size > 100_000]
    assert {dtype for gather in gathers for dtype in gather.dtypes} == {"f8e4m3fn"}
    assert sum(product.arithmetic.startswith("f8") for product in program.matmuls) == 5
