"""What is in half before the call cannot be compared with float32, and the page says so."""

import jax
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


def corrected(decay, t):
    return 1 - jnp.asarray(decay, jnp.bfloat16) ** t.astype(jnp.bfloat16)


def test_a_number_that_the_line_of_its_conversion_does_not_say_is_taken_as_exact():
    """In bfloat16 0.998 is 0.996, and the jaxpr has this number alone."""
    loss = lambda w, x, t: jnp.mean(x @ w) / corrected(0.998, t)
    said = page(loss, W, X, jnp.float32(1))
    line = f"test_exact.py:{corrected.__code__.co_firstlineno + 1}:15"
    assert "Not examined: the rounding of the number on " in said
    assert f"{line}. In half before the trace" in said
    known = lambda w, x, t: jnp.mean(x @ w) / (1 - jnp.asarray(0.998, jnp.bfloat16) ** t.astype(jnp.bfloat16))
    assert "Not examined" not in page(known, W, X, jnp.float32(1))
    # The 0 of `relu` is none of the operands of this product.
    by_hand = lambda w, x: jnp.sum(jax.nn.relu(x.astype(jnp.float16)) @ w.astype(jnp.float16))
    assert "Not examined" not in page(by_hand, W, X)


@pytest.mark.parametrize("number", [0.998, 2.0])
def test_a_number_that_an_inner_function_takes_is_taken_as_exact_unless_it_is_whole(number):
    def loss(w, x):
        decay = jnp.bfloat16(number)

        @jax.jit
        def discounted(rewards):
            return jnp.sum(rewards * decay.astype(jnp.float32) ** jnp.arange(4))

        return jnp.mean(x @ w) * discounted(x[:, 0])

    said = page(loss, W, X)
    assert ("the rounding of the number on" in said) == (number == 0.998)
