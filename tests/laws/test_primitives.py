"""Each element-wise operation of the table, on small and large numbers, in both orders, beside float32.

A derivative that leaves the range of half where the operation does not would be lost without an inf, so that
no loss scale would help.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite._jaxpr.primitives import PRIMITIVES
from tests.laws.cases import ORDERS

UNARY = {
    name: getattr(lax, name)
    for name, traits in PRIMITIVES.items()
    if traits.pointwise and not (traits.broadcasts or traits.compares) and hasattr(lax, name)
} | {"square": lambda x: x * x, "reciprocal": lambda x: 1 / x, "integer_pow": lambda x: x**3}
BINARY = {
    name: getattr(lax, name)
    for name, traits in PRIMITIVES.items()
    if traits.pointwise and traits.broadcasts and not traits.compares
}
OTHERS = {
    "reduce_max": lambda x: x.max(-1, keepdims=True),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "cummax": lambda x: lax.cummax(x, 1),
    "top_k": lambda x: lax.top_k(x, 4)[0],
    "sort": lambda x: jnp.sort(x, -1),
    "concatenate": lambda x: jnp.concatenate([x, x], -1),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 1))),
    "where": lambda x: jnp.where(jnp.arange(8) > 2, x, 0.0),
    "norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1, keepdims=True),
}
for name in ("clamp", "select_n", "integer_pow", "one_minus_square", "polynomial"):
    UNARY.pop(name, None)
UNARY["clamp"] = lambda x: lax.clamp(-1.0, x, 2e4)
UNARY["integer_pow"] = lambda x: x**3
PROGRAMS = {name: lambda x, y, f=f: f(x) for name, f in (UNARY | OTHERS).items()} | BINARY
TOLERANCE = {"float16": 0.02, "bfloat16": 0.15}
MAGNITUDES = [1e-3, 1.0, 300.0, 3e4]


def test_every_pointwise_operation_is_run():
    pointwise = {name for name, each in PRIMITIVES.items() if each.pointwise and not each.compares}
    if jax.__version_info__ < (0, 11):
        pointwise.discard("log2")  # No primitive of its own: `jnp.log2` divides logarithms.
    # `where`, and operations of JAX 0.12 in other functions.
    assert pointwise <= {*PROGRAMS, "select_n", "one_minus_square", "polynomial"}


def errors(name, magnitude, order, half):
    """The largest error of a gradient, by its own largest number. None where float32 has no number either."""
    eye, weights_of = jnp.eye(8), lambda out: jnp.linspace(0.5, 1.5, out.shape[-1])[:, None]
    numbers = magnitude * (1 + 0.5 * np.random.default_rng(0).uniform(size=(2, 4, 8)))
    x, y = jnp.asarray(numbers, jnp.float32)

    def loss(x, y, weights):
        # Both operands are results of matmuls, and so half; a matmul reads the result.
        out = PROGRAMS[name](x @ eye, y @ eye)
        return jnp.sum((out @ weights_of(out)) * weights)

    gradient = lambda f: jax.grad(f, (0, 1))
    grad = gradient(jmp.autocast(loss, half)) if order == ORDERS[0] else jmp.autocast(gradient(loss), half)
    # The scale that a loss scale would find: the results and cotangents of this size are in range.
    out = np.abs(np.asarray(PROGRAMS[name](x, y), np.float64))
    rounded = x.astype(half).astype(jnp.float32), y.astype(half).astype(jnp.float32)
    exact = [np.asarray(g, np.float64) for g in jax.jit(gradient(loss))(*rounded, 1.0)]
    largest = max(np.abs(g).max() for g in exact)
    if not 1e-4 < out.max() < 3e4 or not 1e-8 < largest < 1e8:
        return None
    scale = 2.0 ** np.clip(-np.round(np.log2(largest)), -14, 12)  # Of the gradients, in the range of float16.
    if not 1e-3 < scale * largest < 1e3:
        return None
    found = [np.asarray(g, np.float64) / scale for g in jax.jit(grad)(x, y, jnp.float32(scale))]
    return max(
        np.abs(a - b).max() / max(np.abs(b).max(), 1e-3 * largest) for a, b in zip(found, exact, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_a_gradient_is_that_of_float32(magnitude, half, order):
    wrong = {
        name: error
        for name in PROGRAMS
        if (error := errors(name, magnitude, order, half)) is not None and not error < TOLERANCE[half]
    }
    assert not wrong
