"""The global norm of gradients, and the clip by it."""

from typing import Any

import jax
import jax.numpy as jnp

from .._tree import is_floating


def squared_norms(tree: Any) -> jax.Array:
    """Returns the sum of the squares of each leaf, float32 or wider, in the order of `jax.tree.leaves`."""

    # No square is negative, so the sum of a leaf with inf or NaN is inf or NaN. As in optax
    # (https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/numerics.py#L31): `jnp.abs` of a
    # complex number computes a root, which would be squared again.
    def square(leaf):
        return jnp.real(leaf * jnp.conj(leaf)).sum() if is_floating(leaf) else jnp.float32(0)

    sums = list(map(square, jax.tree.leaves(tree)))
    return jnp.stack(sums) if sums else jnp.zeros(0)


def clip(tree: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns the gradients `tree`, of global norm `norm`, as `optax.clip_by_global_norm` clips them."""

    def scale(leaf: jax.Array) -> jax.Array:
        if not is_floating(leaf):
            return leaf
        # The operations of optax, in their order:
        # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/transforms/_clipping.py#L105.
        return jnp.where(norm < max_norm, leaf, (leaf / norm.astype(leaf.dtype)) * max_norm)

    return jax.tree.map(scale, tree)
