"""Rounding float32 to a narrower dtype: to nearest, or up and down at random so that the mean is kept.

The results are float32 numbers that the narrower dtype holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import DTypeLike, parse_dtype
from .._tree import has_dtype, is_key

_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_EXPONENT = np.uint32(0x7F800000)  # Of a float32: 8 bits above the 23 bits of the mantissa.
AxisName = str | Sequence[str] | None
_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio: its multiples lie far apart.


def stochastic_round(x: Any, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds to one of the two neighbours in `dtype`, at random, so that the mean of the result is `x`.

    If `x` lies a fraction t of the way from its lower to its upper neighbour, it becomes the upper one with
    probability t. So a sum of many small updates is right on average (Gupta et al., Deep Learning with
    Limited Numerical Precision, ICML 2015; Croci et al., Stochastic rounding, 2022).

    The probability is exact for bfloat16, and exact to `2**-24` for other dtypes. Numbers that `dtype` holds
    do not change, including zero, subnormal numbers, inf and NaN. Numbers beyond the largest finite number of
    `dtype` are rounded to nearest: 65519 becomes 65504 in float16, and 65520 becomes inf.

    Args:
        x: a floating array of any shape. float64 is rounded to float32 first.
        dtype: `bfloat16`, `float16`, `float8_e4m3fn` or `float8_e5m2`.
        key: a PRNG key, from `jax.random.key`. The same key gives the same result.

    Returns:
        An array of `dtype`, with the shape of `x`.

    Raises:
        ValueError: `dtype` is another dtype.
        TypeError: `x` is not a floating array, `dtype` is not a dtype, or `key` is not a key.

    Examples:
        >>> x = jnp.full(4000, 1 + 2**-9)  # A quarter of the way from 1 to 1 + 2**-7.
        >>> rounded = jmp.stochastic_round(x, "bfloat16", jax.random.key(0))
        >>> jnp.unique(rounded).tolist(), round(float(jnp.mean(rounded > 1)), 1)
        ([1.0, 1.0078125], 0.2)
    """
    made_by = "stochastic_round(x, dtype, key)"
    target = parse_dtype(dtype)
    if target.name not in _NARROW:
        raise ValueError(
            f"{made_by}: dtype is one of {', '.join(_NARROW)}. Got {target.name}. float32 needs no rounding."
        )
    if not isinstance(x, (jax.Array, np.ndarray, np.generic, int, float)):
        raise TypeError(
            f"{made_by} rounds one array. Got x of type {type(x).__name__}. Round each array of a tree with "
            "a key of its own, from jax.random.split."
        )
    x = jnp.asarray(x)
    if not has_dtype(x, jnp.floating):
        raise TypeError(f"{made_by} rounds floating numbers. Got x of {x.dtype.name}. Cast it to float32.")
    return round_leaf(x, target, rounding_key(made_by, key), 0).astype(target)


def round_leaf(x: jax.Array, dtype: np.dtype, key: RoundingKey | None, leaf: int) -> jax.Array:
    """Rounds as `round_to`: to nearest if `key` is None, else with the `random_bits` of `key` and `leaf`."""
    return round_to(x, dtype, None if key is None else random_bits(key, leaf, x))


def round_to(x: jax.Array, dtype: np.dtype, bits: jax.Array | None = None) -> jax.Array:
    """Returns `x` in float32, rounded to numbers that `dtype` holds; those too large become inf.

    It rounds to nearest, ties to even, or with random bits, uint32, of the shape of `x`.
    """
    # In integers and powers of two, which XLA does not change. It may drop the casts float32 -> float16 ->
    # float32 of a program (`xla_allow_excess_precision`, on by default), and does so for a GPU:
    # https://github.com/openxla/xla/issues/41605.
    has_float32_exponent = jnp.finfo(dtype).maxexp == jnp.finfo(jnp.float32).maxexp
    return (_drop_bits if has_float32_exponent else _round_on_grid)(x.astype(jnp.float32), dtype, bits)


def within(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns `x` with the largest number of `dtype` in place of finite numbers beyond it."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)


def _drop_bits(x: jax.Array, dtype: np.dtype, bits: jax.Array | None) -> jax.Array:
    """`round_to` for a dtype with the exponent of float32: its numbers are float32 without the last bits."""
    # Adds a number between 0 and all dropped bits, then cuts these bits off. A carry into the exponent is
    # right: the number after 1.99 is 2.0, and the number after the largest one is inf.
    dropped = 23 - jnp.finfo(dtype).nmant  # A float32 has 23 bits of mantissa.
    all_dropped = np.uint32(2**dropped - 1)
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    added = (pattern >> dropped & 1) + all_dropped // 2  # To nearest: half, and a tie goes to even.
    if bits is not None:
        beyond = jnp.abs(x) > float(jnp.finfo(dtype).max)
        added = jnp.where(beyond, added, bits & all_dropped)
    rounded = lax.bitcast_convert_type((pattern + added) & ~all_dropped, jnp.float32)
    # A carry out of the mantissa of NaN would make it inf or a number.
    return jnp.where(jnp.isnan(x), x, rounded)


def _round_on_grid(x: jax.Array, dtype: np.dtype, bits: jax.Array | None) -> jax.Array:
    """`round_to` for a dtype with a smaller exponent: counts in gaps between its numbers around `x`."""
    # A gap is a power of two, at least that between subnormal numbers, so the division by it is exact.
    limits = jnp.finfo(dtype)
    size = jnp.abs(x)
    exponent = lax.bitcast_convert_type(size, jnp.uint32) & _EXPONENT
    # The bits of the smallest normal number. Below it, the gaps do not become smaller.
    smallest_normal = np.uint32(127 + limits.minexp) << np.uint32(23)
    gap = jnp.maximum(exponent, smallest_normal) - (np.uint32(limits.nmant) << np.uint32(23))
    # The exponent fields of a power of two and of its reciprocal add up to 254, twice the bias.
    one_over_gap = (np.uint32(254) << np.uint32(23)) - gap
    steps = size * lax.bitcast_convert_type(one_over_gap, jnp.float32)
    rounded = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    largest = np.float32(limits.max)
    if bits is not None:
        below = jnp.floor(steps)
        # In [0, 1). A cast of 32 bits to float32, which holds 24, could round up to 1.
        uniform = (bits >> 8).astype(jnp.float32) * np.float32(2**-24)
        rounded = jnp.where(size > largest, rounded, below + (uniform < steps - below).astype(jnp.float32))
    rounded = rounded * lax.bitcast_convert_type(gap, jnp.float32)
    # The sign comes last, so that what rounds to zero keeps it.
    return jnp.copysign(jnp.where(rounded > largest, np.float32(np.inf), rounded), x)


def update_to(param: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns the float32 update with which `optax.apply_updates` turns `param` into `rounded`."""
    # That adds in float32 and casts the sum:
    # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/update.py#L42.
    # The sum is exact unless `param` is 2**13 times larger than `rounded` in float16, or 2**16 times in
    # bfloat16. On a CPU, XLA takes updates below 2**-126 for 0: https://github.com/jax-ml/jax/issues/16200.
    old = param.astype(jnp.float32)
    # Only minus zero leaves every parameter as it is: an update of 0.0 turns -0.0 into 0.0.
    return jnp.where(rounded == old, np.float32(-0.0), rounded - old)


class RoundingKey(NamedTuple):
    """The key of a step."""

    # Two uint32 scalars, since XLA fuses all readers of a small array into one kernel.
    word: Any  # A random number that stays the same over a run.
    step: Any  # The number of the step, counted from a random number on.


def first_key(made_by: str, key: Any) -> RoundingKey:
    """Returns the key of the first step of the public function `made_by`, from an integer or a PRNG key."""
    if isinstance(key, (int, np.integer)):
        key = jax.random.key(int(key))
    first = rounding_key(made_by, key)
    # Two functions that are given the same `key` draw different bits.
    return RoundingKey(first.word ^ np.uint32(zlib.crc32(made_by.encode())), first.step)


def rounding_key(made_by: str, key: Any) -> RoundingKey:
    # `jax.random.PRNGKey` has two words of uint32, and four if the generator is `rbg`.
    shapes = [()] if is_key(key) else [(2,), (4,)] if has_dtype(key, jnp.uint32) else []
    if getattr(key, "shape", None) not in shapes:
        raise TypeError(f"{made_by}: key is one PRNG key, such as jax.random.key(0). Got {key!r:.200}.")
    word, step = jax.random.bits(key, (2,), jnp.uint32)
    return RoundingKey(word, step)


def next_key(key: RoundingKey) -> RoundingKey:
    # `flax.serialization` restores NumPy scalars, which warn when they wrap around.
    return RoundingKey(key.word, jnp.asarray(key.step) + np.uint32(1))


def key_of_shard(key: RoundingKey | None, axis_name: AxisName, x: jax.Array) -> RoundingKey | None:
    """Returns the key for the part of `x` that this device, or ensemble member, has along the named axes."""
    if key is None or axis_name is None:
        return key
    word = jnp.asarray(key.word)
    for axis in (axis_name,) if isinstance(axis_name, str) else axis_name:
        try:
            index = lax.axis_index(axis)
        # JAX's error for an axis that no transform binds. It says nothing of `axis_name`.
        except NameError as error:
            raise ValueError(
                f"Stochastic rounding: axis_name={axis!r} is no axis of a jax.shard_map or jax.vmap around "
                "the update. Under jit leave axis_name out: devices round apart there."
            ) from error
        # If `shard_map` knows that an array is the same along an axis, all devices have one key. With
        # `check_vma=False` no array is known to vary along an axis, not even the index of the axis:
        # https://docs.jax.dev/en/latest/_autosummary/jax.shard_map.html.
        if axis in _varying_axes(x) or axis not in _varying_axes(index):
            word = _hash(word + (index.astype(jnp.uint32) + np.uint32(1)) * np.uint32(_GOLDEN))
    return RoundingKey(word, key.step)


def _varying_axes(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def random_bits(key: RoundingKey, leaf: int, x: jax.Array) -> jax.Array:
    """Returns random bits of the shape of `x`, uint32, which repeat after 2**32 elements.

    They do not depend on the number of devices. `leaf` numbers the arrays that are rounded with one key.
    """
    # The index of an element is computed from its indices along the axes, so that each device makes the bits
    # of its own part of a sharded array. The zeros are made from `x`, because without `jax.set_mesh` those of
    # `jnp.zeros_like` are not sharded: https://github.com/jax-ml/jax/issues/16080.
    index = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0)
    for axis, size in enumerate(x.shape):
        # One axis at a time: on a mesh of explicit axes, each device holds the whole iota.
        along = [size if other == axis else 1 for other in range(x.ndim)]
        index = index * np.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, along, axis)
    # A GPU computes this inside the optimizer's own kernels: two hashes an element, each of two
    # multiplications and three shifts. The bits are too weak for simulations, but cheap: Threefry, behind
    # `jax.random.bits`, has 20 rounds an element, and the results of the `rbg` generator go through memory.
    first = _hash(jnp.asarray(key.word) ^ np.uint32(leaf * _GOLDEN % 2**32))
    second = _hash(jnp.asarray(key.step) + first)
    return _hash(_hash(index + first) ^ second)


def _hash(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 numbers; a bijection (C. Wellons, Hash Function Prospector, two rounds)."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)
