"""A softmax is known by its operations and by the axes that they name, not by sizes that agree."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite._jaxpr.read import equations, open_jaxpr
from jmp_lite._jaxpr.softmax import softmax_input


def divided(numbers, sums):
    """exp(numbers) by the sums of its rows, which `sums` may move."""
    exponentials = jnp.exp(numbers)
    return exponentials / sums(exponentials.sum(-1))


in_rows = lambda sums: sums[..., None]
SOFTMAXES = {
    "jax.nn": (lambda x, c: jax.nn.softmax(x), True),
    "without a shift": (lambda x, c: divided(x, in_rows), True),
    "shifted by an argument": (lambda x, c: divided(x - c[..., :1], in_rows), True),
    "shifted by its largest number, which was broadcast": (
        lambda x, c: divided(x - lax.stop_gradient(jnp.broadcast_to(x.max(-1)[..., None], x.shape)), in_rows),
        True,
    ),
    "another number for each key": (lambda x, c: divided(x - c, in_rows), False),
    "divided by the sums of other rows": (lambda x, c: divided(x, lambda s: in_rows(s.swapaxes(0, 1))), None),
    "divided by a sum for each key": (lambda x, c: divided(x, lambda s: s[:, None]), None),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_the_input_of_a_softmax(name):
    """True: the argument; False: what the exponential reads; None: no softmax."""
    function, expected = SOFTMAXES[name]
    closed = jax.make_jaxpr(function)(jnp.ones((4, 4, 4)), jnp.ones((4, 4, 4)))
    made_by = {out: each for each in equations(closed) for out in each.outvars}
    found = softmax_input(equations(closed)[-1], made_by)
    if expected is None:
        assert found is None
    else:
        assert (found is open_jaxpr(closed).invars[0]) == expected
