"""A hint follows the values that an operation took, and where they come from."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_lite.diagnostics import find_nonfinite

W, ZEROS = jnp.ones(4), jnp.zeros((2, 4))


def hint_of(loss, *args):
    return find_nonfinite(loss)(*args).hint


@pytest.mark.slow
def test_zeros_over_zeros_may_be_a_mean_or_a_norm():
    def normalized(w, x):
        v = x * w
        return jnp.sum(v / lax.stop_gradient(jnp.sqrt(jnp.sum(v**2, -1, keepdims=True))))

    for loss in (normalized, lambda w, x: jnp.sum(w * x) / jnp.sum(x)):
        assert hint_of(loss, W, ZEROS).startswith("This is 0 / 0, such as a mean over no elements")
    assert hint_of(lambda w, x: jnp.sum(w / x), W, ZEROS) == ""  # The report shows that it divides by 0.


@pytest.mark.parametrize("loss", [lambda w: jnp.sum(0 * (w * 1e38 * 1e38)), lambda w: jnp.sum(jnp.arccos(w))])
def test_what_has_no_known_reason_gets_no_hint(loss):
    assert hint_of(jax.jit(loss), W) == ""
