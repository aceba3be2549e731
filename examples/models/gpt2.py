"""GPT-2 (Radford et al., 2019): a decoder-only transformer."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .attention import attention, feed_forward, self_attention
from .workload import Batch, Optimizer, Workload


class Block(nn.Module):
    """A pre-norm transformer block.

    Attributes:
        heads: the number of attention heads.
        attention: called as `models.attention.attention` is.
    """

    heads: int
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(1e-5, name="attention_norm")(x)
        x = x + self_attention(y, self.heads, self.attention, is_causal=True)
        return x + feed_forward(nn.LayerNorm(1e-5, name="norm")(x))


class GPT2(nn.Module):
    """Tokens to the logits of the next token. The head is the embedding table.

    Attributes:
        vocabulary: the number of tokens.
        length: the largest number of positions.
        width, layers, heads: the size of the transformer.
        attention: called as `models.attention.attention` is.
    """

    vocabulary: int = 50304  # 50,257, padded to a multiple of 64 for Tensor Cores.
    length: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens `(batch, length)`, int32, to logits `(batch, length, vocabulary)`."""
        small = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=small, name="tokens")
        positions = nn.Embed(self.length, self.width, embedding_init=small, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for layer in range(self.layers):
            x = Block(self.heads, self.attention, name=f"blocks_{layer}")(x)
        return embed.attend(nn.LayerNorm(1e-5, name="norm")(x))


def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the next tokens, shape `(batch, length)`."""
    # The gradient of the loss with integer labels is a float32 scatter of the size of the logits.
    labels = jax.nn.one_hot(tokens, logits.shape[-1])
    return optax.softmax_cross_entropy(logits, labels).mean()


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
