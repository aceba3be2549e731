"""Trees that are finite, how to spoil them, and leaves that are no floating numbers."""

import jax
import jax.numpy as jnp
import numpy as np

SMALL = 2**16  # Elements up to which leaves are moved to be checked together.
GROUP = 16  # Leaves of one group.


def spoiled(leaf, value, where):
    """`leaf` with `value` at the fraction `where` of its elements."""
    array = np.array(leaf)
    array.flat[min(int(where * array.size), array.size - 1)] = value
    return array


def ones(*shapes, dtype=np.float32):
    return [np.ones(shape, dtype) for shape in shapes]


def a_function():
    pass


NOT_FLOATING = {
    "int32": jnp.arange(3),
    "uint8": np.arange(3, dtype=np.uint8),
    "numpy_int": np.int64(3),
    "bool": jnp.array([True]),
    "numpy_bool": np.bool_(True),
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0), 3),
    "old_key": jax.random.PRNGKey(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "int": 3,
    "truth": True,
    "string": "float32",
    "type": np.float32,
    "function": a_function,
    "object": object(),
    "object_array": np.array([1.0, None], object),
}
