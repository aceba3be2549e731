"""Linen models of odd structures: rematerialized, scanned, with dropout, of Flax's own cells."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .cases import HEADS, LENGTH, VOCABULARY, WIDTH


class LinenAttentionBlock(nn.Module):
    attention: Callable[..., Any]
    width: int = WIDTH
    heads: int = HEADS

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        query, key, value = jnp.split(
            nn.DenseGeneral((3 * self.heads, self.width // self.heads))(y), 3, axis=-2
        )
        y = self.attention(query, key, value, is_causal=True)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1))(y)
        y = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        x = x + nn.Dropout(0.25, deterministic=False)(y)
        return x if _ is None else (x, None)


class LinenTransformer(nn.Module):
    attention: Callable[..., Any] = jax.nn.dot_product_attention
    layers: int = 2
    remat: bool = False
    scanned: bool = False
    tied: bool = True
    width: int = WIDTH
    heads: int = HEADS

    @nn.compact
    def __call__(self, text):
        embed = nn.Embed(VOCABULARY, self.width)
        x = embed(text) + self.param("positions", nn.initializers.normal(0.1), (LENGTH, self.width))
        block = nn.remat(LinenAttentionBlock) if self.remat else LinenAttentionBlock
        if self.scanned:
            scan = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=0,
                length=self.layers,
            )
            x, _ = scan(self.attention, self.width, self.heads)(x, jnp.arange(self.layers))
        else:
            for _ in range(self.layers):
                x = block(self.attention, self.width, self.heads)(x)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCABULARY)(x)


class LinenLSTM(nn.Module):
    cell: Any = nn.LSTMCell
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(self.cell(8, dtype=self.dtype))(x)
        return nn.Dense(3, dtype=self.dtype)(x)
