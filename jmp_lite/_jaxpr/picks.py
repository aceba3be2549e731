"""Lookups of one element of each row, such as the logit of a label, whose gradients need no scatter."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .bind import bind
from .read import Array, Equation

_FEWEST = 256  # Of fewer elements, such as the 81 classes of SSD, a scatter moves fewer bytes.


def picked_axis(equation: Equation) -> int | None:
    """Returns the axis along which a gather takes one element of each row, or a scatter adds to one."""
    # A gather and a scatter say the same of the axes by other names. The batching axes are those of
    # `jnp.take_along_axis`, in which each row has an index of its own.
    numbers, operand = equation.params["dimension_numbers"], equation.invars[0].aval
    if equation.primitive is lax.gather_p:
        row, axes, batch = equation.outvars[0], numbers.start_index_map, numbers.start_indices_batching_dims
    else:
        row, axes = equation.invars[2], numbers.scatter_dims_to_operand_dims
        batch = numbers.scatter_indices_batching_dims
    others = [axis for axis in range(operand.ndim) if axis not in axes]
    is_by_rows = [*numbers.operand_batching_dims] == others and [*batch] == sorted(batch)
    is_one = math.prod(row.aval.shape) == math.prod(operand.shape[axis] for axis in others)
    if len(axes) != 1 or not (is_by_rows and is_one):
        return None
    size = operand.shape[axes[0]]
    # In `jax.export` a size may be symbolic, and has no order:
    # https://docs.jax.dev/en/latest/export/shape_poly.html.
    return int(axes[0]) if isinstance(size, int) and size >= _FEWEST else None


def bind_pick(equation: Equation, operands: Sequence[Array]) -> list[Array]:
    """Runs an equation that has a `picked_axis` on other operands."""
    if equation.primitive is lax.gather_p:
        return [_pick(equation, *operands)]
    # A `scatter-add`: of an index out of bounds nothing is added.
    array, indices, updates = operands
    marks, axis = _marks(equation, array, indices)
    return [array + jnp.where(marks, _in_rows(updates, array, axis), 0)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pick(equation: Equation, *operands: Array) -> Array:
    return bind(equation, operands)[0]


@_pick.defjvp
def _pick_jvp(equation: Equation, primals: Any, tangents: Any) -> tuple[Array, Array]:
    # JAX's gradient of such a lookup is a scatter into float32 zeros of the size of the logits
    # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/slicing.py#L2182). The transpose of this
    # selection has the same bits, and XLA computes it where they are read.
    result, (marks, axis) = bind(equation, primals)[0], _marks(equation, *primals)
    picked = lax.select(marks, tangents[0], lax.full_like(tangents[0], 0))
    return result, lax.reduce_sum(picked, (axis,)).reshape(result.shape)


def _marks(equation: Equation, array: Array, indices: Array) -> tuple[Array, Any]:
    """Returns which elements of `array` the indices mean, and the axis. Others mean none, as in JAX."""
    axis: Any = picked_axis(equation)
    if equation.params["mode"] is lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, array.shape[axis] - 1)
    places = lax.broadcasted_iota(indices.dtype, array.shape, axis)
    return places == _in_rows(indices, array, axis), axis


def _in_rows(x: Array, array: Array, axis: int) -> Array:
    return x.reshape(*array.shape[:axis], 1, *array.shape[axis + 1 :])
