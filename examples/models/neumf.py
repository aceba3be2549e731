"""Neural matrix factorization (He et al., 2017, "Neural Collaborative Filtering")."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .workload import Batch, Optimizer, Workload


class NeuMF(nn.Module):
    """A user and an item to the logit of whether they go together.

    Attributes:
        users, items: the numbers of users and items.
        factors: the size of the generalized matrix factorization.
        layers: the widths of the perceptron. The first is the width of its two embeddings together.
    """

    users: int = 138_493  # MovieLens 20M
    items: int = 26_744
    factors: int = 64
    layers: Sequence[int] = (256, 256, 128, 64)

    @nn.compact
    def __call__(self, users: jax.Array, items: jax.Array) -> jax.Array:
        """Maps users and items, both `(batch,)`, int32, to logits `(batch,)`."""
        small = nn.initializers.normal(0.05)
        embed = lambda count, width, name: nn.Embed(count, width, embedding_init=small, name=name)
        width = self.layers[0] // 2
        product = embed(self.users, self.factors, "user_factors")(users)
        product = product * embed(self.items, self.factors, "item_factors")(items)
        pair = (
            embed(self.users, width, "user_embedding")(users),
            embed(self.items, width, "item_embedding")(items),
        )
        x = jnp.concatenate(pair, axis=-1)
        for index, features in enumerate(self.layers[1:]):
            x = nn.relu(nn.Dense(features, name=f"layers_{index}")(x))
        return nn.Dense(1, name="head")(jnp.concatenate([product, x], axis=-1))[:, 0]


def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean binary cross entropy of labels 0 or 1, float32, shape `(batch,)`."""
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def full() -> Workload:
    """MovieLens 20M's sizes, on random pairs."""
    model = NeuMF()

    def batch(rng: np.random.Generator, size: int) -> Batch:
        users = rng.integers(0, model.users, size, dtype=np.int32)
        items = rng.integers(0, model.items, size, dtype=np.int32)
        return (users, items), rng.integers(0, 2, size).astype(np.float32)

    return Workload(model, loss, Optimizer("adam", 5e-3), 2**20, batch)


def small() -> Workload:
    """Learns which names the modules of the standard library use. Half of the pairs are used."""
    counts = data.name_counts()
    model = NeuMF(*counts.shape, factors=8, layers=(32, 32, 16))
    modules, names = np.nonzero(counts)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        used = rng.integers(0, len(modules), size // 2)
        users = np.concatenate([modules[used], rng.integers(0, model.users, size - size // 2)])
        items = np.concatenate([names[used], rng.integers(0, model.items, size - size // 2)])
        return (users.astype(np.int32), items.astype(np.int32)), (counts[users, items] > 0).astype(np.float32)

    return Workload(model, loss, Optimizer("adam", 5e-3), 512, batch)
