"""Rounding float32 to a narrower dtype: to nearest, or up and down at random so that the mean is kept.

The results are float32 numbers that the narrower dtype holds. XLA may drop the casts `float32 -> float16 ->
float32` of a program (`xla_allow_excess_precision`, on by default), and drops them for a GPU. So the rounding
is written in integers and powers of two, which XLA leaves as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import DTypeLike, parse_dtype
from .._tree import has_dtype
from .bits import random_bits, rounding_key

_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_EXPONENT = np.uint32(0x7F800000)  # Of a float32: 8 bits above the 23 bits of the mantissa.


def stochastic_round(x: Any, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds to one of the two neighbours in `dtype`, at random, so that the mean of the result is `x`.

    With a share of t on the way from the lower neighbour to the upper one, `x` becomes the upper one with
    the probability t. So a sum of many small updates is right on average, where rounding to nearest loses
    every update below half a unit in the last place (Gupta et al., Deep Learning with Limited Numerical
    Precision, ICML 2015; Croci et al., Stochastic rounding, 2022).

    The probability is exact for bfloat16, and for other dtypes to 2**-24. A number that `dtype` holds stays
    as it is, also zero, subnormal numbers, inf and NaN. Beyond the largest finite number of `dtype` the
    result is that of rounding to nearest: 65519 becomes 65504 in float16, and 65520 becomes inf.

    Args:
        x: an array of a floating dtype, any shape. float64 is rounded to float32 first.
        dtype: `bfloat16`, `float16`, `float8_e4m3fn` or `float8_e5m2`.
        key: a PRNG key, from `jax.random.key`. The same key gives the same result.

    Returns:
        An array of `dtype` and the shape of `x`.

    Raises:
        ValueError: `dtype` is another dtype.
        TypeError: `x` is not floating, `dtype` is no dtype, or `key` is no key.

    >>> x = jnp.full(4000, 1 + 2**-9)  # A quarter of the way from 1 to 1 + 2**-7.
    >>> rounded = stochastic_round(x, "bfloat16", jax.random.key(0))
    >>> jnp.unique(rounded).tolist(), round(float(jnp.mean(rounded > 1)), 1)
    ([1.0, 1.0078125], 0.2)

    Guide: docs/memory.md.
    """
    target = narrow_dtype("stochastic_round(x, dtype, key)", dtype)
    x = jnp.asarray(x)
    if not has_dtype(x, jnp.floating):
        raise TypeError(
            f"stochastic_round(x, dtype, key) rounds floating numbers, got x of {x.dtype.name}. "
            "Cast x to float32 first."
        )
    bits = random_bits(rounding_key("stochastic_round(x, dtype, key)", key), 0, x.shape)
    return round_to(x, target, bits).astype(target)


def narrow_dtype(made_by: str, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype that `dtype` names, one to which `round_to` rounds.

    Raises:
        ValueError, TypeError: it names another dtype, or none.
    """
    target = parse_dtype(dtype)
    if target.name not in _NARROW:
        raise ValueError(
            f"{made_by}: dtype is one of {', '.join(_NARROW)}, got {target.name}. float32 needs no rounding."
        )
    return target


def round_to(x: jax.Array, dtype: np.dtype, bits: jax.Array | None = None) -> jax.Array:
    """Rounds to the numbers of a narrower dtype: to nearest, ties to even; or at random.

    Args:
        x: an array of a floating dtype, any shape.
        dtype: a dtype of fewer bits than float32.
        bits: random bits of the shape of `x`, uint32; None to round to nearest.

    Returns:
        float32 numbers that `dtype` holds, the shape of `x`. A number too large for `dtype` becomes inf.
    """
    x = x.astype(jnp.float32)
    exponent_of_float32 = jnp.finfo(dtype).maxexp == jnp.finfo(jnp.float32).maxexp
    return _drop_bits(x, dtype, bits) if exponent_of_float32 else _round_on_grid(x, dtype, bits)


def _drop_bits(x: jax.Array, dtype: np.dtype, bits: jax.Array | None) -> jax.Array:
    """`round_to` for a dtype with float32's exponent, whose numbers are float32's without the last bits.

    A number between 0 and all dropped bits is added, and the dropped bits are cut off. A carry runs into the
    exponent, which is right: the number after 1.99 is 2.0, and the number after the largest one is inf.
    """
    dropped = 23 - jnp.finfo(dtype).nmant
    all_dropped = np.uint32(2**dropped - 1)
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    added = (pattern >> dropped & 1) + all_dropped // 2  # To nearest: half, and a tie goes to the even one.
    if bits is not None:
        beyond = jnp.abs(x) > float(jnp.finfo(dtype).max)
        added = jnp.where(beyond, added, bits & all_dropped)
    rounded = lax.bitcast_convert_type((pattern + added) & ~all_dropped, jnp.float32)
    return jnp.where(jnp.isnan(x), x, rounded)


def _round_on_grid(x: jax.Array, dtype: np.dtype, bits: jax.Array | None) -> jax.Array:
    """`round_to` for a dtype with a smaller exponent: divides by the gap between its numbers around `x`.

    The gap is a power of two, and no smaller than that of the subnormal numbers. So the division is exact.
    """
    limits = jnp.finfo(dtype)
    size = jnp.abs(x)
    exponent = lax.bitcast_convert_type(size, jnp.uint32) & _EXPONENT
    smallest_normal = np.uint32(127 + limits.minexp) << np.uint32(23)
    gap = jnp.maximum(exponent, smallest_normal) - (np.uint32(limits.nmant) << np.uint32(23))
    one_over_gap = (np.uint32(254) << np.uint32(23)) - gap
    steps = size * lax.bitcast_convert_type(one_over_gap, jnp.float32)
    rounded = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    largest = np.float32(limits.max)
    if bits is not None:
        below = jnp.floor(steps)
        uniform = (bits >> 8).astype(jnp.float32) * np.float32(2**-24)  # In [0, 1).
        rounded = jnp.where(size > largest, rounded, below + (uniform < steps - below).astype(jnp.float32))
    rounded = rounded * lax.bitcast_convert_type(gap, jnp.float32)
    return jnp.copysign(jnp.where(rounded > largest, np.float32(np.inf), rounded), x)


def update_to(param: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns the update with which `optax.apply_updates` turns `param` into `rounded`.

    Args:
        param: an array of a dtype narrower than float32.
        rounded: the new numbers, from `round_to`, in float32.

    Returns:
        float32. The sum `param + update` is `rounded` if float32 holds the difference. That is so unless
        `param` is far larger than `rounded`: by 2**13 for float16, 2**16 for bfloat16. The sum is then off by
        at most a unit in the last place of float32 at `param`. No float32 update gives the sum exactly there.
        On a CPU, XLA takes an update below 2**-126 for zero.
    """
    old = param.astype(jnp.float32)
    # Minus zero is the one number that leaves every parameter as it is: -0.0 + 0.0 is 0.0.
    return jnp.where(rounded == old, np.float32(-0.0), rounded - old)
