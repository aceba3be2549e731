"""Models as users write them, in float32, without a cast: each with a batch, and cast by hand to compare."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_lite as jmp
from jmp_lite.nnx import with_policy

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 2, 8, 17
ROWS = jax.random.normal(jax.random.key(1), (12, 6))
IMAGES = jax.random.normal(jax.random.key(2), (4, 8, 8, 3))
SEQUENCES = jax.random.normal(jax.random.key(3), (4, 7, 6))
TEXT = jax.random.randint(jax.random.key(4), (3, LENGTH), 0, VOCABULARY)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model as a function of its parameters and its state.

    Attributes:
        forward: for NNX of a module and the inputs, to outputs; for the others of parameters, state and
            inputs, to outputs and the new state.
        criterion: the loss, of outputs and targets.
        params: the parameters.
        state: batch statistics and random state; for NNX everything that is no parameter.
        inputs: of the model.
        targets: of the criterion.
        rebuild: for NNX and Equinox, makes the model of `params` and `state`.
    """

    forward: Callable[..., Any]
    criterion: Callable[[Any, Any], jax.Array]
    params: Any
    state: Any
    inputs: Any
    targets: Any
    rebuild: Callable[..., Any] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.params, self.state, self.inputs, self.targets

    def step(self, inner: Any = lambda loss: loss, outer: Any = lambda value_and_grad: value_and_grad) -> Any:
        """Returns (params, state, inputs, targets) -> (loss, gradients, new state).

        Args:
            inner: applied to the loss, in the form that the user of the framework would give to autocast.
            outer: applied to its value_and_grad.
        """

        def loss(params, state, inputs, targets):
            y, new_state = self.forward(params, state, inputs)
            return self.criterion(y, targets), new_state

        def step(params, state, inputs, targets):
            run = outer(jax.value_and_grad(inner(loss), has_aux=True))
            (value, new_state), grads = run(params, state, inputs, targets)
            return value, grads, new_state

        return step

    def by_hand(self, dtype: Any) -> Any:
        """Returns the same step with casts that a user places: parameters and inputs down, outputs up."""
        policy = jmp.get_policy(f"params=float32,compute={jnp.dtype(dtype).name},output=float32")

        def loss(params, state, inputs, targets):
            y, new_state = self.cast_forward(policy, params, state, inputs)
            return self.criterion(policy.cast_to_output(y), targets), new_state

        def step(params, state, inputs, targets):
            (value, new_state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, inputs, targets)
            return value, grads, new_state

        return step

    def cast_forward(self, policy: jmp.Policy, params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        params, inputs = policy.cast_to_compute((params, inputs))
        return self.forward(params, state, inputs)


class NnxCase(Case):
    """NNX: the loss takes the module and changes it in place."""

    def step(self, inner: Any = lambda loss: loss, outer: Any = lambda value_and_grad: value_and_grad) -> Any:
        def loss(module, inputs, targets):
            return self.criterion(self.forward(module, inputs), targets)

        def step(params, state, inputs, targets):
            module = self.rebuild(params, state)
            value, grads = outer(nnx.value_and_grad(inner(loss)))(module, inputs, targets)
            return value, grads, nnx.state(module, nnx.Not(nnx.Param))

        return step

    def cast_forward(self, policy: jmp.Policy, params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        # NNX's layers return the dtype in which their parameters were made, unless `dtype` was set.
        module = with_policy(self.rebuild(params, state), policy)
        y = self.forward(module, inputs)
        return y, nnx.state(module, nnx.Not(nnx.Param))


class EquinoxCase(Case):
    """Equinox: the loss takes a model that holds functions beside arrays."""

    def step(self, inner: Any = lambda loss: loss, outer: Any = lambda value_and_grad: value_and_grad) -> Any:
        def loss(model, inputs, targets):
            return self.criterion(self.forward(model, inputs), targets)

        def step(params, state, inputs, targets):
            model = self.rebuild(params, state)
            value, grads = outer(eqx.filter_value_and_grad(inner(loss)))(model, inputs, targets)
            return value, eqx.filter(grads, eqx.is_array), state

        return step

    def cast_forward(self, policy: jmp.Policy, params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        params, inputs = policy.cast_to_compute((params, inputs))
        return self.forward(self.rebuild(params, state), inputs), state


def weighted_mean(y: jax.Array, targets: None) -> jax.Array:
    """A loss in which every output matters, differently, and never to the other side of zero."""
    return jnp.mean((1.5 + jnp.cos(jnp.arange(y.size)).reshape(y.shape)) * (y - 1) ** 2)


def next_token_loss(logits: jax.Array, text: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()


NEXT_TOKEN = (TEXT, next_token_loss, TEXT)  # Inputs, criterion and targets of a language model.


def linen_case(model: nn.Module, inputs: Any, criterion: Any = weighted_mean, targets: Any = None) -> Case:
    init = jax.jit(model.init)
    variables = init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, inputs)
    params = variables["params"]
    state = {name: value for name, value in variables.items() if name != "params"}

    def forward(params, state, inputs):
        rngs = {"dropout": jax.random.key(5)}
        return model.apply({"params": params, **state}, inputs, rngs=rngs, mutable=list(state))

    return Case(forward, criterion, params, state, inputs, targets)


def nnx_case(
    make: Callable[[nnx.Rngs], nnx.Module], inputs: Any, criterion: Any = weighted_mean, targets: Any = None
) -> Case:
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    whole = jax.jit(lambda: nnx.state(make(nnx.Rngs(0))))()
    params, state = nnx.split_state(whole, nnx.Param, ...)
    # Copied: a step changes the module that it makes, not these.
    rebuild = lambda params, state: nnx.merge(graphdef, params, state, copy=True)
    return NnxCase(lambda module, x: module(x), criterion, params, state, inputs, targets, rebuild)


def equinox_case(model: Any, inputs: Any, criterion: Any = weighted_mean, targets: Any = None) -> Case:
    params, static = eqx.partition(model, eqx.is_array)
    rebuild = lambda params, state: eqx.combine(params, static)
    forward = lambda model, x: jax.vmap(model)(x)
    return EquinoxCase(forward, criterion, params, (), inputs, targets, rebuild)


def written_out_attention(query, key, value, is_causal):
    """What `jax.nn.dot_product_attention` does, for casts by hand in float16: a CPU lacks that."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key).astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


# Multi-layer perceptrons.


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16)(x))
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(4)(x)


class NnxMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.second(nnx.tanh(self.first(x)))))


# Residual networks with batch statistics.


class LinenBlock(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.5)
        y = nn.Conv(self.features, (3, 3), (self.stride, self.stride), use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), (self.stride, self.stride), use_bias=False)(x))
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))
        x = nn.max_pool(x, (2, 2), (1, 1), "SAME")
        x = LinenBlock(8)(x)
        x = LinenBlock(12, stride=2)(x)
        return nn.Dense(5)(x.mean((1, 2)))


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


# Transformers.


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


# Recurrent networks.


class LinenLSTM(nn.Module):
    cell: Any = nn.LSTMCell
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(self.cell(8, dtype=self.dtype))(x)
        return nn.Dense(3, dtype=self.dtype)(x)


class NnxLSTM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, cell: Any = nnx.LSTMCell):
        self.rnn = nnx.RNN(cell(6, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


# U-Nets.


class LinenUNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        skips = []
        for features in (6, 8):
            x = nn.gelu(nn.GroupNorm(2)(nn.Conv(features, (3, 3))(x)))
            skips.append(x)
            x = nn.Conv(features, (3, 3), (2, 2))(x)
        x = nn.gelu(nn.Conv(8, (3, 3))(x))
        for skip in reversed(skips):
            x = nn.ConvTranspose(skip.shape[-1], (2, 2), (2, 2))(x)
            x = jnp.concatenate([x, skip], axis=-1)
            x = nn.gelu(nn.Conv(skip.shape[-1], (3, 3))(x))
        return nn.Conv(2, (1, 1))(x)


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


# Mixtures of experts: each token goes to one of three, sorted by expert for the ragged products.


def experts(x, gates, up, down):
    chosen = jnp.argmax(gates, axis=-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=up.shape[0])
    y = nn.gelu(jax.lax.ragged_dot(x[order], up, sizes))
    y = jax.lax.ragged_dot(y, down, sizes)[jnp.argsort(order)]
    return y * jnp.take_along_axis(gates, chosen[:, None], axis=-1)


class LinenExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal(batch_axis=0)
        up, down = self.param("up", init, (3, 8, 16)), self.param("down", init, (3, 16, 8))
        x = nn.Dense(8)(x)
        gates = nn.softmax(nn.Dense(3, use_bias=False)(x))
        x = x + experts(x, gates, up, down)
        return nn.Dense(4)(nn.LayerNorm()(x))


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


# Equinox and Haiku.


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


# A transformer in JAX alone, its layers in a scan.


def plain_transformer(params, text, attention=jax.nn.dot_product_attention, remat=False):
    def layer_norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return scale * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def layer(x, block):
        y = layer_norm(x, block["norms"][0]) @ block["project"]
        y = y.reshape(*x.shape[:-1], 3 * HEADS, -1)
        x = x + attention(*jnp.split(y, 3, axis=-2), is_causal=True).reshape(x.shape) @ block["merge"]
        y = jax.nn.gelu(layer_norm(x, block["norms"][1]) @ block["expand"] + block["bias"])
        return x + y @ block["contract"], None

    x = params["embed"][text]
    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["blocks"])
    return layer_norm(x, params["norm"]) @ params["embed"].T


def plain_case(attention: Any = jax.nn.dot_product_attention, layers: int = 3, remat: bool = True) -> Case:
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
    forward = lambda params, _, text: (plain_transformer(params, text, attention, remat), ())
    return Case(forward, next_token_loss, params, (), TEXT, TEXT)


def _attention(hand_dtype: Any) -> Any:
    return written_out_attention if hand_dtype == jnp.float16 else jax.nn.dot_product_attention


def _linen_transformer(hand_dtype: Any, **options: Any) -> Case:
    model = LinenTransformer(_attention(hand_dtype), **options)
    return linen_case(model, *NEXT_TOKEN)


def _nnx_transformer(hand_dtype: Any, **options: Any) -> Case:
    return nnx_case(lambda rngs: NnxTransformer(rngs, _attention(hand_dtype), **options), *NEXT_TOKEN)


# Each is built for a dtype that casts by hand will use: None for the model as it is. A recurrent network
# needs it, since its initial carry is float32, and so does attention in float16.
CASES: dict[str, Callable[[Any], Case]] = {
    "Linen MLP": lambda _: linen_case(LinenMLP(), ROWS),
    "NNX MLP": lambda _: nnx_case(NnxMLP, ROWS),
    "Linen ResNet": lambda _: linen_case(LinenResNet(), IMAGES),
    "NNX ResNet": lambda _: nnx_case(NnxResNet, IMAGES),
    "Linen transformer, tied": lambda dtype: _linen_transformer(dtype, tied=True),
    "Linen transformer, rematerialized": lambda dtype: _linen_transformer(dtype, tied=False, remat=True),
    "Linen transformer, scanned": lambda dtype: _linen_transformer(dtype, scanned=True, layers=3),
    "Linen transformer, scanned and rematerialized": lambda dtype: _linen_transformer(
        dtype, scanned=True, remat=True, layers=3
    ),
    "NNX transformer": lambda dtype: _nnx_transformer(dtype),
    "NNX transformer, tied and rematerialized": lambda dtype: _nnx_transformer(dtype, tied=True, remat=True),
    "JAX transformer, scanned": lambda dtype: plain_case(_attention(dtype), remat=False),
    "JAX transformer, scanned and rematerialized": lambda dtype: plain_case(_attention(dtype)),
    "Linen LSTM": lambda dtype: linen_case(LinenLSTM(dtype=dtype), SEQUENCES),
    "Linen optimized LSTM": lambda dtype: linen_case(LinenLSTM(nn.OptimizedLSTMCell, dtype), SEQUENCES),
    "NNX LSTM": lambda _: nnx_case(NnxLSTM, SEQUENCES),
    "NNX optimized LSTM": lambda _: nnx_case(lambda rngs: NnxLSTM(rngs, nnx.OptimizedLSTMCell), SEQUENCES),
    "Linen U-Net": lambda _: linen_case(LinenUNet(), IMAGES),
    "NNX U-Net": lambda _: nnx_case(NnxUNet, IMAGES),
    "Linen experts": lambda _: linen_case(LinenExperts(), ROWS),
    "NNX experts": lambda _: nnx_case(NnxExperts, ROWS),
    "Equinox MLP": lambda _: equinox_case(eqx.nn.MLP(6, 4, 16, 2, key=jax.random.key(0)), ROWS),
    "Equinox transformer": lambda _: equinox_case(EquinoxTransformer(jax.random.key(0)), *NEXT_TOKEN),
    "Haiku network": lambda _: haiku_case(),
}
