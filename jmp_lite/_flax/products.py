"""Products of half operands whose weight gradients leave them in float32.

On many devices each sums the gradients of its own part of the batch, within a product; then all sum theirs
with the others'. A product of half operands gives half, and so the second sum is one of half precision
numbers, of half the bytes. Here it is one in float32: the product for the weight's gradient still takes half
operands on Tensor Cores, and its result is not rounded.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._dtypes import DTypeLike, parse_dtype


def parse_reduce_dtype(reduce_dtype: DTypeLike | None) -> np.dtype | None:
    """Reads the dtype in which weight gradients are summed over devices: float32, or None.

    Raises:
        ValueError, TypeError: it is another dtype, or none.
    """
    dtype = None if reduce_dtype is None else parse_dtype(reduce_dtype)
    if dtype not in (None, jnp.float32):
        raise ValueError(
            f"reduce_dtype should be float32, or None for the dtype of the products, got {dtype.name}."
        )
    return dtype


def wide_gradients(layer: Any, compute_dtype: np.dtype, reduce_dtype: np.dtype | None) -> dict[str, Any]:
    """Returns the attributes with which a Flax layer of half products gives its weight a wide gradient.

    The layer then casts input and weight to `reduce_dtype`, of which nothing is left in the program, and the
    product casts them down. A layer with a product of its own keeps it.
    """
    own = getattr(layer, "dot_general_cls", None) or layer.dot_general not in (None, lax.dot_general)
    if own or reduce_dtype is None or compute_dtype.itemsize >= reduce_dtype.itemsize:
        return {}
    return {"dtype": reduce_dtype, "dot_general": _dot_general(compute_dtype, reduce_dtype)}


def _dot_general(compute_dtype: np.dtype, reduce_dtype: np.dtype) -> Callable[..., jax.Array]:
    """Returns a `lax.dot_general` for layers, to be called on an input and a weight of `reduce_dtype`.

    It computes in `compute_dtype`, also both gradients, of which the weight's comes out in `reduce_dtype`.
    Like all `jax.custom_vjp`s it has no forward-mode derivative.
    """

    def dot(x: jax.Array, weight: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
        (contracted, batch) = dimension_numbers
        narrow = lambda array: array.astype(compute_dtype)
        product = lambda x, weight: lax.dot_general(x, weight, dimension_numbers, **options)
        if any(map(len, batch)):  # Of layers with a weight for each member of a batch.
            return product(narrow(x), narrow(weight))

        x_dtype = x.dtype

        @jax.custom_vjp
        def run(x: jax.Array, weight: jax.Array) -> jax.Array:
            return product(narrow(x), narrow(weight))

        def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
            operands = narrow(x), narrow(weight)
            return product(*operands), operands

        def backward(operands: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
            half_x, half_weight = operands
            (of_x,) = jax.linear_transpose(lambda x: product(x, half_weight), half_x)(cotangent)
            precision = options.get("precision")
            of_weight = _weight_gradient(half_x, half_weight, cotangent, contracted, precision, reduce_dtype)
            return _like(half_x, of_x).astype(x_dtype), _like(half_weight, of_weight)

        run.defvjp(forward, backward)
        return run(x, weight)

    return dot


def _weight_gradient(
    x: jax.Array, weight: jax.Array, cotangent: jax.Array, contracted: Any, precision: Any, dtype: Any
) -> jax.Array:
    """The gradient of `weight` in a product with `x` that contracts the axes `contracted`."""
    of_x, of_weight = (tuple(axes) for axes in contracted)
    summed = tuple(axis for axis in range(x.ndim) if axis not in of_x)
    # First the contracted axes, in the order of x, then the others of the weight.
    others = [axis for axis in range(weight.ndim) if axis not in of_weight]
    order = [of_weight[of_x.index(axis)] for axis in sorted(of_x)] + others
    sharding = jax.typeof(weight).sharding
    out_sharding = None
    if AxisType.Explicit in sharding.mesh.axis_types:
        spec = (*sharding.spec, *(None,) * (weight.ndim - len(sharding.spec)))
        out_sharding = NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in order)))
    gradient = lax.dot_general(
        x,
        cotangent,
        ((summed, tuple(range(len(summed)))), ((), ())),
        precision=precision,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )
    return gradient.transpose(np.argsort(order))


def _like(primal: jax.Array, gradient: jax.Array) -> jax.Array:
    """Sums a gradient over the axes of a `shard_map` along which it varies and its variable does not."""
    varying = lambda array: jax.typeof(array).manual_axis_type.varying
    axes = varying(gradient) - varying(primal)
    return lax.psum(gradient, tuple(axes)) if axes else gradient
