"""Training steps and transforms under `autocast`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import products
from tests.support.small_programs import PARAMS, X, eps, mlp, normal


@pytest.mark.slow
@each_half
def test_an_optimizer_inside_autocast_keeps_float32_accuracy(half):
    optimizer = optax.adamw(1e-3)
    x = normal(32, 8)

    def step(params, state):
        grads = jax.grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    state = optimizer.init(PARAMS)
    params, new_state, grads = jmp.autocast(step, half)(PARAMS, state)
    # Given the gradients that came out, all else must be what float32 gives, to the last bits.
    updates, expected_state = optimizer.update(grads, state, PARAMS)
    expected = optax.apply_updates(PARAMS, updates)
    for ours, theirs in zip(
        jax.tree.leaves((params, new_state)), jax.tree.leaves((expected, expected_state))
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=16 * eps("float32"), atol=1e-9)
    assert_close(grads, step(PARAMS, state)[2], half, factor=16)
    assert set(products(jmp.autocast(step, half), PARAMS, state)) == {(half, half)}


def test_an_exponential_moving_average_moves_by_less_than_half_can_see():
    average = lambda old, w, x: (old * 0.9999 + w * 0.0001, (x @ w).sum())
    old = jnp.ones((8, 8))
    moved, _ = jmp.autocast(average)(old, old + 0.01, X)
    np.testing.assert_allclose(moved, old + 1e-6, rtol=2 * eps("float32"))


def test_small_steps_on_weights_do_not_underflow_in_float16():
    # Every gradient is 2**-6, every step 2**-26, which float16 does not hold.
    def two_steps(w):
        for _ in range(2):
            w = w - 2.0**-20 * jax.grad(lambda w: (jnp.full((1, 8), 2.0**-6) @ w).sum())(w)
        return w

    w = jnp.zeros((8, 8))
    np.testing.assert_array_equal(jmp.autocast(two_steps, jnp.float16)(w), jnp.full((8, 8), -(2.0**-25)))

    def unscaled(w):
        return w - 2.0**-20 * jax.grad(lambda w: (jnp.full((1, 8), 2.0**-6) @ w).sum())(w)

    used_again = lambda w: (unscaled(w), unscaled(w) @ w)
    np.testing.assert_array_equal(jmp.autocast(used_again, jnp.float16)(w)[0], jnp.full((8, 8), -(2.0**-26)))
