"""The trial of fp8: its products are products, and they reach XLA in fp8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compiled.h100 import compile_for_gpu
from benchmarks.device import HAS_GPU
from benchmarks.gpu import fp8
from jmp_lite.diagnostics import read_program

E4, E5 = (float(jnp.finfo(dtype).eps) for dtype in (fp8.FORWARD, fp8.BACKWARD))
# The axes of the left operand that are contracted, and those of the right one.
CASES = [
    ((2, 3, 5), (5, 7), (2,), (0,)),
    ((4, 5, 3), (3, 6, 5), (1, 2), (2, 0)),
    ((5, 4), (7, 5), (0,), (1,)),
]


def relative(found, wanted):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(("left", "right", "left_axes", "right_axes"), CASES)
def test_a_product_and_its_gradients_are_those_of_float32_but_for_the_rounding(
    left, right, left_axes, right_axes
):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], left) * 1e-6
    w = jax.random.normal(keys[1], right) * 300
    dimensions = ((left_axes, right_axes), ((), ()))
    exact = lambda x, w: jax.lax.dot_general(x, w, dimensions)
    cotangent = jax.random.normal(keys[2], jax.eval_shape(exact, x, w).shape)

    @jax.jit
    def both(x, w, cotangent):
        results = []
        product = lambda x, w: fp8.fp8_product(x, w, dimensions, jnp.bfloat16)
        for fun, dtype in ((exact, jnp.float32), (product, jnp.bfloat16)):
            result, back = jax.vjp(fun, x.astype(dtype), w.astype(dtype))
            results.append((result, *back(cotangent.astype(dtype))))
        return results

    wanted, found = both(x, w, cotangent)
    for ours, theirs, epsilon in zip(found, wanted, (E4, E5, E5)):
        assert ours.shape == theirs.shape
        assert ours.dtype == jnp.bfloat16
        assert relative(ours, theirs) < epsilon


@pytest.mark.parametrize("value", [0.0, 3.0e-39, 1.5e-30, 1.0, 3.0e30])
def test_an_operand_fits_its_dtype_after_the_scale(value):
    x = jnp.full(4, value, jnp.bfloat16)
    found, back = fp8.quantize(x, fp8.FORWARD)
    assert np.isfinite(np.asarray(found, np.float32)).all()
    if value >= 1e-30:
        np.testing.assert_allclose(np.asarray(found, np.float32) * float(back), float(x[0]), rtol=E4)


def test_only_large_products_without_batch_axes_are_in_fp8():
    def loss(x, w, small):
        return jnp.sum(jnp.einsum("bik,bkj->bij", x, x)) + jnp.sum(x @ w) + jnp.sum(x[0, :8] @ small)

    x, w, small = jnp.ones((2, 64, 64)), jnp.ones((64, 128)), jnp.ones((64, 8))
    text = str(jax.make_jaxpr(jax.jit(fp8.autocast_fp8(loss)))(x, w, small))
    count = text.count("f8_e4m3fn[2,64,64]"), text.count("f8_e4m3fn[64,128]"), text.count("f8_e4m3fn[64,8]")
    assert count[0]
    assert count[1]
    assert not count[2]
    assert not fp8.suits((((1,), (0,)), ((), ())), jnp.ones((72, 64)), jnp.ones((64, 64)))  # 72 = 4.5 x 16.
    assert fp8.suits((((1,), (0,)), ((), ())), jnp.ones((80, 64)), jnp.ones((64, 64)))


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="on a GPU the program is another one")
def test_in_the_program_of_an_h100_the_products_of_a_block_are_in_fp8():
    loss, params, batch = fp8.block(128, 128)
    step = jax.value_and_grad(fp8.autocast_fp8(loss), argnums=(0, 1))
    program = read_program(compile_for_gpu(step, params, *batch))
    found = [product.arithmetic for product in program.products]
    # Four products forward, and two backward for each. Attention has batch axes and stays in bfloat16.
    assert sum(arithmetic.startswith("f8") for arithmetic in found) == 12
    assert "bf16" in found
