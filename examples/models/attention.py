"""Attention and the dense layers around it, which the transformers share."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1).

    The products are written out as XLA takes them. The softmax is computed in float32 for every dtype of the
    operands, as in `jax.nn.dot_product_attention`, which JAX cannot compile in float16 for a CPU. This is the
    only cast in the models, since the policy of a module does not reach into a function.

    Args:
        query: shape `(batch, length, heads, features)`.
        key, value: shape `(batch, other length, heads, features)`.
        is_causal: whether a position attends only to itself and to earlier positions.

    Returns:
        Shape and dtype of `query`.
    """
    query = query * query.shape[-1] ** -0.5  # Before the product: float16 might not hold its result.
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=jnp.bool_), scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def self_attention(x: jax.Array, heads: int, attend: Callable[..., jax.Array], **settings: Any) -> jax.Array:
    """Returns the attention of a sequence to itself, in the shape of `x`: `(batch, length, width)`.

    To be called in a compact method. Its layers `project` and `merge` belong to the calling module.

    Args:
        x: the sequence.
        heads: the number of attention heads.
        attend: called as `attention` is.
        settings: further arguments of `attend`.
    """
    width = x.shape[-1]
    y = nn.Dense(3 * width, name="project")(x).reshape(*x.shape[:2], 3 * heads, -1)
    y = attend(*jnp.split(y, 3, axis=2), **settings)
    return nn.Dense(width, name="merge")(y.reshape(x.shape))


def feed_forward(x: jax.Array) -> jax.Array:
    """Returns the feed-forward network of each position, in the shape of `x`: `(batch, length, width)`.

    To be called in a compact method. Its layers `expand` and `contract` belong to the calling module.
    """
    width = x.shape[-1]
    return nn.Dense(width, name="contract")(nn.gelu(nn.Dense(4 * width, name="expand")(x)))
