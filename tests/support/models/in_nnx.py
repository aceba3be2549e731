"""NNX models: a ResNet, a transformer and a mixture of experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .cases import HEADS, LENGTH, VOCABULARY, WIDTH


class NnxBlock(nnx.Module):
    def __init__(self, before: int, features: int, stride: int, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, features, momentum=0.5, rngs=rngs)
        self.first, self.first_norm = conv(before, features, (3, 3), strides=stride), norm()
        self.second, self.second_norm = conv(features, features, (3, 3)), norm()
        shortcut = [conv(before, features, (1, 1), strides=stride), norm()] if stride > 1 else []
        self.shortcut = nnx.List(shortcut)

    def __call__(self, x):
        y = nnx.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        for layer in self.shortcut:
            x = layer(x)
        return nnx.relu(x + y)


class NnxResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(8, 8, 1, rngs), NnxBlock(8, 12, 2, rngs)])
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.max_pool(x, (2, 2), (1, 1), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class NnxAttentionBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, attention: Any, width: int, heads: int):
        self.attention, self.heads = attention, heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.project = nnx.Linear(width, 3 * width, rngs=rngs)
        self.merge = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        y = self.project(self.attention_norm(x)).reshape(*x.shape[:-1], 3 * self.heads, -1)
        y = self.attention(*jnp.split(y, 3, axis=-2), is_causal=True)
        x = x + self.merge(y.reshape(x.shape))
        y = self.contract(nnx.gelu(self.expand(self.norm(x))))
        return x + self.dropout(y)


class NnxTransformer(nnx.Module):
    def __init__(
        self,
        rngs: nnx.Rngs,
        attention: Any = jax.nn.dot_product_attention,
        layers: int = 2,
        width: int = WIDTH,
        heads: int = HEADS,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
    ):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([NnxAttentionBlock(rngs, attention, width, heads) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def experts(x, gates, up, down):
    """A mixture of experts: each token goes to one of three, sorted by expert for the ragged products."""
    chosen = jnp.argmax(gates, axis=-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=up.shape[0])
    y = nnx.gelu(jax.lax.ragged_dot(x[order], up, sizes))
    y = jax.lax.ragged_dot(y, down, sizes)[jnp.argsort(order)]
    return y * jnp.take_along_axis(gates, chosen[:, None], axis=-1)


class NnxExperts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.up = nnx.Param(init(rngs.params(), (3, 8, 16)))
        self.down = nnx.Param(init(rngs.params(), (3, 16, 8)))
        self.embed = nnx.Linear(6, 8, rngs=rngs)
        self.router = nnx.Linear(8, 3, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        x = x + experts(x, nnx.softmax(self.router(x)), self.up[...], self.down[...])
        return self.head(self.norm(x))
