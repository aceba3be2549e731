"""Trees that are finite, and how to spoil them."""

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
