"""A GPT, written in float32 with no cast of its own, and its loss with half precision brought in by others.

It is what the benchmarks compile.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from jmp_lite.linen import with_policy

CASTS = ("none", "by hand", "policy", "autocast")
Loss = Callable[[Any, jax.Array], jax.Array]


class Block(nn.Module):
    """A pre-norm transformer block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        heads = nn.Dense(3 * width)(nn.LayerNorm()(x)).reshape(*x.shape[:2], 3, -1, 64)
        query, key, value = (heads[:, :, place] for place in range(3))
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.Dense(width)(attended.reshape(x.shape))
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    """A decoder-only transformer.

    Attributes:
        vocabulary: how many tokens there are.
        width: features of a token, a multiple of 64.
        layers: how many blocks.
    """

    vocabulary: int = 50304
    width: int = 768
    layers: int = 12

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits, shape `(batch, length, vocabulary)`, of tokens, shape `(batch, length)`, int32."""
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = nn.Embed(self.vocabulary, self.width)(tokens) + positions
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of each next token, float32."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def gpt_loss(model: GPT, casts: str, dtype: Any, reduce_dtype: Any = None) -> Loss:
    """Returns the loss, of parameters and tokens, of a GPT whose products take `dtype`.

    Args:
        model: the GPT, in float32.
        casts: one of `CASTS`: who brings the half precision in.
        dtype: the half dtype.
        reduce_dtype: for `policy`, as in `with_policy`.
    """
    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)

    def loss_of(apply: Callable[..., Any]) -> Loss:
        return lambda params, tokens: next_token_loss(apply(params, tokens), tokens)

    if casts == "by hand":
        apply: Any = model.apply
        return loss_of(lambda p, tokens: policy.cast_to_output(apply(policy.cast_to_compute(p), tokens)))
    if casts == "policy":
        return loss_of(with_policy(model, policy, reduce_dtype=reduce_dtype).apply)
    return jmp.autocast(loss_of(model.apply), dtype) if casts == "autocast" else loss_of(model.apply)
