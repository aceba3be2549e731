"""An LSTM encoder and decoder with attention, in the shape of GNMT (Wu et al., 2016)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .attention import attention
from .workload import Batch, Optimizer, Workload

PADDING = 0


class Cell(nn.Module):
    """One step of an LSTM (Hochreiter and Schmidhuber, 1997). Its inputs are multiplied already."""

    features: int

    @nn.compact
    def __call__(self, carry: Any, gates: jax.Array) -> tuple[Any, jax.Array]:
        cell, hidden = carry
        gates = gates + nn.Dense(4 * self.features, use_bias=False, name="hidden")(hidden)
        input_gate, forget_gate, candidate, output_gate = jnp.split(gates, 4, axis=-1)
        cell = nn.sigmoid(forget_gate) * cell + nn.sigmoid(input_gate) * nn.tanh(candidate)
        hidden = nn.sigmoid(output_gate) * nn.tanh(cell)
        return (cell, hidden), hidden


class LSTM(nn.Module):
    """A sequence `(batch, length, any)` to the hidden states `(batch, length, features)`.

    Attributes:
        features: the features of the hidden state.
        reverse: whether it reads the sequence from the end.
    """

    features: int
    reverse: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gates = nn.Dense(4 * self.features, name="inputs")(x)  # For all steps at once, outside the loop.
        scan = nn.scan(
            Cell,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
            reverse=self.reverse,
        )
        start = jnp.zeros((len(x), self.features))
        _, hidden = scan(self.features, name="cell")((start, start), gates)
        return hidden


class Seq2Seq(nn.Module):
    """A source and the target so far to the logits of the next target token.

    Attributes:
        vocabulary: the number of tokens.
        features: the features of embeddings and hidden states.
        layers: the layers of the encoder, and of the decoder. The first of the encoder reads both ways.
    """

    vocabulary: int = 32000
    features: int = 1024
    layers: int = 4

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Returns the logits of the token after each target token.

        Args:
            source: shape `(batch, source length)`, int32.
            target: shape `(batch, target length)`, int32.

        Returns:
            Shape `(batch, target length, vocabulary)`.
        """
        embed = nn.Embed(self.vocabulary, self.features, name="tokens")
        x = embed(source)
        forward, backward = LSTM(self.features, name="forward"), LSTM(self.features, True, name="backward")
        x = jnp.concatenate([forward(x), backward(x)], axis=-1)
        x = LSTM(self.features, name="encoder_0")(x)
        for layer in range(1, self.layers - 1):
            x = x + LSTM(self.features, name=f"encoder_{layer}")(x)

        # The first layer of the decoder makes the query; all other layers get the context (section 3).
        y = LSTM(self.features, name="decoder_0")(embed(target))
        query, key = nn.Dense(self.features, name="query")(y), nn.Dense(self.features, name="key")(x)
        value = nn.Dense(self.features, name="value")(x)
        context = attention(query[:, :, None], key[:, :, None], value[:, :, None])[:, :, 0]
        for layer in range(1, self.layers):
            inputs = jnp.concatenate([y, context.astype(y.dtype)], axis=-1)
            y = y + LSTM(self.features, name=f"decoder_{layer}")(inputs)
        return nn.Dense(self.vocabulary, name="head")(y)


def loss(logits: jax.Array, target: jax.Array) -> jax.Array:
    """The mean cross entropy of the next tokens, shape `(batch, length)`, without padding."""
    # The gradient of the loss with integer labels is a float32 scatter of the size of the logits.
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(target, logits.shape[-1]))
    return jnp.mean(losses, where=target != PADDING)


def full() -> Workload:
    """GNMT's sizes with four layers, on sequences of 50 random tokens."""

    def batch(rng: np.random.Generator, size: int) -> Batch:
        source = rng.integers(1, 32000, (size, 50), dtype=np.int32)
        target = rng.integers(1, 32000, (size, 51), dtype=np.int32)
        return (source, target[:, :-1]), target[:, 1:]

    return Workload(Seq2Seq(), loss, Optimizer("adamw", 3e-4), 128, batch)


def small() -> Workload:
    """Learns the names of functions from their docstrings, letter by letter."""
    model = Seq2Seq(vocabulary=128, features=48, layers=3)

    def encode(texts: list[str], length: int) -> np.ndarray:
        lines = [text.encode("ascii", "ignore")[: length - 1] + b"\n" for text in texts]
        return np.stack([np.frombuffer(line.ljust(length, b"\0"), np.uint8) for line in lines]).astype(
            np.int32
        )

    def batch(rng: np.random.Generator, size: int) -> Batch:
        pairs = data.docstrings()
        chosen = [pairs[row] for row in rng.integers(0, len(pairs), size)]
        source = encode([doc for doc, _ in chosen], 32)
        target = encode(["\n" + name for _, name in chosen], 16)
        return (source, target[:, :-1]), target[:, 1:]

    return Workload(model, loss, Optimizer("adamw", 5e-3), 32, batch)
