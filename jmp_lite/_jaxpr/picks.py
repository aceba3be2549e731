"""Lookups of one element of each row, such as the logit of a label, whose gradients need no scatter.

JAX's gradient of such a lookup is a scatter into float32 zeros of the size of the logits. XLA writes the
zeros, adds to them, and reads them again: in a GPT-2, 5 to 8 % of all bytes. A comparison of the indices
gives the same numbers, and XLA computes it where they are read.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .bind import bind
from .read import Array, Equation


def picked_axis(equation: Equation) -> int | None:
    """Returns the axis along which a gather takes one element of each row, or a scatter adds to one.

    Returns:
        None if the equation is neither, or takes several elements of a row.
    """
    numbers = equation.params["dimension_numbers"]
    if equation.primitive is lax.gather_p:
        (operand, _), (row,), axes = equation.invars, equation.outvars, numbers.start_index_map
        batch = numbers.start_indices_batching_dims
    else:
        (operand, _, row), axes = equation.invars, numbers.scatter_dims_to_operand_dims
        batch = numbers.scatter_indices_batching_dims
    others = [axis for axis in range(operand.aval.ndim) if axis not in axes]
    is_by_rows = [*numbers.operand_batching_dims] == others and [*batch] == sorted(batch)
    rows = math.prod(operand.aval.shape[axis] for axis in others)
    return int(axes[0]) if is_by_rows and len(axes) == 1 and math.prod(row.aval.shape) == rows else None


def bind_pick(equation: Equation, operands: Sequence[Array], axis: int) -> list[Array]:
    """Runs an equation of which `picked_axis` returns `axis` on other operands."""
    if equation.primitive is lax.gather_p:
        return [_pick(equation, axis, *operands)]
    array, indices, updates = operands
    updates = updates.reshape(_row_shape(array, axis))
    return [array + jnp.where(_marks(equation, axis, array, indices), updates, 0)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _pick(equation: Equation, axis: int, array: Array, indices: Array) -> Array:
    del axis  # For the derivative.
    return bind(equation, [array, indices])[0]


@_pick.defjvp
def _pick_jvp(equation: Equation, axis: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    result = bind(equation, primals)[0]
    picked = jnp.where(_marks(equation, axis, *primals), tangents[0], 0)
    return result, jnp.sum(picked, axis).reshape(result.shape)


def _marks(equation: Equation, axis: int, array: Array, indices: Array) -> Array:
    """Returns which elements of `array` the indices mean. As in the gradient of JAX, others mean none."""
    if equation.params["mode"] is lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, array.shape[axis] - 1)
    places = lax.broadcasted_iota(indices.dtype, array.shape, axis)
    return places == indices.reshape(_row_shape(array, axis))


def _row_shape(array: Array, axis: int) -> tuple[int, ...]:
    return (*array.shape[:axis], 1, *array.shape[axis + 1 :])
