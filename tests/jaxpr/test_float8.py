"""Products in fp8 against an emulation in NumPy: values, gradients, and the ends of the range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jmp_lite._float8.product import float8_product, multiply
from jmp_lite._float8.quantize import BACKWARD, FORWARD, quantize
from tests.support.arrays import normal

FORMATS = [FORWARD, BACKWARD]
TOP = {FORWARD: 448.0, BACKWARD: 57344.0}


def emulated(x, dtype):
    """Returns `x`, rounded to the fp8 dtype under a power of two, and the power of two, in float64."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max() / 2.0 ** {FORWARD: 8, BACKWARD: 15}[dtype]
    low = 2.0 ** np.floor(np.log2(largest))
    step = low if largest / low < 1.5 else 2 * low
    return (x / step).astype(np.float32).astype(dtype).astype(np.float64), step


QUANTIZE = jax.jit(quantize, static_argnums=1)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("source", "size"), [("float32", 1.0), ("bfloat16", 3e-30), ("float32", 7e25)])
def test_the_values_are_those_of_numpy(dtype, source, size):
    x = (size * normal(0, 32, 48)).astype(source)
    quantized = QUANTIZE(x, dtype)
    expected, step = emulated(x.astype(jnp.float32), dtype)
    assert quantized.array.dtype == dtype
    assert float(quantized.step) == step
    np.testing.assert_array_equal(np.asarray(quantized.array, np.float64), expected)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(st.floats(2.0**-126, 1.5 * 2.0**127, width=32), st.integers(0, 3))
def test_the_step_is_a_power_of_two_and_nothing_overflows(dtype, largest, index):
    x = np.zeros(4, np.float32)
    x[index] = -largest
    quantized = QUANTIZE(jnp.asarray(x), dtype)
    assert np.frexp(float(quantized.step))[0] == 0.5
    value = abs(float(quantized.array[index]))
    assert value <= 0.86 * TOP[dtype]
    if largest > 2.0**-126 * TOP[dtype]:
        assert value >= 0.37 * TOP[dtype]
    # Three bits of mantissa, or two.
    assert value * float(quantized.step) == pytest.approx(largest, rel=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("x", [0.0, 1e-45, -1e-40])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_zeros_and_subnormal_numbers_stay_finite(x, dtype):
    quantized = QUANTIZE(np.full((2, 3), x, np.float32), dtype)
    assert np.isfinite(np.asarray(quantized.array, np.float32)).all()
    assert float(quantized.step) == 2.0**-126
    value = np.asarray(quantized.array, np.float64) * float(quantized.step)
    np.testing.assert_allclose(value, x, atol=2.0**-126)


def product_of(
    x, w, dimensions=(((1,), (0,)), ((), ())), gradients=("bfloat16", "bfloat16"), dtype="bfloat16"
):
    (equation,) = jax.make_jaxpr(lambda x, w: lax.dot_general(x, w, dimensions))(x, w).eqns
    quantized = [quantize(operand, FORWARD) for operand in (x, w)]
    return float8_product(equation, (x, w), quantized, jnp.dtype(dtype), list(map(jnp.dtype, gradients)))


PRODUCT = jax.jit(product_of)
WIDE = jax.jit(lambda x, w: product_of(x, w, dtype="float32"))
PULLBACK = jax.jit(lambda x, w, cotangent: jax.vjp(product_of, x, w)[1](cotangent))


@pytest.mark.parametrize(("bad", "which"), [(np.inf, 0), (-np.inf, 1), (np.nan, 0)])
def test_an_inf_or_a_nan_reaches_the_result(bad, which):
    operands = [normal(0, 16, 32), normal(1, 32, 16)]
    operands[which] = operands[which].at[3, 4].set(bad)
    assert not np.isfinite(np.asarray(PRODUCT(*operands), np.float32)).all()
    cotangent = jnp.full((16, 16), 1.0, jnp.bfloat16).at[2, 1].set(bad)
    x, w = normal(0, 16, 32), normal(1, 32, 16)
    for gradient in PULLBACK(x, w, cotangent):
        assert not np.isfinite(gradient).all()


SIZES = [(1e-36, 1e3), (1e-30, 1.0), (1e-20, 1e-12), (1e20, 1e15), (1e38, 1e-3), (1e38, 1e-37)]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_ends_of_the_range_of_float32(sizes):
    x, w = (size * (jnp.abs(normal(seed, 32, 32)) / 4) for seed, size in enumerate(sizes))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    result = np.asarray(WIDE(x, w), np.float64)
    np.testing.assert_allclose(result, expected, rtol=0.05)


DIMENSIONS = {
    "matrices": ((48, 32), (32, 16), ((1,), (0,))),
    "a batch of sequences": ((2, 24, 32), (32, 16), ((2,), (0,))),
    "heads": ((2, 24, 32), (32, 4, 16), ((2,), (0,))),
    "heads merged": ((2, 24, 4, 16), (4, 16, 32), ((2, 3), (0, 1))),
    "a transposed weight": ((48, 32), (16, 32), ((1,), (1,))),
    "sums crossed": ((16, 32, 48), (48, 16, 32), ((0, 2), (1, 0))),
    "the weight first": ((16, 32), (48, 32), ((1,), (1,))),
}


@pytest.mark.cases(fast=1, slow=2)
@pytest.mark.parametrize("case", DIMENSIONS)
def test_values_and_gradients_are_those_of_numpy(case):
    left, right, sums = DIMENSIONS[case]
    x, w = normal(0, *left), normal(1, *right)
    run = lambda x, w: product_of(x, w, (sums, ((), ())), ("float32", "float32"), "float32")
    result = jax.jit(run)(x, w)
    (x8, x_step), (w8, w_step) = emulated(x, FORWARD), emulated(w, FORWARD)
    expected = np.tensordot(x8, w8, sums)
    np.testing.assert_allclose(result, expected * x_step * w_step, rtol=1e-5, atol=1e-5)

    cotangent = normal(2, *result.shape)

    def pullback(fun):
        return jax.jit(lambda x, w, cotangent: jax.vjp(fun, x, w)[1](cotangent))

    dx, dw = pullback(run)(x, w, cotangent)
    g8, g_step = emulated(cotangent.astype(jnp.bfloat16), BACKWARD)
    product = lambda x, w: lax.dot_general(x, w, (sums, ((), ())))
    gradients = pullback(product)(jnp.float32(x8), jnp.float32(w8), jnp.float32(g8))
    np.testing.assert_allclose(dx, gradients[0] * g_step * w_step, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, gradients[1] * g_step * x_step, rtol=1e-5, atol=1e-4)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_cotangent_that_is_summed_over_its_first_axes_goes_second(dtype):
    """cuBLAS then writes the gradient of a weight as the weight is, and XLA transposes nothing."""
    g, x = normal(0, 2, 24, 16), normal(1, 2, 24, 4, 32)
    dimensions = (((0, 1), (0, 1)), ((), ()))
    (equation,) = jax.make_jaxpr(lambda g, x: lax.dot_general(g, x, dimensions))(g, x).eqns
    quantized = QUANTIZE(g, dtype), QUANTIZE(x, FORWARD)
    run = lambda *quantized: multiply(equation.params, *quantized, jnp.float32)
    (g8, g_step), (x8, x_step) = emulated(g, dtype), emulated(x, FORWARD)
    expected = np.tensordot(g8, x8, ((0, 1), (0, 1))) * g_step * x_step
    np.testing.assert_allclose(jax.jit(run)(*quantized), expected, rtol=1e-5, atol=1e-5)
    (dot,) = (e for e in jax.make_jaxpr(run)(*quantized).eqns if e.primitive.name == "dot_general")
    sizes = [var.aval.shape[0] for var in dot.invars]
    assert sizes == ([4, 16] if dtype == BACKWARD else [16, 4])


def test_the_sums_of_the_gradients_ask_for_float32_and_those_of_the_product_do_not():
    x, w = normal(0, 16, 32), normal(1, 32, 16)
    text = str(
        jax.make_jaxpr(lambda x, w: jax.vjp(product_of, x, w)[1](jnp.ones((16, 16), jnp.bfloat16)))(x, w)
    )
    assert text.count("precision=HIGHEST") == 2


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", ["everything_saveable", "dots_saveable", "nothing_saveable"])
def test_what_a_rematerialization_keeps_is_finite(policy):
    """JAX rounds each kept value by `reduce_precision`. In e4m3 this operation makes NaN of 384."""
    x, w = normal(0, 16, 32).at[0, 0].set(5.9), normal(1, 32, 16)  # 5.9 / 2**-6 is 378.
    loss = lambda x, w: jnp.sum(jnp.tanh(product_of(x, w)).astype(jnp.float32))
    kept = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    assert np.abs(np.asarray(quantize(x, FORWARD).array, np.float32)).max() > 240
    for gradient, expected in zip(
        jax.jit(jax.grad(kept, (0, 1)))(x, w), jax.jit(jax.grad(loss, (0, 1)))(x, w)
    ):
        np.testing.assert_allclose(gradient, expected, rtol=0.02, atol=0.02)
