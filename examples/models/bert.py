"""BERT (Devlin et al., 2018), base size: a transformer that fills in masked words."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .attention import attention
from .workload import Batch, Optimizer, Workload

MASKED = 0.15  # The share of the tokens that are masked and predicted; section 3.1.


class Block(nn.Module):
    """A post-norm transformer block.

    Attributes:
        heads: how many attention heads.
        attention: called as `models.attention.attention` is.
    """

    heads: int
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.Dense(3 * width, name="project")(x).reshape(*x.shape[:2], 3 * self.heads, -1)
        y = self.attention(*jnp.split(y, 3, axis=2))
        y = nn.Dense(width, name="merge")(y.reshape(x.shape))
        x = nn.LayerNorm(1e-5, name="attention_norm")(x + y)
        y = nn.gelu(nn.Dense(4 * width, name="expand")(x))
        return nn.LayerNorm(1e-5, name="norm")(x + nn.Dense(width, name="contract")(y))


class BERT(nn.Module):
    """Tokens to the logits of those that are masked.

    Attributes:
        vocabulary: how many tokens there are, the last of which is the mask.
        length: how many positions, at most.
        width, layers, heads: of the transformer.
        attention: called as `models.attention.attention` is.
    """

    vocabulary: int = 30592  # 30,522 and room for a multiple of 64, which Tensor Cores like.
    length: int = 512
    width: int = 768
    layers: int = 12
    heads: int = 12
    attention: Callable[..., jax.Array] = attention

    @nn.compact
    def __call__(self, tokens: jax.Array, places: jax.Array) -> jax.Array:
        """Returns the logits of the tokens at some places.

        Args:
            tokens: shape `(batch, length)`, int32.
            places: shape `(batch, masked)`, int32: where tokens are masked.

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
        x = jnp.take_along_axis(x, places[..., None], axis=1)
        x = nn.gelu(nn.Dense(self.width, name="transform")(x))
        return embed.attend(nn.LayerNorm(1e-5, name="norm")(x))


def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the masked tokens, shape `(batch, masked)`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def _mask(model: BERT, tokens: np.ndarray, rng: np.random.Generator) -> Batch:
    masked = int(MASKED * model.length)
    places = np.argsort(rng.random(tokens.shape), axis=1)[:, :masked].astype(np.int32)
    hidden = tokens.copy()
    np.put_along_axis(hidden, places, model.vocabulary - 1, axis=1)
    return (hidden, places), np.take_along_axis(tokens, places, axis=1)


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
