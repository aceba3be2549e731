"""Steps that do not use the loss scale of their optimizer, and gradients that are zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jmp_lite as jmp
from jmp_lite.diagnostics import doctor

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

PARAMS = {"w": jax.random.normal(jax.random.key(0), (8, 4)), "up": jnp.eye(4)}
X = jnp.linspace(-1, 1, 32).reshape(4, 8)
TX = jmp.with_loss_scale(optax.adam(1e-3), jmp.DynamicLossScale(period=1))
LINE = "loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, ...)"


def loss(params, x, factor=1.0):
    return factor * jnp.mean((x @ params["w"] @ params["up"]) ** 2)


def plain(fun, opt_state):
    del opt_state
    return jax.value_and_grad(fun)


def scaled(fun, opt_state):
    return jmp.value_and_grad(fun, jmp.get_loss_scale(opt_state))


def step_of(value_and_grad, factor=1.0, dtype="float16", tx=TX):
    fun = jmp.autocast(functools.partial(loss, factor=factor), dtype)

    def step(params, opt_state, x):
        loss, grads = value_and_grad(fun, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def faults(step, *args):
    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(*args)
    return [finding for finding in diagnosis.findings if finding.severity != "speed"]


def test_a_forgotten_value_and_grad_is_found_before_the_first_step():
    (finding,) = faults(step_of(plain), PARAMS, TX.init(PARAMS), X)
    assert finding.what == "The step takes a loss scale, and does not scale the loss by it."
    assert LINE in finding.advice
    # Gradients that are all zero: the advice is the line that is missing, not the wrapper that is there.
    (finding,) = faults(step_of(plain, 2.0**-30), PARAMS, TX.init(PARAMS), X)
    assert finding.what == "The gradients are all zero."
    assert finding.advice == f"Scale the loss: {LINE}."
    (finding,) = faults(step_of(scaled, 0.0), PARAMS, TX.init(PARAMS), X)
    assert "the loss is scaled, so it may not depend on the parameters" in finding.advice


def test_a_loss_scale_is_known_by_its_type_whatever_its_argument_is_called():
    def step(params, own, x):
        grads = jax.grad(jmp.autocast(loss, "float16"))(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, own.unscale(grads)), own

    for scale in (jmp.StaticLossScale(2.0**10), jmp.DynamicLossScale()):
        (finding,) = faults(step, PARAMS, scale, X)
        assert finding.what == "The step takes a loss scale, and does not scale the loss by it."


def microbatches(params, opt_state, x):
    """The gradients of two halves of the batch, summed in a scan."""
    value_and_grad = scaled(jmp.autocast(loss, "float16"), opt_state)

    def one(total, x):
        loss, grads = value_and_grad(params, x)
        return jax.tree.map(jnp.add, total, grads), loss

    grads, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x.reshape(2, 2, 8))
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, losses.mean()


def shards(params, opt_state, x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    fun = jax.shard_map(
        lambda params, x: jax.lax.pmean(loss(params, x), "data"),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    return step_of(lambda _, opt_state: scaled(jmp.autocast(fun, "float16"), opt_state))(params, opt_state, x)


def checkpointed(params, opt_state, x):
    return step_of(lambda fun, opt_state: scaled(jax.checkpoint(fun), opt_state))(params, opt_state, x)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    "step",
    [microbatches, shards, checkpointed, step_of(scaled), jax.jit(step_of(scaled))],
    ids=["scan", "shard_map", "checkpoint", "plain", "jit"],
)
def test_a_step_that_scales_its_loss_has_no_finding(step):
    assert faults(step, PARAMS, TX.init(PARAMS), X) == []


def by_hand(scale):
    def step(params, x):
        grads = jax.grad(lambda params: scale * jmp.autocast(loss, "float16")(params, x))(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g / scale, params, grads)

    return step, (PARAMS, X)


def of_state(start):
    tx = jmp.with_loss_scale(optax.adam(1e-3), jmp.DynamicLossScale(start))
    return step_of(scaled, 1.0, tx=tx), (PARAMS, tx.init(PARAMS), X)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("step_of_scale", "scale", "is_hinted"),
    [
        (by_hand, 2.0**24, True),
        (by_hand, 2.0**8, False),
        (of_state, 2.0**24, True),
        (of_state, 2.0**8, False),
    ],
)
def test_an_overflow_of_scaled_gradients_may_be_that_of_the_scale(step_of_scale, scale, is_hinted):
    """A dynamic scale halves itself after such a step, and trains on."""
    step, args = step_of_scale(scale)
    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(*args)
    assert bool(diagnosis.nonfinite.cause) == (scale > 2.0**8)
    said = " ".join(str(diagnosis).split())
    assert ("A dynamic scale then skips the step and halves itself." in said) == is_hinted


def test_a_step_without_float16_needs_no_scaled_loss():
    assert faults(step_of(plain, dtype="bfloat16"), PARAMS, TX.init(PARAMS), X) == []


def trained(step, steps):
    params, opt_state = PARAMS, TX.init(PARAMS)
    for _ in range(steps):
        params, opt_state, _ = jax.jit(step)(params, opt_state, X)
    return params, opt_state


def test_the_state_of_a_run_is_read_as_raise_if_stuck_does():
    step = step_of(plain, dtype="bfloat16")
    (finding,) = faults(step, *trained(step, 60), X)  # The scale has grown to 2**75.
    assert "The loss scale has grown to" in finding.what
    params, opt_state = PARAMS, TX.init(PARAMS)
    for _ in range(50):
        _, opt_state = TX.update(jax.tree.map(lambda x: x * jnp.nan, params), opt_state, params)
    (finding,) = faults(step_of(scaled), params, opt_state, X)
    assert finding.what.startswith("The last 50 steps were skipped: inf or NaN in the gradients of all 2")
    assert "find_nonfinite" in finding.advice


def test_a_transform_outside_of_the_loss_scale_that_hides_an_overflow_is_a_finding():
    tx = optax.apply_if_finite(TX, 5)
    step = step_of(lambda fun, opt_state: scaled(fun, opt_state.inner_state), tx=tx)
    (finding,) = faults(step, PARAMS, tx.init(PARAMS), X)
    assert finding.what.startswith("A transform outside of with_loss_scale hides an overflow from it")
    assert "jmp.with_loss_scale(optax.apply_if_finite(tx, ...))" in finding.advice
