"""Lookups of one element of each row have the gradients of JAX, without a scatter."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from tests.support.arrays import integers, normal
from tests.support.jaxprs import primitives

ROWS = normal(0, 4, 7, 271)
LABELS = integers(1, 271, 4, 7)
OUTSIDE = LABELS.at[0, :4].set(jnp.array([-1, -272, 271, 400]))


def of_row(mode):
    one = lambda row, label: row.at[label].get(mode=mode)
    return jax.vmap(jax.vmap(one))


LOOKUPS = {
    "the last axis": lambda rows, labels: jnp.take_along_axis(rows, labels[..., None], -1),
    "the last axis, clipped": lambda rows, labels: jnp.take_along_axis(
        rows, labels[..., None], -1, mode="clip"
    ),
    "the first axis": lambda rows, labels: jnp.take_along_axis(
        rows[..., :256].transpose(2, 0, 1), labels[None] % 256, 0
    ),
    "of a row, filled": of_row("fill"),
    "of a row, clipped": of_row("clip"),
}
ORDERS = {
    "grad(autocast)": lambda fun: jax.grad(jmp.autocast(fun, jnp.bfloat16)),
    "autocast(grad)": lambda fun: jmp.autocast(jax.grad(fun), jnp.bfloat16),
}


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("labels", [LABELS, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_gradient_of_a_lookup_is_that_of_jax_and_needs_no_scatter(name, labels, order):
    fun = lambda rows, labels: jnp.sum(jnp.square(LOOKUPS[name](rows, labels)))
    expected, ours = jax.grad(fun), ORDERS[order](fun)
    np.testing.assert_array_equal(ours(ROWS, labels), expected(ROWS, labels))
    assert "scatter-add" in primitives(expected, ROWS, labels)
    assert "scatter-add" not in primitives(ours, ROWS, labels)
    wrap = lambda grad: jax.jit(jax.vmap(grad, (0, None)))(jnp.stack([ROWS, 2 * ROWS]), labels)
    np.testing.assert_array_equal(wrap(ours), wrap(expected))


@pytest.mark.parametrize("order", ORDERS)
def test_a_lookup_in_rows_of_a_symbolic_length_is_exported(order):
    fun = lambda rows, labels: jnp.sum(jnp.square(LOOKUPS["the last axis"](rows, labels)))
    rows, labels = jax.export.symbolic_args_specs((ROWS, LABELS), ("_, _, n", "_, _"))
    exported = jax.export.export(jax.jit(ORDERS[order](fun)))(rows, labels)
    np.testing.assert_array_equal(exported.call(ROWS, LABELS), jax.grad(fun)(ROWS, LABELS))


@pytest.mark.slow
def test_a_lookup_has_the_second_derivatives_of_jax():
    fun = lambda rows, labels: jnp.sum(jnp.exp(LOOKUPS["the last axis"](rows, labels)))
    ours = jmp.autocast(fun, jnp.bfloat16)
    twice = lambda fun: jax.jvp(jax.grad(functools.partial(fun, labels=LABELS)), [ROWS], [2 * ROWS])[1]
    np.testing.assert_array_equal(twice(ours), twice(fun))


@pytest.mark.parametrize("order", ORDERS)
def test_lookups_of_several_elements_and_listed_ones_stay_as_they_are(order):
    several = lambda rows: jnp.sum(jnp.take_along_axis(rows, jnp.stack([LABELS, LABELS], -1), -1) ** 2)
    assert "scatter-add" in primitives(ORDERS[order](several), ROWS)
    one = lambda rows: jnp.sum(LOOKUPS["the last axis"](rows, LABELS) ** 2)
    few = lambda rows: jnp.sum(LOOKUPS["the last axis"](rows[..., :255], LABELS % 255) ** 2)
    assert "scatter-add" in primitives(ORDERS[order](few), ROWS)
    listed = jax.grad(jmp.autocast(one, deny=["gather"]))
    assert "scatter-add" in primitives(listed, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_loss_with_integer_labels_has_no_scatter(order):
    def loss(weight, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ weight, labels).mean()

    args = ROWS[0, :, :6].T @ ROWS[0] / 3, ROWS[:, :, :6], LABELS
    assert [*primitives(ORDERS[order](loss), *args)].count("dot_general") == 2
    scatters = lambda grad: [*primitives(grad, *args)].count("scatter-add")
    assert scatters(ORDERS[order](loss)) < scatters(jax.grad(loss))

    def error(grads):
        return jnp.linalg.norm(grads - jax.grad(loss)(*args)) / jnp.linalg.norm(jax.grad(loss)(*args))

    assert error(ORDERS[order](loss)(*args)) < 0.02
