"""The law of one rounding: a chain of element-wise operations between two matmuls is one function.

A case draws 1 to 12 operations: polynomial, rational and recursive ones, with learned coefficients, moves and
up to three inputs. The fast test reads the dtypes of the operations; the others compare the gradients, over
eight seeds, with casts around each matmul.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from tests.laws.by_product import by_product
from tests.laws.cases import ORDERS
from tests.laws.test_found import error, in_order
from tests.support.arrays import normal
from tests.support.jaxprs import equations
from tests.support.small_programs import HALVES

WIDTH = 32

# Each operation makes the next value of the value `v`, the one before it `u`, a learned vector `q`, and
# another input `z` of the chain.
OPERATIONS = {
    "scale": lambda v, u, q, z: v * q,
    "shift": lambda v, u, q, z: v + q,
    "sine": lambda v, u, q, z: jnp.sin(v),
    "bound": lambda v, u, q, z: jnp.tanh(v),
    "clip": lambda v, u, q, z: jnp.clip(v * 0.7 + 0.1, -1, 1),
    "horner": lambda v, u, q, z: (v * 0.3 + q) * v,
    "square": lambda v, u, q, z: 0.5 * v * v - q,
    "recursion": lambda v, u, q, z: 1.5 * v * u - 0.5 * v,
    "rational": lambda v, u, q, z: v / (1 + jnp.abs(q * v)),
    "moved": lambda v, u, q, z: jnp.concatenate([v[:, 1:] * q[1:], v[:, :1] - 0.3], axis=1),
    "halves": lambda v, u, q, z: jnp.where(v > 0, v * 0.8, v - q),
    "gate": lambda v, u, q, z: v * z + 0.1,
    "sum": lambda v, u, q, z: 0.6 * v + z,
}


@functools.cache
def chain(seed):
    """The drawn operations: a function of an input, a vector for each operation, and the other inputs."""
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.choice(list(OPERATIONS), 1 + seed % 12)]
    inputs = rng.integers(0, 2, len(names))

    def run(v, q, others):
        u = v
        for name, vector, index in zip(names, q, inputs):
            v, u = OPERATIONS[name](v, u, vector, others[index]), v
        return v

    return names, run


def loss_of(seed):
    names, run = chain(seed)

    def loss(p, x, y):
        for layer in p["layers"]:
            x = run(x @ layer["w"], layer["q"], [x @ each for each in layer["others"]])
        return jnp.mean(jnp.sin(x @ p["out"]) * y)

    def arguments(data):
        numbers = itertools.count(100 * data)
        make = lambda *shape, scale=1.0: normal(next(numbers), *shape, scale=scale)
        square = lambda: make(WIDTH, WIDTH, scale=0.4 * WIDTH**-0.5)  # Powers of small numbers stay finite.
        layer = lambda: {
            "w": square(),
            "q": 0.5 + make(len(names), WIDTH, scale=0.2),
            "others": [square(), square()],
        }
        p = {"layers": [layer(), layer()], "out": make(WIDTH, 4, scale=WIDTH**-0.5)}
        return p, make(128, WIDTH), make(128, 4)

    return loss, arguments


@pytest.mark.cases(fast=6, slow=6)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("seed", range(48))
def test_a_chain_that_would_round_more_than_twice_computes_in_float32(seed, half):
    """The result of a short chain may be rounded twice, in front of a `tanh` and behind it."""
    loss, arguments = loss_of(seed)
    jaxpr = jax.make_jaxpr(jmp.autocast(loss, half))(*arguments(0))
    arithmetic = ("add", "sub", "mul", "div", "sin", "tanh")
    in_half = [
        each.primitive.name
        for each in equations(jaxpr)
        if each.primitive.name in arithmetic and each.outvars[0].aval.dtype == half
    ]
    assert len(in_half) <= 2 * 2  # Two layers.


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("seed", range(48))
def test_a_chain_has_the_error_of_casts_around_each_matmul(seed, half):
    """At most 1.2 times in both orders, over eight seeds of the data."""
    loss, arguments = loss_of(seed)
    scale = 1024.0 if half == "float16" else 1.0
    scaled = lambda *args: scale * loss(*args)
    reference = jax.jit(jax.grad(scaled))
    exact = [reference(*arguments(data)) for data in range(8)]

    def logs(grad):
        run = jax.jit(grad)
        return np.log([error(run(*arguments(data)), each) for data, each in enumerate(exact)])

    with by_product(half):
        casts = logs(lambda *args: jax.grad(scaled)(*args))
    finite = np.isfinite(casts)  # Some chains of powers overflow in float16, by casts too.
    for order in ORDERS:
        ratios = logs(in_order(order, scaled, half))[finite] - casts[finite]
        assert ratios.mean() <= np.log(1.2), (order, chain(seed)[0])
