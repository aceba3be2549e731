"""The reference: a program with all its half values in float32, or rounded where flags are on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from jmp_lite._jaxpr.read import equations, with_equations
from jmp_lite._jaxpr.scopes import flagged
from jmp_lite.diagnostics._values.reference import Reference, is_narrow
from jmp_lite.diagnostics._values.trace import EVERY_CAST
from tests.jaxpr.test_read import CALLS
from tests.support.arrays import normal

W = jnp.asarray(np.eye(8) + normal(0, 8, 8, scale=0.1), jnp.float32)
X = normal(1, 4, 8)
FLAGS = frozenset({0})
# XLA wants a point in the name of a composite.
FUNCTIONS = CALLS | {"composite": lax.composite(lambda x, w: x @ w, name="tests.product")}


def half(fun, dtype=jnp.float16):
    """A function with casts of its own around it."""

    def in_dtype(*args):
        return jax.tree.map(
            lambda y: y.astype(jnp.float32) if jnp.issubdtype(y.dtype, jnp.floating) else y,
            fun(*(x.astype(dtype) for x in args)),
        )

    return in_dtype


def run(jaxpr, args, is_on=None):
    """Runs a jaxpr with all its equations under one flag; without flags if `is_on` is None."""
    if is_on is None:
        return Reference({}).run(jaxpr, args)
    jaxpr = with_equations(jaxpr, [flagged(equation, FLAGS) for equation in equations(jaxpr)])
    compiled = jax.jit(lambda is_on: Reference({FLAGS: is_on}).run(jaxpr, args), compiler_options=EVERY_CAST)
    return compiled(is_on)


def dtypes_in(jaxpr):
    for equation in equations(jaxpr):
        yield from (var for var in equation.outvars)
        for part in jaxprs_in_params(equation.params):
            yield from dtypes_in(part)


def assert_equal(results, expected, **tolerance):
    for result, value in zip(results, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(result, np.float64), np.asarray(value, np.float64), **tolerance)


@pytest.mark.cases(fast=2, slow=9)
@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"custom_linear_solve", "inlined"}))
def test_every_call_runs_in_float32_or_as_the_program_has_it(name):
    fun = FUNCTIONS[name]
    jaxpr = jax.make_jaxpr(half(fun))(X, W)
    assert any(map(is_narrow, dtypes_in(jaxpr)))
    wide = jax.make_jaxpr(lambda *args: run(jaxpr, args))(X, W)
    assert not any(map(is_narrow, dtypes_in(wide)))
    assert_equal(run(jaxpr, (X, W)), fun(X, W), rtol=1e-5, atol=1e-6)
    assert_equal(run(jaxpr, (X, W), False), fun(X, W), rtol=1e-5, atol=1e-6)
    expected = jax.jit(half(fun), compiler_options=EVERY_CAST)(X, W)
    assert_equal(run(jaxpr, (X, W), True), expected, rtol=1e-3, atol=1e-3)


def test_a_linear_solve_runs_its_solver():
    def product(x, w):
        return lax.custom_linear_solve(lambda v: w @ v, x[0], lambda _, b: jnp.sin(b), symmetric=True)

    jaxpr = jax.make_jaxpr(half(product))(X, W)
    assert_equal(run(jaxpr, (X, W)), jnp.sin(X[0]), rtol=1e-6)


@pytest.mark.cases(fast=2, slow=9)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.tanh(x) * 0.1 + x / 3,
        lambda x: x.at[jnp.array([0, 0, 1])].add(x[:3] * 3),
        lambda x: lax.reduce(x, jnp.float16(0), lax.add, (0,)),
        lambda x: lax.reduce_window(x, jnp.float16(-jnp.inf), lax.max, (2, 2), (1, 1), "VALID"),
        lambda x: jnp.sort(jnp.cumsum(x, axis=0), axis=0) + lax.iota(jnp.float16, 8),
        lambda x: jnp.where(x > 0, x, jnp.exp(x)).astype(jnp.bfloat16),
        lambda x: jnp.concatenate(jnp.split(x * 3, 2, axis=1)[::-1], 1) @ x.T,
        lambda x: lax.conv(x[None, None], x[None, None, :2], (1, 1), "SAME"),
        lambda x: lax.reduce_precision(x.astype(jnp.float32), 5, 10),
        lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32),
    ],
    ids=["sums", "scatter", "reduce", "window", "sort", "casts", "split", "conv", "rounding", "product"],
)  # fmt: skip
def test_operations_run_in_float32_or_in_half(fun):
    closed = jax.make_jaxpr(half(fun))(X)
    wide = run(closed, (X,))[0]
    assert wide.dtype == jnp.float32
    on, native = run(closed, (X,), True)[0], jax.jit(half(fun), compiler_options=EVERY_CAST)(X)
    np.testing.assert_allclose(on, native, rtol=2e-3, atol=2e-3)
    assert float(jnp.max(jnp.abs(wide - native))) < 0.1
    assert not np.array_equal(wide, native)


def test_the_result_of_a_product_is_rounded_before_the_next_product_takes_it():
    x = jnp.array([[2048.0, 1.0], [2048.0, 0.0]])
    difference = lambda x: jnp.array([[1, -1]], x.dtype) @ (x @ jnp.ones((2, 1), x.dtype))
    closed = jax.make_jaxpr(half(difference))(x)
    assert run(closed, (x,), False)[0] == 1
    assert run(closed, (x,), True)[0] == 0  # 2049 is 2048 in float16.


def test_products_have_the_highest_precision_but_for_one_that_the_program_gives_to_float32():
    def fun(w, x):
        h = x.astype(jnp.float16) @ w.astype(jnp.float16)  # Its float32 operands would be TF32 on a GPU.
        return jnp.dot(jnp.dot(h.astype(jnp.float32), w), w, precision="high")

    jaxpr = jax.make_jaxpr(fun)(W, X)
    ran = jax.make_jaxpr(lambda *arrays: Reference({}).run(jaxpr, arrays))(W, X)
    precisions = [each.params["precision"] for each in equations(ran) if each.primitive.name == "dot_general"]
    assert precisions == [(lax.Precision.HIGHEST,) * 2] * 2 + [(lax.Precision.HIGH,) * 2]


def test_values_of_the_bits_stay():
    def bits(x):
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16) + jnp.uint16(1), jnp.float16)

    closed = jax.make_jaxpr(half(bits))(X)
    np.testing.assert_array_equal(run(closed, (X,))[0], half(bits)(X))


def test_an_overflow_and_a_subnormal_number_are_those_of_float16():
    x = jnp.array([65519.0, 65520.0, 1e-7, 2.0**-25, -1e6])
    closed = jax.make_jaxpr(lambda x: x.astype(jnp.float16).astype(jnp.float32))(x)
    np.testing.assert_array_equal(run(closed, (x,), True)[0], [65504.0, np.inf, 2.0**-23, 0.0, -np.inf])
    np.testing.assert_array_equal(run(closed, (x,), False)[0], x)
    np.testing.assert_array_equal(run(closed, (x,))[0], x)
