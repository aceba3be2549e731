"""Attention, written out as XLA takes it; cuDNN's has the same arguments."""

import jax
import jax.numpy as jnp

import jmp_lite as jmp


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1).

    The softmax is computed in float32 whatever the policy, which is jmp_lite's to say: see
    `jmp_lite.keep_f32`. `jax.nn.dot_product_attention` does the same, but JAX cannot compile it in float16
    for a CPU.

    Args:
        query: shape `(batch, length, heads, features)`.
        key, value: shape `(batch, other length, heads, features)`.
        is_causal: whether a position attends to none that comes after it.

    Returns:
        Shape and dtype of `query`.
    """
    query = query * query.shape[-1] ** -0.5  # Before the product, whose result float16 might not hold.
    scores = jmp.keep_f32(jnp.einsum("bqhd,bkhd->bhqk", query, key))
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=jnp.bool_), scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
