"""Products of Flax layers with float32 weight gradients, for `reduce_dtype` of `with_policy`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .._jaxpr import product_with_wide_gradients

# The axes of the left and of the right operand: those that are contracted, those of the batch.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def wide_gradients(
    layer: Any, compute_dtype: np.dtype, reduce_dtype: np.dtype | None, adds_bias: bool
) -> dict[str, Any]:
    """Returns the attributes that give the weight of a Flax layer a gradient in `reduce_dtype`."""
    # Devices sum a gradient in the dtype of the product that makes it, and cast it afterwards
    # (https://github.com/jax-ml/jax/issues/27496). So the layer casts its input and weight to `reduce_dtype`,
    # which XLA removes, and the product casts them to `compute_dtype`. A layer with a product of its own
    # keeps it. A layer that adds a bias would add it in `reduce_dtype` too.
    own = getattr(layer, "dot_general_cls", None) or layer.dot_general not in (None, lax.dot_general)
    if own or adds_bias or reduce_dtype is None or compute_dtype.itemsize >= reduce_dtype.itemsize:
        return {}
    return {"dtype": reduce_dtype, "dot_general": functools.partial(_dot_general, compute_dtype)}


def _dot_general(
    compute_dtype: np.dtype,
    x: jax.Array,
    weight: jax.Array,
    dimension_numbers: DimensionNumbers,
    **options: Any,
) -> jax.Array:
    """Replaces `lax.dot_general` in a layer whose `x` and `weight` have the dtype of the weight gradient."""
    halves = x.astype(compute_dtype), weight.astype(compute_dtype)

    def product(x, weight):
        return lax.dot_general(x, weight, dimension_numbers, **options)

    _, batch_axes = dimension_numbers
    if any(map(len, batch_axes)):  # The layer has a weight for each member of the batch.
        return product(*halves)
    return product_with_wide_gradients(product, product, halves, (None, weight))
