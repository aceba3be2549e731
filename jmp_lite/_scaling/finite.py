"""Whether gradients are finite, in few kernels.

`python -m benchmarks.compiled.loss_scale_cost` counts the kernels.
`benchmarks/tests/compiled/test_h100.py` holds them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._tree import is_floating

_SMALL = 2**16  # Elements of the largest leaf that is stacked.
# Leaves in a group. The more operands a kernel has, the longer it compiles: with 64, twice as long.
_GROUP = 16
_ROW = 256  # Elements of the shortest row: enough for a block of threads.
_LONGEST_ROW = 2**17  # The shared operand is as long as a row.


def leaves_finite(tree: Any) -> jax.Array:
    """Returns whether each leaf is finite, as booleans in the order of `jax.tree.leaves`."""
    # A reduction for each leaf costs a GPU two kernels a leaf, more than the optimizer itself. So leaves of
    # one shape are checked in groups.
    leaves = jax.tree.leaves(tree)
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if is_floating(leaf):
            # On a mesh of explicit axes JAX stacks only arrays of one sharding. Others raise a
            # `ShardingTypeError`.
            leaf_type = jax.typeof(leaf)
            groups.setdefault((leaf_type.shape, leaf_type.sharding), []).append(index)
    starts = [(group, start) for group in groups.values() for start in range(0, len(group), _GROUP)]
    parts = [group[start : start + _GROUP] for group, start in starts]
    flags = [_leaves_of_one_shape_finite([jnp.asarray(leaves[index]) for index in part]) for part in parts]
    # The flags come in the order of the groups, and leaves without floating numbers after them.
    order = [index for part in parts for index in part]
    others = sorted(set(range(len(leaves))) - set(order))
    flags = jnp.concatenate([*flags, jnp.ones(len(others), jnp.bool_)])
    if (order := order + others) != sorted(order):
        flags = flags[np.argsort(order)]
    # Callers read the flags and `flags.all()`. Without the barrier XLA separates the reductions of leaves of
    # one shape again: six leaves then cost nine kernels in place of four.
    return lax.optimization_barrier(flags)


def _leaves_of_one_shape_finite(leaves: list[jax.Array]) -> jax.Array:
    """Returns whether each of some leaves of one shape is finite, shape `(len(leaves),)`."""
    shape = leaves[0].shape
    finite = [jnp.isfinite(leaf) for leaf in leaves]
    if len(leaves) > 1 and math.prod(shape) > _SMALL:
        if (row := _row(shape)) is None:  # Too short for a block of threads, or too long to share.
            return jnp.stack([flags.all() for flags in finite])
        # Large leaves are not stacked, which would copy them. They are reduced row by row, and the reductions
        # share an operand, because XLA fuses reductions that share one into one kernel. So each leaf is read
        # once, where it is: leaves of one shape may have different shardings. A variadic `lax.reduce` needs
        # no shared operand, but its operands have one sharding: on a mesh of 8 H100s XLA adds an all-to-all
        # for each leaf with another one.
        # XLA would remove `x & True`. The barrier hides from it that the shared operand is all ones.
        shared = lax.optimization_barrier(jnp.ones(row, jnp.bool_))
        axes = tuple(range(len(shape) - len(row), len(shape)))
        shared = shared.reshape((1,) * (len(shape) - len(row)) + row)
        finite = [(flags & shared).all(axis=axes) for flags in finite]
    # XLA stacks small leaves, and rows of flags, inside the kernel that reads them.
    stacked = jnp.stack(finite)
    return stacked.all(axis=tuple(range(1, stacked.ndim)))


def _row(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the sizes of the last axes, at most all but one, that make a row; None if no row fits."""
    for axis in range(len(shape) - 1, 0, -1):
        if math.prod(shape[axis:]) >= _ROW:
            return shape[axis:] if math.prod(shape[axis:]) <= _LONGEST_ROW else None
    return None


def all_finite(tree: Any, axis_name: Any = None) -> jax.Array:
    """Returns whether every element of every leaf is finite.

    Args:
        tree: any pytree. Leaves that are neither floating nor complex count as finite.
        axis_name: under `shard_map`, `pmap` or `vmap`, the axis name or names over which to agree: the answer
            is true if it is true everywhere along them.

    Returns:
        A boolean, shape `()`; true for a tree without leaves.

    Examples:
        >>> bool(jmp.all_finite({"a": jnp.ones(3), "b": jnp.array(jnp.inf)}))
        False
    """
    finite = leaves_finite(tree).all()
    return finite if axis_name is None else agree(finite, axis_name)


def agree(flags: jax.Array, axis_name: Any) -> jax.Array:
    """Returns, for each of the boolean `flags`, whether it is true everywhere along the named axes."""
    return lax.pmin(flags, axis_name)  # XLA gives NCCL booleans as bytes.
