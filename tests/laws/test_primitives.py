"""Each element-wise operation of the table, on small and large numbers, in both orders, beside float32.

A derivative that leaves the range of half where the operation does not would be lost without an inf, so that
no loss scale would help.
"""

import functools

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


def operands(magnitude):
    numbers = magnitude * (1 + 0.5 * np.random.default_rng(0).uniform(size=(2, 4, 8)))
    return jnp.asarray(numbers, jnp.float32)


def loss_of(name):
    eye, weights_of = jnp.eye(8), lambda out: jnp.linspace(0.5, 1.5, out.shape[-1])[:, None]

    def loss(x, y, weights):
        # Both operands are results of matmuls, and so half; a matmul reads the result.
        out = PROGRAMS[name](x @ eye, y @ eye)
        return jnp.sum((out @ weights_of(out)) * weights)

    return loss


def gradient(fun):
    return jax.grad(fun, (0, 1))


@functools.cache
def exact_gradients(magnitude, half):
    """The gradients of the operations in float32 whose results and gradients are numbers of usual sizes."""
    x, y = operands(magnitude)
    rounded = x.astype(half).astype(jnp.float32), y.astype(half).astype(jnp.float32)
    # One program of all operations compiles in a fraction of the time of one for each.
    results = jax.jit(lambda x, y: {name: fun(x, y) for name, fun in PROGRAMS.items()})(x, y)
    run = jax.jit(lambda x, y: {name: gradient(loss_of(name))(x, y, 1.0) for name in PROGRAMS})
    exact = jax.tree.map(lambda g: np.asarray(g, np.float64), run(*rounded))
    usual = lambda name: 1e-4 < np.abs(np.asarray(results[name], np.float64)).max() < 3e4
    return {name: each for name, each in exact.items() if usual(name) and scale_of(each) is not None}


def scale_of(exact):
    """The scale that a loss scale would find: with it the cotangents are in the range of float16."""
    largest = max(np.abs(g).max() for g in exact)
    if not 1e-8 < largest < 1e8:
        return None
    scale = 2.0 ** np.clip(-np.round(np.log2(largest)), -14, 12)
    return scale if 1e-3 < scale * largest < 1e3 else None


def errors(magnitude, order, half):
    """The largest error of a gradient of each operation, by its own largest number."""
    exact, autocast = exact_gradients(magnitude, half), functools.partial(jmp.autocast, dtype=half)
    scales = {name: jnp.float32(scale_of(each)) for name, each in exact.items()}
    of_half = lambda loss: gradient(autocast(loss)) if order == ORDERS[0] else autocast(gradient(loss))
    run = jax.jit(lambda x, y, scales: {name: of_half(loss_of(name))(x, y, scales[name]) for name in scales})
    found = run(*operands(magnitude), scales)
    largest = {name: max(np.abs(g).max() for g in exact[name]) for name in exact}
    error = lambda name, a, b: np.abs(a - b).max() / max(np.abs(b).max(), 1e-3 * largest[name])
    return {
        name: max(
            error(name, np.asarray(a, np.float64) / float(scales[name]), b)
            for a, b in zip(found[name], exact[name], strict=True)
        )
        for name in exact
    }


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_gradient_is_that_of_float32(magnitude, half, order):
    found = errors(magnitude, order, half)
    assert len(found) > 10
    assert not {name: error for name, error in found.items() if not error < TOLERANCE[half]}
