"""Attention, written out as XLA takes it; cuDNN's has the same arguments."""

import jax
import jax.numpy as jnp


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1).

    The softmax is computed in float32 whatever the dtype of the operands, as in
    `jax.nn.dot_product_attention`, which JAX cannot compile in float16 for a CPU. This is the one cast in
    the models: no policy of a module reaches into a function.

    Args:
        query: shape `(batch, length, heads, features)`.
        key, value: shape `(batch, other length, heads, features)`.
        is_causal: whether a position attends to none that comes after it.

    Returns:
        Shape and dtype of `query`.
    """
    query = query * query.shape[-1] ** -0.5  # Before the product, whose result float16 might not hold.
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=jnp.bool_), scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
