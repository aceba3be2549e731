"""`half_sums`: residual sums whose results are half, so that a residual stream moves fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from tests.support.arrays import normal
from tests.support.jaxprs import product_kinds


def stream(params, x):
    for number, (inner, outer) in enumerate(params):
        with jax.named_scope(f"block_{number}"):
            mean = x.mean(-1, keepdims=True)
            normed = (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
            x = x + jax.nn.relu(normed @ inner) @ outer
    return jnp.mean(jnp.square(x))


PARAMS = [(normal(n, 16, 32, scale=1 / 4), normal(3 + n, 32, 16, scale=1 / 6)) for n in range(3)]
X = normal(6, 8, 16)


def sums(fun):
    """The dtype of each residual sum."""
    operations = jmp.explain(fun)(PARAMS, X).operations
    added = [o for o in operations if o.name == "add" and o.outputs[0].endswith("[8,16]")]
    return [o.outputs[0].partition("[")[0] for o in added]


@pytest.mark.parametrize(
    ("half_sums", "dtypes"),
    [
        ((), ["float32", "float32", "float32"]),
        ("**", ["bfloat16", "bfloat16", "bfloat16"]),
        ("block_1", ["float32", "bfloat16", "float32"]),
        (["block_0", "block_2"], ["bfloat16", "float32", "bfloat16"]),
    ],
)
def test_only_the_selected_sums_are_in_half(half_sums, dtypes):
    fun = jmp.autocast(stream, "bfloat16", half_sums=half_sums)
    assert sums(fun) == dtypes
    assert product_kinds(jax.grad(fun), PARAMS, X) == product_kinds(jax.grad(jmp.autocast(stream)), PARAMS, X)


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_both_orders_have_the_same_loss_and_gradients_near_float32(half):
    exact = jax.value_and_grad(stream)(PARAMS, X)
    fun = jmp.autocast(stream, half, half_sums="**")
    orders = (
        jax.value_and_grad(fun)(PARAMS, X),
        jmp.autocast(jax.value_and_grad(stream), half, half_sums="**")(PARAMS, X),
    )
    eps = float(jnp.finfo(half).eps)
    for order in orders:
        for value, expected in zip(jax.tree.leaves(order), jax.tree.leaves(exact)):
            assert value.dtype == jnp.float32
            assert np.linalg.norm(value - expected) < 32 * eps * np.linalg.norm(expected)
    assert float(orders[0][0]) == float(orders[1][0]) != float(jmp.autocast(stream, half)(PARAMS, X))


def test_a_pattern_that_selects_nothing_is_an_error():
    with pytest.raises(ValueError, match="half_sums='blok' selects no residual sum"):
        jmp.autocast(stream, half_sums="blok")(PARAMS, X)
    with pytest.raises(TypeError, match="half_sums= takes patterns over scopes"):
        jmp.autocast(stream, half_sums=3)
