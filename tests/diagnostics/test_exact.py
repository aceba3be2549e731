"""What is in half before the call cannot be compared with float32, and the page says so."""

import jax.numpy as jnp
import pytest

from jmp_lite.diagnostics import doctor

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

W, X = jnp.eye(8), jnp.ones((4, 8))


def page(loss, *args):
    return " ".join(str(doctor(loss, device=None)(*args)).split())


def test_arguments_in_half_are_taken_as_exact():
    loss = lambda w, x, positions: jnp.mean(jnp.cos(positions.astype(jnp.float32))[:, None] * (x @ w))
    positions = jnp.arange(8000, 8004)
    said = page(loss, W, X, positions.astype(jnp.bfloat16))
    assert "Not examined: the rounding of positions. In half before the trace" in said
    assert "so each error above takes it as exact" in said
    assert "Not examined" not in page(loss, W, X, positions.astype(jnp.float32))


def test_constants_in_half_are_taken_as_exact():
    table = jnp.cos(jnp.arange(8000.0, 8008.0)).astype(jnp.bfloat16)
    loss = lambda w, x: jnp.mean(table.astype(jnp.float32) * (x @ w))
    assert "the rounding of constants" in page(loss, W, X)
