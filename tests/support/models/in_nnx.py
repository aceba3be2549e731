"""NNX models: a perceptron, a ResNet, a transformer, an LSTM, a U-Net and experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .cases import HEADS, LENGTH, VOCABULARY, WIDTH
from .experts import experts


class NnxMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.second(nnx.tanh(self.first(x)))))


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
        remat: bool = False,
        tied: bool = False,
        width: int = WIDTH,
        heads: int = HEADS,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
    ):
        self.remat = remat
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([NnxAttentionBlock(rngs, attention, width, heads) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = None if tied else nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text) + self.positions[...]
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x) if self.remat else block(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class NnxLSTM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, cell: Any = nnx.LSTMCell):
        self.rnn = nnx.RNN(cell(6, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


class NnxUNet(nnx.Module):
    """The other usual way up: nearest neighbours, then a convolution."""

    def __init__(self, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, rngs=rngs)
        self.down = nnx.List([conv(3, 6, (3, 3)), conv(6, 8, (3, 3))])
        self.strided = nnx.List([conv(6, 6, (3, 3), strides=2), conv(8, 8, (3, 3), strides=2)])
        self.norms = nnx.List([nnx.GroupNorm(6, num_groups=2, rngs=rngs), nnx.GroupNorm(8, 2, rngs=rngs)])
        self.middle = conv(8, 8, (3, 3))
        self.up = nnx.List([conv(16, 8, (3, 3)), conv(14, 6, (3, 3))])
        self.head = conv(6, 2, (1, 1))

    def __call__(self, x):
        skips = []
        for conv, norm, strided in zip(self.down, self.norms, self.strided):
            x = nnx.gelu(norm(conv(x)))
            skips.append(x)
            x = strided(x)
        x = nnx.gelu(self.middle(x))
        for conv, skip in zip(self.up, reversed(skips)):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = nnx.gelu(conv(jnp.concatenate([x, skip], axis=-1)))
        return self.head(x)


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
