"""What a step loses: updates that its arguments do not show, and gradients that are all zero."""

import jax
import jax.numpy as jnp

from jmp_lite.diagnostics._findings import of_step
from jmp_lite.diagnostics._ranges.updates import run_step, updates_of, zero_gradients
from jmp_lite.diagnostics._values.trace import LossCall, trace

W = jnp.ones(4, jnp.float16)


def program_of(fun, *args):
    return trace(LossCall(fun, 0, False, None), args, {})


def run(fun, *args):
    program = program_of(fun, *args)
    return run_step(program), program


def test_an_update_below_half_a_digit_is_lost():
    step = lambda w, g: jnp.where(jnp.isfinite(g).all(), w - g, w)
    (update,) = updates_of(*run(step, W, jnp.array([1e-4, 1e-4, 0.5, 0.0], jnp.float16)))
    assert (update.argument, update.dtype, update.updates, update.lost) == ("w", jnp.float16, 3, 2)


def test_a_product_with_an_argument_is_no_update():
    assert updates_of(*run(lambda w, g: w * g, W, W)) == []


def test_lost_updates_are_a_finding_from_more_than_one_in_a_hundred():
    w = jnp.ones(100, jnp.float16)
    update = lambda lost: jnp.full(100, 0.5, jnp.float16).at[:lost].set(1e-4)
    step = lambda lost: program_of(lambda w, g: w - g, w, update(lost))
    find = lambda lost: [each.what for each in of_step(step(lost), ())]
    assert find(1) == []
    assert find(2) == ["The update is lost in float16 for 2% of the elements of w that have one."]


def test_the_operation_that_makes_all_gradients_zero_is_found():
    def step(w, factor):
        loss = lambda w: jnp.sum((w * factor * factor).astype(jnp.float32))
        return w - jax.grad(loss)(w)

    is_zero, site = zero_gradients(run(step, W, jnp.float16(1e-4))[0])  # 1e-8 is 0 in float16.
    assert (is_zero, site.operation, site.direction) == (True, "mul", "backward")
    assert zero_gradients(run(step, W, jnp.float16(1))[0]) == (False, None)
