"""A hint follows the values that an operation took: where they come from, and how they grew."""

import jax
import jax.numpy as jnp
from jax import lax

from jmp_lite.diagnostics import find_nonfinite

W, ZEROS = jnp.ones(4), jnp.zeros((2, 4))


def hint_of(loss, *args):
    return find_nonfinite(loss)(*args).hint


def test_a_row_of_zeros_over_its_norm_is_no_mean_over_no_elements():
    def normalized(w, x):
        v = x * w
        return jnp.sum(v / lax.stop_gradient(jnp.sqrt(jnp.sum(v**2, -1, keepdims=True))))

    def by_sums(w, x):
        v = x * w
        return jnp.sum(v / jnp.sum(jnp.abs(v), -1, keepdims=True))

    def mean(w, x):
        return jnp.sum(w * x) / jnp.sum(x)

    assert "a row of zeros over its norm" in hint_of(normalized, W, ZEROS)
    assert "a row of zeros over its norm" in hint_of(by_sums, W, ZEROS)
    assert "a mean over no elements" in hint_of(mean, W, ZEROS)


def test_an_integer_that_overflows_needs_no_small_number():
    def loss(w, count):
        pairs = count * count  # Beyond 2**31.
        return jnp.sum(w) * jnp.log(pairs.astype(jnp.float32))

    assert "dtype become negative" in hint_of(loss, W, jnp.int32(50_000))
    assert "Often a small number is added" in hint_of(lambda w: jnp.sum(jnp.log(w - 1)), W)
    quotient = lambda w, n: jnp.sum(w) * (n.astype(jnp.float32) / (n + 1).astype(jnp.float32))
    assert "A divisor is 0" in hint_of(quotient, W, jnp.int32(-1))


def test_steps_that_diverge_are_a_learning_rate():
    def train(w, x):
        slope = jax.grad(lambda w: jnp.sum((x * w) ** 2))
        return jnp.sum(lax.scan(lambda w, _: (w - 2.0 * slope(w), None), w, None, length=100)[0])

    assert "the learning rate may be too large" in hint_of(train, W, jnp.ones(4))

    def shrinking(w):
        return jnp.sum(lax.scan(lambda w, _: (w / 2, 1 / jnp.floor(w)), w, None, length=9)[1])

    assert "learning rate" not in hint_of(shrinking, 64 * W)
