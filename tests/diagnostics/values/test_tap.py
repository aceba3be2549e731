"""The tap, which measures the values of a program."""

import jax
import jax.numpy as jnp

from jmp_lite.diagnostics._values.tap import Probe
from jmp_lite.diagnostics._values.trace import LossCall, Tapped, trace
from tests.support.jaxprs import equations


def test_xla_does_not_compute_what_is_measured_of_constants():
    """It would run the reductions of large constants while it compiles, and take minutes for it."""
    loss = lambda w: jnp.sum(w * jnp.arange(8.0) * 3)
    program = trace(LossCall(loss, 0, False, jax.value_and_grad), (jnp.ones(8),), {})
    tapped = Tapped(program, Probe())
    closed = jax.make_jaxpr(tapped._measure)(program.arrays)
    found = list(equations(closed))
    barriers = [equation for equation in found if equation.primitive.name == "optimization_barrier"]
    assert len(barriers) == len(tapped._tap.sites) > 4
    (constant,) = (equation for equation in found if equation.primitive.name == "iota")
    assert set(constant.outvars) <= {var for barrier in barriers for var in barrier.invars}
