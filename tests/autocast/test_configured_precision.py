"""`jax_default_matmul_precision`: it is no wish of the program, and what stays float32 runs under it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import jmp_lite as jmp
from tests.support.halves import each_half
from tests.support.jaxprs import PRODUCTS, equations, products
from tests.support.small_programs import HALVES, ORDERS, W, X, normal, with_jvp, with_vjp

FULL = ("float32", "float32")
HIGHEST = (lax.Precision.HIGHEST,) * 2
asked = functools.partial(jnp.matmul, precision="highest")


@contextlib.contextmanager
def globally(precision):
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", precision)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


SETTERS = [jax.default_matmul_precision, globally]


def in_order(loss, half, order):
    if order == "inside":
        return jax.value_and_grad(jmp.autocast(loss, half))
    return jmp.autocast(jax.value_and_grad(loss), half)


def precisions_of(fun, *args):
    """The operand dtype and the precision of every product that `fun` runs."""
    return [
        (equation.invars[0].aval.dtype.name, equation.params["precision"])
        for equation in equations(jax.make_jaxpr(fun)(*args))
        if equation.primitive.name in PRODUCTS
    ]


POINTS, TARGETS = normal(24, 2), normal(24)


def gaussian_process(log_scales):
    """The negative log likelihood of a Gaussian process."""
    scaled = POINTS / jnp.exp(log_scales)
    distances = jnp.sum((scaled[:, None] - scaled[None]) ** 2, axis=-1)
    factor = jnp.linalg.cholesky(jnp.exp(-0.5 * distances) + 1e-3 * jnp.eye(len(POINTS)))
    solved = jax.scipy.linalg.solve_triangular(factor, TARGETS, lower=True)
    return 0.5 * solved @ solved + jnp.sum(jnp.log(jnp.diag(factor)))


# Each pair of a setter, a dtype and an order.
TRIPLES = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("setter", "half", "order"), [(SETTERS[i], HALVES[j], ORDERS[k]) for i, j, k in TRIPLES]
)
def test_the_likelihood_of_a_gaussian_process_stays_exact(setter, half, order):
    scales = jnp.array([0.3, -0.2])
    expected = jax.jit(jax.value_and_grad(gaussian_process))(scales)
    with setter("highest"):
        run = in_order(gaussian_process, half, order)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(scales), expected)
        assert set(products(run, scales)) == {FULL}


@pytest.mark.parametrize("setter", SETTERS)
@each_half
def test_a_product_that_asks_for_the_configured_precision_stays_float32(half, setter):
    x, w = jnp.ones((1, 8)), jnp.full((8, 1), 1.000244140625)
    with setter("highest"):
        assert float(jmp.autocast(asked, half)(x, w)[0, 0]) == 8.001953125
        assert precisions_of(jmp.autocast(asked, half), X, W) == [("float32", HIGHEST)]
        plain = jmp.autocast(lambda x, w: x @ w, half)
        assert precisions_of(plain, X, W) == [(half, None)]
        convolved = lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME", precision="highest")
        assert precisions_of(jmp.autocast(convolved, half), X, W) == [("float32", HIGHEST)]


PROGRAMS = {
    "plain": lambda w: jnp.sin(X @ w).sum(),
    "jit": lambda w: jnp.sin(jax.jit(jnp.matmul)(X, w)).sum(),
    "checkpoint": lambda w: jax.checkpoint(lambda w: jnp.sin(X @ w) @ w)(w).sum(),
    "scan": lambda w: lax.scan(lambda x, _: (jnp.sin(x @ w), None), X, None, length=3)[0].sum(),
    "asked": lambda w: jnp.sin(asked(X, w) @ w).sum(),
    "custom_vjp": lambda w: jnp.sin(with_vjp(asked)(X, w) @ w).sum(),
    "custom_jvp": lambda w: jnp.sin(with_jvp(asked)(X @ w, w)).sum(),
}


@pytest.mark.cases(fast=len(PROGRAMS), slow=0)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("precision", ["highest", "tensorfloat32", "BF16_BF16_F32_X3"])
def test_products_that_stay_float32_run_under_the_option(precision, order, name):
    loss = PROGRAMS[name]
    with jax.default_matmul_precision(precision):
        plain = precisions_of(jax.value_and_grad(loss), W)
        for kept in (jmp.full_precision(loss), loss):
            rules = {} if kept is not loss else {"deny": ["dot_general"]}
            run = (
                jax.value_and_grad(jmp.autocast(kept, **rules))
                if order == "inside"
                else jmp.autocast(jax.value_and_grad(kept), **rules)
            )
            assert sorted(map(str, precisions_of(run, W))) == sorted(map(str, plain))


def test_an_autocast_inside_another_keeps_its_products_as_they_are():
    inner = jmp.autocast(lambda w: jnp.sum(jnp.matmul(X, w, precision="highest") @ w))
    both = jmp.autocast(lambda w: inner(w) + jnp.sum(jmp.full_precision(jnp.matmul)(X, w)))
    with jax.default_matmul_precision("highest"):
        assert precisions_of(both, W) == [("float32", HIGHEST), ("bfloat16", None), ("float32", HIGHEST)]


def test_a_kernel_of_pallas_gets_the_option():
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 8), jnp.float32), interpret=True)
    with jax.default_matmul_precision("highest"):
        assert precisions_of(call, X, W) == [("float32", HIGHEST)]
        assert precisions_of(jmp.autocast(call), X, W) == [("float32", HIGHEST)]
    assert precisions_of(jmp.autocast(call), X, W) == [("float32", None)]


def test_a_step_that_is_compiled_under_two_options_runs_under_each():
    step = jax.jit(jmp.autocast(lambda x, w: jmp.full_precision(jnp.matmul)(x, w) @ w))
    lowered = lambda: step.lower(X, W).as_text().count("HIGHEST")
    assert lowered() == 0
    with jax.default_matmul_precision("highest"):
        assert lowered() > 0
    assert lowered() == 0
