"""Random bits for stochastic rounding, made by a GPU inside the optimizer's own kernels.

Every element hashes its index twice, with words of the key: two multiplications and three shifts a hash. This
is no generator for simulations. `jax.random.bits` (Threefry) has 20 rounds for each element, and the results
of the `rbg` generator go through memory.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio: its multiples lie far apart.


class RoundingKey(NamedTuple):
    """The key of one step. Of two scalars: XLA fuses all arrays that read one small array into one kernel.

    Attributes:
        word: random, shape `()`, uint32. It stays the same over a run.
        step: the number of the step, from a random one on, shape `()`, uint32.
    """

    word: Any
    step: Any


def first_key(made_by: str, key: Any) -> RoundingKey:
    """Returns the key of the first step.

    Args:
        made_by: the name of the public function, for the error. Two functions have keys of their own.
        key: an integer, or a PRNG key.

    Raises:
        TypeError: `key` is neither.
    """
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        key = jax.random.key(int(key))
    first = rounding_key(made_by, key)
    return RoundingKey(first.word ^ np.uint32(zlib.crc32(made_by.encode())), first.step)


def rounding_key(made_by: str, key: Any) -> RoundingKey:
    """Returns the `RoundingKey` that belongs to a PRNG key.

    Raises:
        TypeError: `key` is no PRNG key.
    """
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.shape == ()
    if not (is_key or (dtype == np.uint32 and key.shape in ((2,), (4,)))):
        raise TypeError(f"{made_by}: key is one PRNG key, such as jax.random.key(0), got {key!r}.")
    word, step = jax.random.bits(key, (2,), jnp.uint32)
    return RoundingKey(word, step)


def next_key(key: RoundingKey) -> RoundingKey:
    """Returns the key of the step after that of `key`."""
    return RoundingKey(key.word, key.step + np.uint32(1))


def random_bits(key: RoundingKey, leaf: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns random bits.

    Args:
        key: from `first_key`, `next_key` or `rounding_key`.
        leaf: tells the arrays that are rounded with one key apart.
        shape: the shape of the result. The index of an element is made from its indices along the axes, so
            that each device of a sharded array makes the bits of its own part. The bits do not depend on the
            number of devices.

    Returns:
        uint32. An array of more than 2**32 elements has the same bits again after 2**32 elements.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * np.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    first = _hash(key.word ^ np.uint32(leaf * _GOLDEN % 2**32))
    second = _hash(key.step + first)
    return _hash(_hash(index + first) ^ second)


def _hash(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 numbers; a bijection (C. Wellons, Hash Function Prospector, two rounds)."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)
