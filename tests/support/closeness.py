"""How close half precision must come to float32."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(actual, expected, dtype, factor):
    """Within `factor` roundings of `dtype`, relative to the tensor, or a tenth of the largest one."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    floor = 0.1 * max((float(jnp.abs(b).max()) for _, b in pairs), default=0.0)
    for a, b in pairs:
        scale = max(float(jnp.abs(b).max()), floor)
        np.testing.assert_allclose(a, b, rtol=0, atol=factor * float(jnp.finfo(dtype).eps) * scale)
