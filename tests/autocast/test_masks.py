"""Masks of attention under `autocast`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import products
from tests.support.small_programs import normal

MASKS = {
    "-inf selected": lambda s, keep: jnp.where(keep, s, -jnp.inf),
    "-1e9 selected": lambda s, keep: jnp.where(keep, s, -1e9),
    "least selected": lambda s, keep: jnp.where(keep, s, jnp.finfo(s.dtype).min),
    "-inf added": lambda s, keep: s + jnp.where(keep, 0.0, -jnp.inf),
    "-1e9 added": lambda s, keep: s + jnp.where(keep, 0.0, -1e9),
    "-1e9 by arithmetic": lambda s, keep: s + (1.0 - keep.astype(jnp.float32)) * -1e9,
    "least added": lambda s, keep: s + jnp.where(keep, 0.0, jnp.finfo(jnp.float32).min),
    "scaled by a million": lambda s, keep: s - 1e6 * (1 - keep),
}


def attention(masked, q, k, v, keep):
    scores = jnp.einsum("qd,kd->qk", q, k) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(masked(scores, keep), axis=-1) @ v


@pytest.mark.cases(slow=1)
@each_half
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_attention_give_finite_values_and_gradients(mask, half):
    q, k, v = normal(6, 8), normal(6, 8), normal(6, 8)
    keep = jnp.tril(jnp.ones((6, 6), bool))
    fun = lambda q, k, v: attention(MASKS[mask], q, k, v, keep)

    def loss(f):
        return lambda *args: jnp.sum(jnp.sin(f(*args)))

    assert_close(jax.jit(jmp.autocast(fun, half))(q, k, v), jax.jit(fun)(q, k, v), half, factor=8)
    assert products(jmp.autocast(fun, half), q, k, v) == [(half, half)] * 2
    expected = jax.jit(jax.grad(loss(fun), (0, 1, 2)))(q, k, v)
    assert all(jnp.isfinite(grad).all() for grad in expected)
    for grad in (
        jax.grad(loss(jmp.autocast(fun, half)), (0, 1, 2)),
        jmp.autocast(jax.grad(loss(fun), (0, 1, 2)), half),
    ):
        assert_close(jax.jit(grad)(q, k, v), expected, half, factor=24)


@pytest.mark.cases(fast=1, slow=2)
@each_half
@pytest.mark.parametrize(
    ("fill", "jit"), [(-np.inf, jax.jit), (-1e9, lambda f: f), (np.finfo(np.float32).min, jax.jit)]
)
def test_a_mask_that_is_an_argument_works(jit, fill, half):
    q, k, v = normal(6, 8), normal(6, 8), normal(6, 8)
    bias = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), 0.0, jnp.float32(fill))

    def fun(q, k, v, bias):
        return attention(lambda s, bias: s + bias, q, k, v, bias)

    assert_close(jit(jmp.autocast(fun, half))(q, k, v, bias), fun(q, k, v, bias), half, factor=8)
    for shape in ((1, 6), (6,)):
        row = jnp.where(jnp.arange(6) < 4, 0.0, jnp.float32(fill)).reshape(shape)
        assert_close(jit(jmp.autocast(fun, half))(q, k, v, row), fun(q, k, v, row), half, factor=8)
    looked_up = lambda q, k, v, bias: fun(q, k, v, bias[jnp.arange(6)])
    assert_close(jit(jmp.autocast(looked_up, half))(q, k, v, bias), fun(q, k, v, bias), half, factor=8)
