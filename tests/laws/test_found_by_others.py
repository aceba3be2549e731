"""The smallest program of each fault that tests of other packages have found (`benchmarks.ported.suite`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jmp_lite as jmp
from tests.laws.cases import ORDERS
from tests.laws.test_found import in_order
from tests.support.arrays import normal

each_order = pytest.mark.parametrize("order", ORDERS)


@jax.custom_vjp
def stash(ref, x):
    """The identity, which writes its gradient to a mutable array."""
    return x


def _write(ref, cotangent):
    ref[...] = cotangent
    return None, cotangent


stash.defvjp(lambda ref, x: (x, ref), _write)


@each_order
def test_a_custom_rule_keeps_a_mutable_array(order):
    """JAX's test_custom_vjp_grad_stats_plumbing: a traced rule cannot return the reference."""
    x, w = normal(0, 4, 8), normal(1, 8, 8)

    def gradients(transform):
        ref = jax.new_ref(jnp.zeros((4, 8)))
        return transform(lambda x: jnp.sum(stash(ref, x @ w) @ w))(x), ref[...]

    exact = gradients(jax.grad)
    found = gradients(lambda fun: in_order(order, fun, "bfloat16"))
    for got, wanted in zip(found, exact):
        np.testing.assert_allclose(got, wanted, rtol=0.02, atol=0.02 * float(jnp.abs(wanted).max()))


@pytest.mark.cases(slow=1)
@each_order
def test_a_solver_under_strict_promotion(order):
    """JAX's and Equinox's suites forbid implicit promotion; a half right side has a float32 solution."""
    x, w = normal(0, 4), normal(1, 4, 4)

    def loss(x):
        return jnp.sum(
            lax.custom_linear_solve(lambda y: 2.0 * y, w @ x, lambda _, b: b / 2.0, symmetric=True)
        )

    with jax.numpy_dtype_promotion("strict"):
        found = in_order(order, loss, "bfloat16")(x)
    np.testing.assert_allclose(found, w.sum(0) / 2, rtol=0.03, atol=0.03)


@each_order
def test_a_variable_that_is_no_array(order):
    """Flax's TestHijaxVariables: such a type of `jax.experimental.hijax` has neither a shape nor a dtype."""
    weight, x = nnx.Variable(normal(0, 8, 8), hijax=True), normal(1, 4, 8)

    def loss(x):
        return jnp.sum(weight[...] @ x.T)

    found = in_order(order, loss, "bfloat16")(x)
    np.testing.assert_allclose(found, jax.grad(loss)(x), rtol=0.02, atol=0.02)


def test_a_variable_that_is_no_array_made_inside():
    x = normal(0, 8, 8)
    found = jmp.autocast(lambda x: nnx.Variable(x, hijax=True)[...] @ x)(x)
    np.testing.assert_allclose(found, x @ x, rtol=0.02, atol=0.1)


@pytest.mark.slow
def test_the_log_sum_of_one_vector():
    """optax's Fenchel-Young loss under `vmap`: the sum of a softmax's exponentials is a scalar."""
    loss = jnp.vectorize(lambda x, y: jax.nn.logsumexp(x) - jnp.vdot(x, y), signature="(n),(n)->()")
    x, y = normal(0, 3, 6), normal(1, 3, 6)
    np.testing.assert_allclose(jax.vmap(jmp.autocast(loss))(x, y), loss(x, y), rtol=0.02, atol=0.05)
