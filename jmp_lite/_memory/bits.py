"""Random bits for stochastic rounding, made by a GPU inside the optimizer's own kernels.

Every element hashes its index twice, with words of the key: two multiplications and three shifts a hash. This
is no generator for simulations. `jax.random.bits` (Threefry, 20 rounds) takes ten times as long to compile,
and `rbg` writes its bits to memory first: docs/memory.md has the figures.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio: its multiples lie far apart.


def first_key(made_by: str, key: Any) -> jax.Array:
    """Returns the first key of a state, shape `(2,)`, uint32: random words of `key`, and the number of steps.

    Args:
        made_by: the name of the public function, for the error.
        key: an integer, or a PRNG key.

    Raises:
        TypeError: `key` is neither.
    """
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        key = jax.random.key(int(key))
    return key_words(made_by, key)


def key_words(made_by: str, key: Any) -> jax.Array:
    """Returns two random words that belong to a PRNG key, shape `(2,)`, uint32.

    Raises:
        TypeError: `key` is no PRNG key.
    """
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.shape == ()
    if not (is_key or (dtype == np.uint32 and key.shape in ((2,), (4,)))):
        raise TypeError(f"{made_by}: key is one PRNG key, such as jax.random.key(0), got {key!r}.")
    return jax.random.bits(key, (2,), jnp.uint32)


def next_key(key: jax.Array) -> jax.Array:
    """Returns the key of the step after that of `key`."""
    return key + np.array([0, 1], np.uint32)


def random_bits(key: jax.Array, leaf: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns random bits.

    Args:
        key: from `first_key` or `next_key`, shape `(2,)`, uint32.
        leaf: tells the arrays that are rounded with one key apart.
        shape: the shape of the result. The index is summed over the axes, so that each device of a sharded
            array makes the bits of its own part, and the bits do not depend on the number of devices.

    Returns:
        uint32. An array of more than 2**32 elements has the same bits again after 2**32 elements.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    first = _hash(key[0] ^ np.uint32(leaf * _GOLDEN % 2**32))
    second = _hash(key[1] + first)
    return _hash(_hash(index + first) ^ second)


def _hash(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 numbers; a bijection (C. Wellons, Hash Function Prospector, two rounds)."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)
