"""Whether gradients are finite, in few kernels.

A reduction for each leaf costs a GPU two kernels for each leaf, more than the optimizer itself. So leaves of
one shape are checked together. Small ones are stacked, which XLA does within the kernel that reads them. That
would copy large ones: they are reduced row by row, each by itself, and tied together by an operand that they
share, for which XLA makes one kernel of several reductions. Each leaf is read once and where it lies, so that
it may be split over devices.

`python -m benchmarks.loss_scale_cost` counts the kernels; benchmarks/tests/test_h100.py holds them.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._tree import has_dtype

_SMALL = 2**16  # Elements of a leaf that may be moved; XLA stacks within the kernel up to here and beyond.
_TOGETHER = 64  # Leaves that are checked together: XLA gives a kernel at most 96 operands and results.
_ROW = 256  # Elements of a row, at least: enough for a block of threads.
_LONGEST_ROW = 2**17  # And at most, since the operand that the rows share is as long.


def leaves_finite(tree: Any) -> jax.Array:
    """Returns for each leaf whether all of its elements are finite.

    Args:
        tree: any pytree. Leaves that are neither floating nor complex count as finite.

    Returns:
        Booleans in the order of `jax.tree.leaves(tree)`, shape `(number of leaves,)`.
    """
    leaves = jax.tree.leaves(tree)
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if is_inexact(leaf):
            kind = jax.typeof(leaf)  # With its sharding, on a mesh whose axes are explicit.
            groups.setdefault((kind.shape, kind.sharding), []).append(place)
    checked = [part for places in groups.values() for part in _parts(places)]
    flags = [_finite_together([jnp.asarray(leaves[place]) for place in part]) for part in checked]
    order = [place for part in checked for place in part]
    others = sorted(set(range(len(leaves))) - set(order))
    flags = jnp.concatenate([*flags, jnp.ones(len(others), jnp.bool_)])
    if (order := order + others) != sorted(order):
        flags = flags[np.argsort(order)]
    # Seen through, `flags.all()` would make XLA reduce each part of the concatenation once more.
    return lax.optimization_barrier(flags)


def is_inexact(leaf: Any) -> bool:
    """Whether `leaf` is a floating or complex number or array."""
    return isinstance(leaf, (float, complex)) or has_dtype(leaf, jnp.inexact)


def _parts(places: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(places), _TOGETHER):
        yield places[start : start + _TOGETHER]


def _finite_together(leaves: list[jax.Array]) -> jax.Array:
    """Whether each of some leaves of one shape is finite, shape `(len(leaves),)`."""
    shape = leaves[0].shape
    finite = [jnp.isfinite(leaf) for leaf in leaves]
    if len(leaves) > 1 and math.prod(shape) > _SMALL:
        if (row := _row(shape)) is None:
            return jnp.stack([each.all() for each in finite])
        # Ones that XLA cannot see through, or it would drop them.
        shared = lax.optimization_barrier(jnp.ones(row, jnp.bool_))
        axes = tuple(range(len(shape) - len(row), len(shape)))
        shared = shared.reshape((1,) * (len(shape) - len(row)) + row)
        finite = [(each & shared).all(axis=axes) for each in finite]
    together = jnp.stack(finite)
    return together.all(axis=tuple(range(1, together.ndim)))


def _row(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The last axes of `shape` that make a row, with an axis left; None if no row fits."""
    for axis in range(len(shape) - 1, 0, -1):
        if math.prod(shape[axis:]) >= _ROW:
            return shape[axis:] if math.prod(shape[axis:]) <= _LONGEST_ROW else None
    return None


def all_finite(tree: Any, axis_name: Any = None) -> jax.Array:
    """Returns whether every element of every leaf is finite.

    Args:
        tree: any pytree. Leaves that are neither floating nor complex count as finite.
        axis_name: under `shard_map`, `pmap` or `vmap`, the axis name or names over which to agree:
            the answer is true where it is true on all of them.

    Returns:
        A boolean scalar, shape `()`. True for a tree without leaves.

    >>> bool(all_finite({"a": jnp.ones(3), "b": jnp.array(jnp.inf)}))
    False
    """
    finite = leaves_finite(tree).all()
    return finite if axis_name is None else agree(finite, axis_name)


def agree(flags: jax.Array, axis_name: Any) -> jax.Array:
    """Returns the boolean `flags` that are true everywhere along the named axes."""
    return lax.pmin(flags.astype(jnp.int32), axis_name).astype(jnp.bool_)
