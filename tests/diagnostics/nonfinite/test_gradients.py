"""The gradients of a step that are all zero."""

import jax
import jax.numpy as jnp

from jmp_lite.diagnostics._findings import zero_gradients
from jmp_lite.diagnostics._values.tap import Probe
from jmp_lite.diagnostics._values.trace import LossCall, Tapped, trace

W = jnp.ones(4, jnp.float16)


def test_the_operation_that_makes_all_gradients_zero_is_found():
    def step(w, factor):
        loss = lambda w: jnp.sum((w * factor * factor).astype(jnp.float32))
        return w - jax.grad(loss)(w)

    program = lambda factor: trace(LossCall(step, 0, False, None), (W, jnp.float16(factor)), {})
    run = lambda factor: Tapped(program(factor), Probe())(1.0)
    is_zero, site = zero_gradients(run(1e-4))  # 1e-8 is 0 in float16.
    assert (is_zero, site.operation, site.direction) == (True, "mul", "backward")
    assert zero_gradients(run(1)) == (False, None)
