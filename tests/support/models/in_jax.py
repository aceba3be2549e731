"""Models of Equinox, of Haiku and of JAX alone."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .cases import HEADS, IMAGES, TEXT, VOCABULARY, WIDTH, Case, next_token_loss, weighted_mean


class EquinoxTransformer(eqx.Module):
    """Of one sequence; `jax.vmap` makes the batch."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    network: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[1])
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.network = eqx.nn.MLP(WIDTH, WIDTH, 32, 2, activation=jax.nn.gelu, key=keys[2])
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[3])

    def __call__(self, text):
        x = jax.vmap(self.embed)(text)
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(text.shape[0], dtype=bool))
        x = x + jax.vmap(self.network)(jax.vmap(self.norms[1])(x))
        return jax.vmap(self.head)(x)


def haiku_case() -> Case:
    import haiku as hk

    def network(x):
        x = hk.Conv2D(8, 3, with_bias=False)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, decay_rate=0.5)(x, is_training=True))
        x = hk.Conv2D(8, 3, stride=2)(x)
        x = hk.LayerNorm(-1, True, True)(x.reshape(x.shape[0], -1, 8))
        x = x + hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))(x, x, x)
        x, _ = hk.dynamic_unroll(hk.LSTM(6), jnp.swapaxes(x, 0, 1), hk.LSTM(6).initial_state(x.shape[0]))
        x = hk.dropout(hk.next_rng_key(), 0.25, x)
        return hk.Linear(3)(x)

    model = hk.transform_with_state(network)
    params, state = jax.jit(model.init)(jax.random.key(0), IMAGES)
    forward = lambda params, state, x: model.apply(params, state, jax.random.key(5), x)
    return Case(forward, weighted_mean, params, state, IMAGES, None)


def plain_transformer(params, text, attention):
    def layer_norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return scale * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def layer(x, block):
        y = layer_norm(x, block["norms"][0]) @ block["project"]
        y = y.reshape(*x.shape[:-1], 3 * HEADS, -1)
        x = x + attention(*jnp.split(y, 3, axis=-2), is_causal=True).reshape(x.shape) @ block["merge"]
        y = jax.nn.gelu(layer_norm(x, block["norms"][1]) @ block["expand"] + block["bias"])
        return x + y @ block["contract"], None

    x = params["embed"][text]
    x, _ = jax.lax.scan(layer, x, params["blocks"])
    return layer_norm(x, params["norm"]) @ params["embed"].T


def plain_case(attention: Any, layers: int = 3) -> Case:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    init = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])
    blocks = {
        "project": init(layers, WIDTH, 3 * WIDTH),
        "merge": init(layers, WIDTH, WIDTH),
        "expand": init(layers, WIDTH, 4 * WIDTH),
        "contract": init(layers, 4 * WIDTH, WIDTH),
        "bias": jnp.zeros((layers, 4 * WIDTH)),
        "norms": jnp.ones((layers, 2, WIDTH)),
    }
    params = {"embed": init(VOCABULARY, WIDTH), "blocks": blocks, "norm": jnp.ones(WIDTH)}
    forward = lambda params, _, text: (plain_transformer(params, text, attention), ())
    return Case(forward, next_token_loss, params, (), TEXT, TEXT)
