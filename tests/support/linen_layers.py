"""Linen models that together hold every kind of layer, in float32 and without a cast."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.support.policies import IMAGES, SEQUENCE, TOKENS


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.gelu(x)
        x = nn.ConvTranspose(4, (2, 2))(x)
        return nn.Dense(3)(x.mean((1, 2)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, ids, train: bool):
        embed = nn.Embed(11, 16)
        x = embed(ids)
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(ids)
        x += nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=not train)(y, mask=mask)
        y = nn.RMSNorm()(x)
        y = nn.Dense(16)(nn.gelu(nn.Dense(32)(y)))
        x += nn.Dropout(0.1, deterministic=not train)(y)
        return embed.attend(nn.GroupNorm(4)(x))


class Recurrent(nn.Module):
    cell: nn.RNNCellBase
    by_hand: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        del train
        if self.by_hand:
            scan = nn.scan(
                lambda cell, carry, x: cell(carry, x),
                variable_broadcast="params",
                split_rngs={"params": False},
                in_axes=1,
                out_axes=1,
            )
            carry = self.cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
            _, y = scan(self.cell, carry, x)
        else:
            y = nn.RNN(self.cell)(x)
        return nn.Dense(3)(y[:, -1])


class OwnParams(nn.Module):
    """A module that a user wrote: parameters of its own, no dtype."""

    def setup(self):
        self.in_setup = self.param("in_setup", nn.initializers.lecun_normal(), (6, 8))
        self.inner = nn.Dense(5)

    @nn.compact
    def __call__(self, x, train: bool = False):
        del train
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        return self.inner(jnp.tanh(self.encode(x)) @ kernel)

    def encode(self, x):
        return x.astype(self.in_setup.dtype) @ self.in_setup


CELLS = [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.SimpleCell]
MODELS = {
    "convolutions": (ConvNet(), IMAGES),
    "attention": (Transformer(), TOKENS),
    "own parameters": (OwnParams(), SEQUENCE),
    **{f"nn.RNN({cell.__name__})": (Recurrent(cell(8)), SEQUENCE) for cell in CELLS},
    "nn.scan(LSTMCell)": (Recurrent(nn.LSTMCell(8), by_hand=True), SEQUENCE),
    "nn.scan(SimpleCell)": (Recurrent(nn.SimpleCell(8), by_hand=True), SEQUENCE),
}
each_model = pytest.mark.parametrize(("model", "x"), MODELS.values(), ids=MODELS)


def variables_of(model, x):
    variables = model.init(jax.random.key(0), x, train=False)
    return variables["params"], {k: v for k, v in variables.items() if k != "params"}


def loss_fn(params, others, model, x, train):
    """A loss in which every output matters, and the collections after the step."""
    y, others = model.apply(
        {"params": params, **others},
        x,
        train=train,
        rngs={"dropout": jax.random.key(5)},
        mutable=list(others),
    )
    weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
    return jnp.mean(weights * y.astype(jnp.float32)), (y, others)
