"""Gradients that are sums: over a batch, over the uses of a weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.halves import each_half
from tests.support.jaxprs import products
from tests.support.small_programs import PARAMS, B, V, W, X

MANY = 40_960


def both_orders(loss, half):
    """The gradient of a loss in both orders."""
    return {"inside": jax.grad(jmp.autocast(loss, half)), "outside": jmp.autocast(jax.grad(loss), half)}


# Each is linear in its argument, whose gradient is a count that half precision cannot reach by adding ones.
COUNTS = {
    "bias": ((4,), lambda b, one, eye: (one @ eye + b).sum()),
    "bias broadcast": ((4,), lambda b, one, eye: (one @ eye + jnp.broadcast_to(b, (MANY, 4))).sum()),
    "half value broadcast": ((1, 4), lambda b, one, eye: (one @ eye + b @ eye).sum()),
    "half value tiled": ((1, 4), lambda b, one, eye: (jnp.tile(b @ eye, (MANY, 1)) + one @ eye).sum()),
    "gain": ((4,), lambda b, one, eye: (one @ eye * b).sum()),
    "embedding row": ((3, 4), lambda b, one, eye: (b[jnp.zeros(MANY, int)] @ eye).sum() / 1.0),
    "embedding added": ((3, 4), lambda b, one, eye: (one @ eye + b[jnp.zeros(MANY, int)]).sum()),
    "half rows gathered": ((3, 4), lambda b, one, eye: ((b @ eye)[jnp.zeros(MANY, int)] * 1.0).sum()),
    "selected": (
        (4,),
        lambda b, one, eye: jnp.where(jnp.ones((MANY, 1), bool), one @ eye * 0 + b, 0.0).sum(),
    ),
    "maximum": ((4,), lambda b, one, eye: jnp.maximum(one @ eye * 0 - 5, b).sum()),
    "bias in jit": ((4,), lambda b, one, eye: jax.jit(lambda b: one @ eye + b)(b).sum()),
    "bias in remat": ((4,), lambda b, one, eye: jax.checkpoint(lambda b: one @ eye + b)(b).sum()),
    "bias in half layers": ((4,), lambda b, one, eye: (jax.nn.relu((one @ eye + b) * 1.0) @ eye).sum()),
}


@pytest.mark.cases(fast=4, slow=2)
@pytest.mark.parametrize(("half", "order"), [("bfloat16", "inside"), ("float16", "outside")])
@pytest.mark.parametrize("name", COUNTS)
def test_the_gradient_over_a_batch_is_summed_in_float32(name, order, half):
    shape, fun = COUNTS[name]
    one, eye = jnp.ones((MANY, 4)), jnp.eye(4)
    loss = lambda b: fun(b, one, eye)
    grads = both_orders(loss, half)[order](jnp.ones(shape))  # XLA may sum a whole program in float32.
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(jnp.ravel(grads)[:4], np.full(4, MANY, np.float32))


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize(("half", "order"), [("bfloat16", "inside"), ("float16", "outside")])
@pytest.mark.parametrize("steps", ["scan", "unrolled", "slices", "jitted", "fori"])
def test_a_weight_used_many_times_has_its_gradients_summed_in_float32(steps, order, half):
    # Every use adds 255 to the gradient: half holds that number, but no odd one beyond 2048.
    count = 1025 if steps in ("scan", "slices", "fori") else 17
    x = jnp.full((2, 4), 127.5)

    def step(w):
        return jnp.tanh(0.0 * (x @ w)).sum() + (x @ w).sum()

    def loss(w):
        if steps == "unrolled":
            return sum(step(w) for _ in range(count))
        if steps == "jitted":
            jitted = jax.jit(step)
            return sum(jitted(w) for _ in range(count))
        if steps == "slices":
            return lax.scan(lambda _, x: (None, (x @ w).sum()), None, jnp.tile(x, (count, 1, 1)))[1].sum()
        if steps == "fori":
            return lax.fori_loop(0, count, lambda _, total: total + step(w), 0.0)
        return lax.scan(lambda total, _: (total + step(w), None), 0.0, length=count)[0]

    grads = both_orders(loss, half)[order](jnp.eye(4))
    np.testing.assert_array_equal(grads, np.full((4, 4), 255.0 * count))
    found = products(both_orders(loss, half)[order], jnp.eye(4))
    assert set(found) == {(half, half)}


@each_half
def test_parameters_gradients_come_back_in_the_parameters_dtype(half):
    params = {"w": W, "v": V.astype(half), "b": PARAMS["b"].astype("float16"), "s": jnp.float32(2)}
    loss = lambda p, x: jnp.sum(jnp.tanh((x @ p["w"] + p["b"]) @ p["v"] * p["s"]))
    for grad in (jax.grad(jmp.autocast(loss, half)), jmp.autocast(jax.grad(loss), half)):
        grads = grad(params, X)
        assert {k: g.dtype for k, g in grads.items()} == {k: p.dtype for k, p in params.items()}


@each_half
@pytest.mark.parametrize("start", ["argument", "moved", "computed", "carried"])
def test_a_residual_stream_without_norms_stays_float32(start, half):
    """Only products and sums read it, so nothing but its own begin tells that it is float32."""
    layers = jnp.stack([W, W * 0.5, W * 0.25])

    def stream(x):
        for w in layers:
            x = x + (jnp.tanh(x @ w) @ w + B)
        return x @ W

    programs = {
        "argument": lambda x: stream(x),
        "moved": lambda x: stream(x.T.reshape(4, 8)),
        "computed": lambda x: stream(jnp.exp(x)),
        "carried": lambda x: lax.scan(lambda c, _: (stream(c), None), x, length=1)[0],
    }
    report = jmp.explain(programs[start], half)(X)
    sums = [operation for operation in report.operations if operation.name == "add"]
    assert len(sums) == 6
    assert not any(operation.in_half for operation in sums)
    # A stream that begins with a product is half, as with casts by hand.
    from_product = jmp.explain(lambda x: stream(x @ W), half)(X)
    assert all(o.in_half for o in from_product.operations if o.name == "add")
