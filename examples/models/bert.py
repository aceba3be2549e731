"""BERT (Devlin et al., 2018), base size: a transformer that fills in masked words."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .attention import attention, feed_forward, self_attention
from .workload import Batch, Optimizer, Workload

MASKED = 0.15  # The share of masked tokens; section 3.1.


class Block(nn.Module):
    """A post-norm transformer block.

    Attributes:
        heads: the number of attention heads.
        attention: called as `models.attention.attention` is.
    """

    heads: int
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self_attention(x, self.heads, self.attention)
        x = nn.LayerNorm(1e-5, name="attention_norm")(x + y)
        return nn.LayerNorm(1e-5, name="norm")(x + feed_forward(x))


class BERT(nn.Module):
    """Tokens to the logits of the masked tokens.

    Attributes:
        vocabulary: the number of tokens. The last token is the mask.
        length: the largest number of positions.
        width, layers, heads: the size of the transformer.
        attention: called as `models.attention.attention` is.
    """

    vocabulary: int = 30592  # 30,522, padded to a multiple of 64 for Tensor Cores.
    length: int = 512
    width: int = 768
    layers: int = 12
    heads: int = 12
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, tokens: jax.Array, masked: jax.Array) -> jax.Array:
        """Returns the logits of the masked tokens.

        Args:
            tokens: shape `(batch, length)`, int32.
            masked: the indices of the masked tokens, shape `(batch, masked)`, int32.

        Returns:
            Shape `(batch, masked, vocabulary)`.
        """
        small = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=small, name="tokens")
        positions = nn.Embed(self.length, self.width, embedding_init=small, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm(1e-5, name="embedding_norm")(x)
        for layer in range(self.layers):
            x = Block(self.heads, self.attention, name=f"blocks_{layer}")(x)
        x = jnp.take_along_axis(x, masked[..., None], axis=1)
        x = nn.gelu(nn.Dense(self.width, name="transform")(x))
        return embed.attend(nn.LayerNorm(1e-5, name="norm")(x))


def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the masked tokens, shape `(batch, masked)`."""
    # The gradient of the loss with integer labels is a float32 scatter of the size of the logits.
    labels = jax.nn.one_hot(tokens, logits.shape[-1])
    return optax.softmax_cross_entropy(logits, labels).mean()


def _mask(model: BERT, tokens: np.ndarray, rng: np.random.Generator) -> Batch:
    count = int(MASKED * model.length)
    masked = np.argsort(rng.random(tokens.shape), axis=1)[:, :count].astype(np.int32)
    hidden = tokens.copy()
    np.put_along_axis(hidden, masked, model.vocabulary - 1, axis=1)
    return (hidden, masked), np.take_along_axis(tokens, masked, axis=1)


def full() -> Workload:
    """BERT-base on 512 random tokens."""
    model = BERT()
    tokens = lambda rng, size: rng.integers(0, 30522, (size, model.length), dtype=np.int32)
    batch = lambda rng, size: _mask(model, tokens(rng, size), rng)
    return Workload(model, loss, Optimizer("adamw", 1e-4), 16, batch)


def small() -> Workload:
    """Two layers that fill in bytes of the standard library."""
    model = BERT(vocabulary=257, length=32, width=64, layers=2, heads=2)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        text = data.source_text()
        starts = rng.integers(0, len(text) - model.length, size)
        return _mask(model, text[starts[:, None] + np.arange(model.length)].astype(np.int32), rng)

    return Workload(model, loss, Optimizer("adamw", 3e-3), 32, batch)
