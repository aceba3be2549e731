"""The probe that measures the smallest and the largest element of each value."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jaxpr import Array
from .tap import Probe


class Extremes(Probe):
    """The probe: the smallest and the largest element of every floating value; NaN if there is one."""

    def measure(self, array: Array, dtype: Any = None) -> Array:
        """Returns the smallest and the largest element, shape `(2,)`, float32 or float64."""
        del dtype
        if jnp.iscomplexobj(array):
            array = jnp.stack([array.real, array.imag])
        if array.dtype.itemsize == 1:  # Not every fp8 format has inf and NaN; float32 has both.
            array = array.astype(jnp.float32)
        if not array.size:
            return self.empty(array.dtype)  # XLA has no minimum of an array without elements.
        # The bits are compared as integers, in the order NaN, -inf, ..., inf, NaN: XLA's CPU backend does not
        # promise that a minimum of floats keeps a NaN. The bits of negative numbers fall as the numbers
        # rise, so all of them but the sign are inverted.
        whole = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[array.dtype.itemsize]
        order = lambda bits: jnp.where(bits < 0, bits ^ jnp.iinfo(whole).max, bits)
        ordered = order(lax.bitcast_convert_type(array, whole))
        high, inverted_low = maxima(ordered, ~ordered)
        ends = order(jnp.stack([~inverted_low, high]))
        return lax.bitcast_convert_type(ends, array.dtype).astype(_wide(array.dtype))

    def empty(self, dtype: Any) -> Array:
        """Returns the record of no elements: inf and -inf."""
        return jnp.asarray([np.inf, -np.inf], _wide(dtype))

    def alarm(self, record: Any) -> Any:
        # The record of no elements is inf and -inf. NaN is not equal to itself.
        return (record != record).any(-1) | (record[..., 0] == -np.inf) | (record[..., 1] == np.inf)


def _wide(dtype: Any) -> Any:
    return jnp.float64 if dtype in (jnp.float64, jnp.complex128) else jnp.float32


def maxima(first: Array, second: Array) -> tuple[Array, Array]:
    """Returns the largest elements of two arrays of integers, which have the same shape and dtype."""
    # XLA's CPU backend runs this single reduction several times as fast as two.
    least = np.asarray(jnp.iinfo(first.dtype).min, first.dtype)
    join = lambda one, other: (jnp.maximum(one[0], other[0]), jnp.maximum(one[1], other[1]))
    # Over all axes of the array as it is: to flatten a sharded array, XLA would gather its shards.
    high, other_high = lax.reduce((first, second), (least, least), join, tuple(range(first.ndim)))
    return high, other_high
