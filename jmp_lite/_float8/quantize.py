"""A tensor in fp8, with one scale.

The scale, `step` in the code, is a power of two, from the largest magnitude of the tensor itself ("current
scaling"), so nothing is kept from one train step to the next. The operations are written such that XLA makes
few kernels of them on a GPU.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import INLINE, Array

# Activations and weights are in e4m3, which has three bits of mantissa. Cotangents are in e5m2, which has the
# exponents of float16. The dtypes and their uses are those of Micikevicius et al., FP8 formats for deep
# learning (2022), https://arxiv.org/abs/2209.05433.
FORWARD = np.dtype(jnp.float8_e4m3fn)
BACKWARD = np.dtype(jnp.float8_e5m2)


@dataclasses.dataclass(frozen=True)
class Quantized:
    # The tensor, divided by its step, as uint8. `jax.checkpoint` rounds the floating values that it keeps by
    # a `reduce_precision` (https://github.com/jax-ml/jax/pull/22244), which makes NaN of the numbers above
    # 240 in e4m3.
    bits: Array
    step: Array  # A float32 scalar, a power of two.
    dtype: np.dtype  # The fp8 dtype.

    @property
    def array(self) -> Array:
        """The tensor, divided by its step."""
        return lax.bitcast_convert_type(self.bits, self.dtype)


jax.tree_util.register_dataclass(Quantized, ["bits", "step"], ["dtype"])


@functools.partial(jax.jit, static_argnums=1, inline=INLINE)
def quantize(x: Array, dtype: np.dtype) -> Quantized:
    """Returns `x`, of float32 or bfloat16, in an fp8 dtype.

    The largest magnitude lies between 0.375 and 0.86 times the largest number of the dtype. If `x` holds
    an inf or a NaN, so does every product of the result. The result has no gradient. Its step carries a
    tangent, so that `_first_order` notices if `x` is differentiated.
    """
    # JAX has derivatives of casts to fp8, which round the cotangents to fp8: the product has its own instead.
    fixed = lax.stop_gradient(x)
    return _divided(fixed, step_of(fixed, dtype), x, dtype)


def quantize_result(fun: Callable[[Any], Array], arrays: Any, x: Array, dtype: np.dtype) -> Quantized:
    """Returns `x`, the result of `fun(arrays)`, in an fp8 dtype."""
    # XLA does not merge the reduction for the step with the cast that needs the step
    # (https://github.com/openxla/xla/issues/7432), so it would write `x` between them. Here it computes the
    # activation function, and the bias in front of it, once for each, and writes neither result. For a GELU
    # this moves 36 % fewer bytes. Without the barrier, XLA would compute it once, and write it in float32.
    fixed = jax.tree.map(lax.stop_gradient, arrays)
    step, fixed = lax.optimization_barrier((step_of(fun(fixed), dtype), fixed))
    return _divided(fun(fixed), step, x, dtype)


def _divided(fixed: Array, step: Array, x: Array, dtype: np.dtype) -> Quantized:
    array = lax.convert_element_type(lax.convert_element_type(fixed, jnp.float32) / step, dtype)
    return Quantized(lax.bitcast_convert_type(array, jnp.uint8), _differentiated(step, x), dtype)


@jax.custom_jvp
def _differentiated(step: Array, x: Array) -> Array:
    """Returns `step`. If `x` has a tangent, so has the result: zeros, but not symbolic zeros."""
    del x
    return step


@_differentiated.defjvp
def _differentiated_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    # Marked once more, for a derivative of the derivative.
    return _differentiated(*primals), jnp.sum(tangents[1], dtype=jnp.float32) * 0.0


def step_of(x: Array, dtype: np.dtype) -> Array:
    """Returns the step of a tensor in an fp8 dtype: a power of two, as a float32 scalar."""
    # 448 = 1.75 * 2**8 in e4m3, 57344 = 1.75 * 2**15 in e5m2. The rounding moves the maximum by at most a
    # half of the power of two, so `x / step` is at most 1.5 * 2**8, and 1.5 * 2**15.
    exponent = math.frexp(float(jnp.finfo(dtype).max))[1] - 1
    # XLA makes only unary operations the epilogue of a reduction (https://github.com/openxla/xla/pull/4528).
    # So the scaling and the smallest step are applied before it; after it, each would cost a kernel. The
    # smallest step cannot be the start of a `lax.reduce`, which does not compile on a mesh of explicit axes.
    sizes = lax.abs(x) * np.asarray(2.0**-exponent, x.dtype)
    sizes = lax.max(sizes, np.asarray(_SMALLEST_STEP, x.dtype))
    largest = lax.reduce_max(sizes, tuple(range(sizes.ndim)))
    # A mantissa of no bits: a power of two, by which the division is exact.
    return lax.reduce_precision(lax.convert_element_type(largest, jnp.float32), 8, 0)


# The smallest normal number of float32. XLA may treat a smaller number as zero:
# https://github.com/jax-ml/jax/issues/26658.
_SMALLEST_STEP = 2.0**-126
