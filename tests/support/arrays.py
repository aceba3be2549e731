"""Arrays that cost no compilation: NumPy draws them, where JAX would compile a program for each shape."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Returns float32 numbers of a normal distribution."""
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def integers(seed: int, high: int, *shape: int) -> jax.Array:
    """Returns int32 numbers from 0 to `high`, without `high`."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)
