"""GPT-2 (Radford et al., 2019): a decoder-only transformer."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .attention import attention
from .workload import Batch, Optimizer, Workload


class Block(nn.Module):
    """A pre-norm transformer block.

    Attributes:
        heads: how many attention heads.
        attention: called as `models.attention.attention` is.
    """

    heads: int
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(1e-5, name="attention_norm")(x)
        y = nn.Dense(3 * width, name="project")(y).reshape(*x.shape[:2], 3 * self.heads, -1)
        y = self.attention(*jnp.split(y, 3, axis=2), is_causal=True)
        x = x + nn.Dense(width, name="merge")(y.reshape(x.shape))
        y = nn.LayerNorm(1e-5, name="norm")(x)
        y = nn.gelu(nn.Dense(4 * width, name="expand")(y))
        return x + nn.Dense(width, name="contract")(y)


class GPT2(nn.Module):
    """Tokens to the logits of the next token, by the embedding again.

    Attributes:
        vocabulary: how many tokens there are.
        length: how many positions, at most.
        width, layers, heads: of the transformer.
        attention: called as `models.attention.attention` is.
    """

    vocabulary: int = 50304  # 50,257 and room for a multiple of 64, which Tensor Cores like.
    length: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits, shape `(batch, length, vocabulary)`, of tokens, shape `(batch, length)`, int32."""
        small = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=small, name="tokens")
        positions = nn.Embed(self.length, self.width, embedding_init=small, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for layer in range(self.layers):
            x = Block(self.heads, self.attention, name=f"blocks_{layer}")(x)
        return embed.attend(nn.LayerNorm(1e-5, name="norm")(x))


def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the next tokens, shape `(batch, length)`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def full(width: int = 768, layers: int = 12, batch_size: int = 8) -> Workload:
    """GPT-2 small, or medium (1024 and 24), on 1,024 random tokens."""
    model = GPT2(width=width, layers=layers, heads=width // 64)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        tokens = rng.integers(0, 50257, (size, model.length + 1), dtype=np.int32)
        return (tokens[:, :-1],), tokens[:, 1:]

    return Workload(model, loss, Optimizer("adamw", 3e-4), batch_size, batch)


def small() -> Workload:
    """Two layers that read the standard library byte by byte."""
    model = GPT2(vocabulary=256, length=32, width=64, layers=2, heads=2)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        text = data.source_text()
        starts = rng.integers(0, len(text) - model.length - 1, size)
        tokens = text[starts[:, None] + np.arange(model.length + 1)].astype(np.int32)
        return (tokens[:, :-1],), tokens[:, 1:]

    return Workload(model, loss, Optimizer("adamw", 3e-3), 16, batch)
