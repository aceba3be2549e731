"""The global norm of gradients, and the clip by it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._tree import is_floating


def squared_norms(tree: Any) -> jax.Array:
    """Returns the sum of the squares of each leaf, float32 or wider, in the order of `jax.tree.leaves`.

    A leaf with inf or NaN has the sum inf or NaN, since no square is negative. A leaf that is neither
    floating nor complex has the sum 0.
    """
    zero = jnp.float32(0)
    leaves = jax.tree.leaves(tree)
    # As in optax: `jnp.abs` of a complex number computes a root, which would be squared again.
    sums = [jnp.sum(jnp.real(leaf * jnp.conj(leaf))) if is_floating(leaf) else zero for leaf in leaves]
    # The flags, the norm and the clip read the sums. Without the barrier XLA computes the reductions in each
    # of these readers, and reads the gradients again for each.
    return lax.optimization_barrier(jnp.stack(sums) if sums else jnp.zeros(0))


def clip(tree: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns the gradients `tree`, of global norm `norm`, as `optax.clip_by_global_norm` clips them."""

    def scale(leaf: jax.Array) -> jax.Array:
        if not is_floating(leaf):
            return leaf
        return jnp.where(norm < max_norm, leaf, (leaf / norm.astype(leaf.dtype)) * max_norm)

    return jax.tree.map(scale, tree)
