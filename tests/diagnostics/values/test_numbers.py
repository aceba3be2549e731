"""The numbers that half precision rounds away are found in the source, and no others are taken for them."""

import jax
import jax.numpy as jnp
import pytest

from jmp_lite.diagnostics._values.numbers import lost_numbers

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

F16 = jnp.float16
X = jnp.ones((2, 3), F16)


def found(fun):
    return sorted(lost_numbers(jax.make_jaxpr(fun)(X)).values())


def softmax_of_a_masked_row(x):
    mask = jnp.where(x > 0, -1e9, 0.0)
    return jax.nn.softmax(x + mask.astype(F16))


def power_of_a_base(x):
    base = F16(5e5)
    return base**x


@pytest.mark.parametrize(
    ("fun", "numbers"),
    [
        (lambda x: x + 1e-8, [1e-8]),
        (lambda x: x / (x + 1e-9) * 3, [1e-9]),
        (lambda x: x - 1e-12, [1e-12]),
        (lambda x: x * 70000.0, [70000.0]),
        (lambda x: x + 1_000_000.0, [1e6]),
        (lambda x: x * 0.999, [0.999]),
        (power_of_a_base, [5e5]),
    ],
)
def test_a_number_that_is_rounded_is_found(fun, numbers):
    assert found(fun) == pytest.approx(numbers)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.where(x > 1e-9, x, 0.0),
        lambda x: jnp.maximum(x, 0.0) * 0.5,
        lambda x: x * 2 + 0.25,
        softmax_of_a_masked_row,
        lambda x: jnp.log(x * 2).astype(jnp.float32) * 1e-12,  # A factor of float32 values.
        lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)),
        lambda x: jnp.zeros_like(x) * (x > 1e-9),  # Zeros, on a line that has an epsilon as well.
    ],
)
def test_other_numbers_are_left(fun):
    assert found(fun) == []


def test_a_number_beside_the_expression_is_not_taken_for_one_in_it():
    epsilon = float("1e-10")
    fun = lambda x: jnp.log(x + epsilon).astype(jnp.float32) * 1e-12
    # Compared on another line, whose numbers are not searched.
    assert found(fun) == [1e-8]


def test_a_number_that_is_not_on_the_line_is_taken_for_a_small_one_where_it_is_added():
    epsilon = float("1e-10")
    assert found(lambda x: x + epsilon) == [1e-8]
    assert found(lambda x: x * epsilon) == []
