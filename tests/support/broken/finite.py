"""Losses that are finite and wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .run import Run, broken

FINITE: list[Run] = []
wrong = functools.partial(broken, FINITE, finite=True)

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
W = np.linspace(-0.5, 0.5, 16, dtype=np.float32).reshape(4, 4)
ONES = np.ones(4, np.float32)
HALF = jnp.float16


@wrong(300 * ONES, "integer_pow mul square", "use float32 instead of float16 on line")
def an_overflow_that_ends_in_zero(w):
    h = w.astype(HALF)
    h = h * lax.rsqrt(jnp.mean(h * h))  # here
    return jnp.sum(h.astype(jnp.float32))


@wrong(
    (300 * ONES, np.ones(3, np.float32)),
    "mul integer_pow square",
    "use float32 instead of float16 on line",
)
def an_overflow_that_ends_in_zero_in_a_scan_with_remat(w, xs):
    @jax.checkpoint
    def body(carry, x):
        h = (w * x).astype(HALF)
        h = h * lax.rsqrt(jnp.mean(h * h))  # here
        return carry + jnp.sum(h.astype(jnp.float32)), None

    return lax.scan(body, 0.0, xs)[0]


@wrong(20 * ONES, "exp", "use float32 instead of float16 on line")
def a_gate_that_is_shut_by_an_overflow(w):
    h = w.astype(HALF)
    return jnp.sum((h / (1 + lax.stop_gradient(jnp.exp(h)))).astype(jnp.float32))  # here


@wrong(ONES, "reduce_sum")
def a_sum_of_ones_in_float16(w):
    h = jnp.tile(w, 2500).astype(HALF)
    total, _ = lax.scan(lambda total, x: (total + x, None), HALF(0), h)  # here
    return total.astype(jnp.float32) / 10000


@wrong(np.ones((20, 4), np.float32), "scatter-add")
def the_gradient_of_equal_embedding_rows(table):
    rows = jnp.take(table.astype(HALF), jnp.zeros(20000, int), axis=0)  # here
    return jnp.mean(rows.astype(jnp.float32)) * 100


@wrong((W, X), "", "become zero in float16")
def gradients_that_become_zero(w, x):
    return jnp.mean(jnp.sin(x @ w)) * 1e-9
