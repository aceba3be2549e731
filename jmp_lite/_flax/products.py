"""Products of half precision operands whose weight gradients are float32.

On many devices, each device first sums the gradients of its own part of the batch, inside a product. Then the
devices sum their results. A product of half precision operands normally gives half precision, so the second
sum is half precision too, and it moves half the bytes. With `reduce_dtype="float32"` the second sum is
float32. The product for the weight gradient still takes half precision operands on Tensor Cores, and its
result is not rounded.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The axes of the left and of the right operand: those that are contracted, those of the batch.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def wide_gradients(layer: Any, compute_dtype: np.dtype, reduce_dtype: np.dtype | None) -> dict[str, Any]:
    """Returns the attributes that give the weight of a Flax layer a gradient in `reduce_dtype`.

    With these attributes the layer casts its input and its weight to `reduce_dtype`, and the product casts
    them to `compute_dtype`. XLA removes the first cast. A layer that has a product of its own keeps it.
    """
    own = getattr(layer, "dot_general_cls", None) or layer.dot_general not in (None, lax.dot_general)
    if own or reduce_dtype is None or compute_dtype.itemsize >= reduce_dtype.itemsize:
        return {}
    dot_general = functools.partial(_dot_general, compute_dtype, reduce_dtype)
    return {"dtype": reduce_dtype, "dot_general": dot_general}


@dataclasses.dataclass(frozen=True, eq=False)
class _Product:
    """A product of an input and a weight, and the dtypes of its operands and of the weight gradient."""

    compute_dtype: np.dtype
    gradient_dtype: np.dtype
    dimension_numbers: DimensionNumbers
    options: Mapping[str, Any]

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x, weight, self.dimension_numbers, **self.options)

    def operands(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Casts both operands to the compute dtype."""
        return x.astype(self.compute_dtype), weight.astype(self.compute_dtype)


def _dot_general(
    compute_dtype: np.dtype,
    gradient_dtype: np.dtype,
    x: jax.Array,
    weight: jax.Array,
    dimension_numbers: DimensionNumbers,
    **options: Any,
) -> jax.Array:
    """Takes the place of `lax.dot_general` in a layer. `x` and `weight` have the gradient dtype.

    The product and both gradients are computed from operands of the compute dtype. The gradient of the weight
    has the gradient dtype. Like every `jax.custom_vjp` it has no forward-mode derivative.
    """
    product = _Product(compute_dtype, gradient_dtype, dimension_numbers, options)
    _, batch_axes = dimension_numbers
    if any(map(len, batch_axes)):  # A layer that has a weight for each member of the batch.
        return product(*product.operands(x, weight))
    return _wide_product(x, weight, product)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _wide_product(x: jax.Array, weight: jax.Array, product: _Product) -> jax.Array:
    return product(*product.operands(x, weight))


def _forward(
    x: jax.Array, weight: jax.Array, product: _Product
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    operands = product.operands(x, weight)
    return product(*operands), operands


def _backward(
    product: _Product, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    (x_gradient,) = jax.linear_transpose(lambda x: product(x, weight), x)(cotangent)
    weight_gradient = _weight_gradient(product, x, weight, cotangent)
    return _sum_as(x, x_gradient).astype(product.gradient_dtype), _sum_as(weight, weight_gradient)


_wide_product.defvjp(_forward, _backward)


def _weight_gradient(product: _Product, x: jax.Array, weight: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Returns the gradient of `weight`, in the gradient dtype.

    It is the product of `x` and `cotangent` over all axes of `x` that `product` does not contract. Its axes
    are the contracted axes, in the order of `x`, and then the other axes of the weight.
    """
    (x_contracted, weight_contracted), _ = product.dimension_numbers
    x_axes, weight_axes = tuple(x_contracted), tuple(weight_contracted)
    summed = tuple(axis for axis in range(x.ndim) if axis not in x_axes)
    others = [axis for axis in range(weight.ndim) if axis not in weight_axes]
    order = [weight_axes[x_axes.index(axis)] for axis in sorted(x_axes)] + others
    gradient = lax.dot_general(
        x,
        cotangent,
        ((summed, tuple(range(len(summed)))), ((), ())),
        precision=product.options.get("precision"),
        preferred_element_type=product.gradient_dtype,
        out_sharding=_reordered_sharding(weight, order),
    )
    return gradient.transpose(np.argsort(order))


def _reordered_sharding(weight: jax.Array, order: list[int]) -> NamedSharding | None:
    """Returns the sharding of `weight` with its axes in another order; None without an explicit mesh."""
    sharding = jax.typeof(weight).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = (*sharding.spec, *(None,) * (weight.ndim - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in order)))


def _sum_as(primal: jax.Array, gradient: jax.Array) -> jax.Array:
    """Sums a gradient over the axes of a `shard_map` along which it varies and its primal does not."""
    varying = lambda array: jax.typeof(array).manual_axis_type.varying
    axes = varying(gradient) - varying(primal)
    return lax.psum(gradient, tuple(axes)) if axes else gradient
