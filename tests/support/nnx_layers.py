"""NNX models that together hold every kind of layer, in float32 and without a cast."""

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.support.jaxprs import products
from tests.support.policies import IMAGES, SEQUENCE, TOKENS


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2, 2), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.up(nnx.gelu(self.bn(self.conv(x))))
        return self.head(x.mean((1, 2)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(11, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, dropout_rate=0.1, decode=False, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)])
        self.rms = nnx.RMSNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.group = nnx.GroupNorm(16, num_groups=4, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x += self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        x += self.dropout(self.layers[1](nnx.gelu(self.layers[0](self.rms(x)))))
        return self.embed.attend(self.group(x))


class Recurrent(nnx.Module):
    def __init__(self, cell, rngs: nnx.Rngs, by_hand: bool = False):
        self.cell = cell(6, 8, rngs=rngs)
        self.rnn = None if by_hand else nnx.RNN(self.cell, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        if self.rnn is not None:
            return self.head(self.rnn(x)[:, -1])
        carry = self.cell.initialize_carry(x[:, 0].shape, nnx.Rngs(0))
        scan = nnx.scan(
            lambda carry, cell, x: cell(carry, x), in_axes=(nnx.Carry, None, 1), out_axes=(nnx.Carry, 1)
        )
        return self.head(scan(carry, self.cell, x)[1][:, -1])


class OwnParams(nnx.Module):
    """A module that a user wrote: parameters of its own, no dtype."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (6, 8)))
        self.more = nnx.List([nnx.Param(init(rngs.params(), (8, 8))), nnx.Linear(8, 8, rngs=rngs)])
        self.calls = nnx.Variable(jnp.int32(0))

    def encode(self, x):
        return x.astype(self.kernel.dtype) @ self.kernel

    def __call__(self, x):
        self.calls[...] += 1
        return self.more[1](jnp.tanh(self.encode(x)) @ self.more[0])


CELLS = [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]
MODELS = {
    "convolutions": (ConvNet, IMAGES),
    "attention": (Transformer, TOKENS),
    "own parameters": (OwnParams, SEQUENCE),
    **{f"nnx.RNN({cell.__name__})": (lambda rngs, c=cell: Recurrent(c, rngs), SEQUENCE) for cell in CELLS},
    "nnx.scan(LSTMCell)": (lambda rngs: Recurrent(nnx.LSTMCell, rngs, by_hand=True), SEQUENCE),
    "nnx.scan(SimpleCell)": (lambda rngs: Recurrent(nnx.SimpleCell, rngs, by_hand=True), SEQUENCE),
}
each_model = pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS)


def loss_fn(model, x):
    """A loss in which every output matters."""
    y = model(x)
    weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
    return jnp.mean(weights * y.astype(jnp.float32)), y


def products_of_grad(model, x):
    """The operand dtypes of all products in the forward and backward pass."""
    model.train()
    graphdef, state = nnx.split(model)
    grad = lambda state, x: nnx.grad(loss_fn, has_aux=True)(nnx.merge(graphdef, state), x)[0]
    return products(grad, state, x)
