"""The global norm of gradients, and the clip by it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .finite import is_inexact


def squared_norms(tree: Any) -> jax.Array:
    """Returns for each leaf the sum of the squares of its elements.

    The sum of a leaf with an inf or NaN is inf or NaN, since no square is negative.

    Args:
        tree: any pytree of gradients, at least float32. The sum of a leaf that is neither floating nor
            complex is 0.

    Returns:
        Sums in the order of `jax.tree.leaves(tree)`, shape `(number of leaves,)`, float32 or wider.
    """
    zero = jnp.float32(0)
    leaves = jax.tree.leaves(tree)
    # As optax: `jnp.abs` of a complex number would compute a root, which is squared again.
    sums = [jnp.sum(jnp.real(leaf * jnp.conj(leaf))) if is_inexact(leaf) else zero for leaf in leaves]
    # The flags, the norm and the clip read the sums. Without the barrier XLA would copy the reductions into
    # each of these readers, and read the gradients once more for each.
    return lax.optimization_barrier(jnp.stack(sums) if sums else jnp.zeros(0))


def clip(tree: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns the gradients `tree`, of global norm `norm`, scaled down to the norm `max_norm` if it is above.

    Source: `optax.clip_by_global_norm`.
    """

    def scale(leaf: jax.Array) -> jax.Array:
        if not is_inexact(leaf):
            return leaf
        return jnp.where(norm < max_norm, leaf, (leaf / norm.astype(leaf.dtype)) * max_norm)

    return jax.tree.map(scale, tree)
