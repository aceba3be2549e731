"""Small models over the transforms of Flax, whose layers take a `dtype` by hand or get it from a policy.

A model has the layers `dense`, `norm` and `last` in a `block`, which a transform of Flax runs. Its input is
float32, integer (an embedding), or float timesteps around 1000, which become sines in float32.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.support.arrays import integers, normal

INPUTS = {
    "float32": normal(1, 4, 6),
    "integer": integers(2, 11, 4),
    "timesteps": jnp.array([999.0, 937.0, 833.0, 625.0]),
}
RULES: dict[str, dict[str, str]] = {
    "no rule": {},
    "the norm": {"**/norm": "float32"},
    "the last layer": {"**/last": "float32"},
    "the stack": {"block": "float32"},
}
FREQUENCIES = jnp.exp(-jnp.arange(3.0))


def dtype_by_hand(half: Any, rule: str, name: str) -> Any:
    """Returns the `dtype` that someone would give the layer `name` in place of a policy and its rule."""
    kept = {"no rule": (), "the norm": ("norm",), "the last layer": ("last",)}
    in_block = ("dense", "norm", "last")
    return None if half is None else jnp.float32 if name in kept.get(rule, in_block) else half


def angles(t: jax.Array) -> jax.Array:
    """Returns sines and cosines of timesteps, as diffusion models compute them."""
    t = t[:, None] * FREQUENCIES
    return jnp.concatenate([jnp.sin(t), jnp.cos(t)], axis=-1)


# Linen


class LinenBlock(nn.Module):
    """One step, from a carry to a carry. `half` and `rule` stand for casts by hand."""

    half: Any = None
    rule: str = "no rule"
    attends: bool = False

    @nn.compact
    def __call__(self, carry: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        dtype = lambda name: dtype_by_hand(self.half, self.rule, name)
        x = carry
        if self.attends:
            x = nn.Conv(6, (3,), dtype=dtype("dense"), name="conv")(x)
            x = nn.MultiHeadDotProductAttention(2, dtype=dtype("dense"), name="attention")(x)
        x = jnp.tanh(nn.Dense(8, dtype=dtype("dense"), name="dense")(x))
        x = nn.Dense(6, dtype=dtype("last"), name="last")(x)
        x = nn.LayerNorm(dtype=dtype("norm"), name="norm")(carry + x)
        return (x if self.half is None else x.astype(carry.dtype)), None


def _once(module: nn.Module, x: jax.Array) -> jax.Array:
    return module(x)[0]


def _linen_scan(block: Any, x: jax.Array, **fields: Any) -> jax.Array:
    scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return scan(name="block", **fields)(x, None)[0]


def _linen_scan_of_function(block: Any, x: jax.Array, **fields: Any) -> jax.Array:
    step = lambda module, carry, _: module(carry)
    scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, length=3)
    return scan(block(name="block", **fields), x, None)[0]


def _linen_vmap(block: Any, x: jax.Array, **fields: Any) -> jax.Array:
    mapped = nn.vmap(block, variable_axes={"params": None}, split_rngs={"params": False})
    return mapped(name="block", **fields)(x)[0]


def _linen_while(block: Any, x: jax.Array, **fields: Any) -> jax.Array:
    module = block(name="block", **fields)
    if module.is_initializing():
        return _once(module, x)
    step = lambda module, carry: (_once(module, carry[0]), carry[1] + 1)
    return nn.while_loop(lambda _, carry: carry[1] < 3, step, module, (x, 0))[0]


def _linen_cond(block: Any, x: jax.Array, **fields: Any) -> jax.Array:
    module = block(name="block", **fields)
    if module.is_initializing():
        return _once(module, x)
    return nn.cond(x[0, 0] < 9, _once, lambda module, x: 2 * x, module, x)


def _linen_switch(block: Any, x: jax.Array, **fields: Any) -> jax.Array:
    module = block(name="block", **fields)
    if module.is_initializing():
        return _once(module, x)
    return nn.switch(1, [lambda module, x: x, _once, lambda module, x: _once(module, 2 * x)], module, x)


LINEN = {
    "plain": lambda block, x, **fields: _once(block(name="block", **fields), x),
    "remat": lambda block, x, **fields: _once(nn.remat(block)(name="block", **fields), x),
    "jit": lambda block, x, **fields: _once(nn.jit(block)(name="block", **fields), x),
    "scan": _linen_scan,
    "scan of a function": _linen_scan_of_function,
    "scan of attention": functools.partial(_linen_scan, attends=True),
    "vmap": _linen_vmap,
    "while_loop": _linen_while,
    "cond": _linen_cond,
    "switch": _linen_switch,
}


class LinenModel(nn.Module):
    """A model of blocks, with batch statistics, a parameter of its own, and results that are not floating."""

    transform: str
    half: Any = None
    rule: str = "no rule"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> dict[str, jax.Array]:
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            x = nn.Embed(11, 6, dtype=self.half, name="embed")(inputs)
        else:
            x = angles(inputs) if inputs.ndim == 1 else inputs
        x = LINEN[self.transform](LinenBlock, x, half=self.half, rule=self.rule)
        x = nn.BatchNorm(use_running_average=False, dtype=self.half, name="statistics")(x)
        scale = self.param("scale", nn.initializers.normal(1.0), (6,))
        scale = scale if self.half is None else scale.astype(self.half)
        y = nn.Dense(3, dtype=self.half, name="head")(x * scale)
        return {"y": y.astype(jnp.float32), "ids": jnp.int32(7) + (0 * inputs).astype(jnp.int32), "ok": y > 9}


# NNX


class NnxBlock(nnx.Module):
    """As `LinenBlock`, from an array to an array."""

    def __init__(self, half: Any, rule: str, attends: bool, rngs: nnx.Rngs) -> None:
        dtype = lambda name: dtype_by_hand(half, rule, name)
        self.half = half
        self.conv = nnx.Conv(6, 6, (3,), dtype=dtype("dense"), rngs=rngs) if attends else None
        if attends:
            self.attention = nnx.MultiHeadAttention(2, 6, dtype=dtype("dense"), decode=False, rngs=rngs)
        self.dense = nnx.Linear(6, 8, dtype=dtype("dense"), rngs=rngs)
        self.last = nnx.Linear(8, 6, dtype=dtype("last"), rngs=rngs)
        self.norm = nnx.LayerNorm(6, dtype=dtype("norm"), rngs=rngs)

    def __call__(self, carry: jax.Array) -> jax.Array:
        x = carry if self.conv is None else self.attention(self.conv(carry))
        x = self.norm(carry + self.last(jnp.tanh(self.dense(x))))
        return x if self.half is None else x.astype(carry.dtype)


def _nnx_while(block: NnxBlock, x: jax.Array) -> jax.Array:
    step = lambda carry: (carry[0], carry[0](carry[1]), carry[2] + 1)
    return nnx.while_loop(lambda carry: carry[2] < 3, step, (block, x, 0))[1]


_scan = nnx.scan(lambda carry, block: block(carry), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
NNX = {
    "plain": lambda block, x: block(x),
    "remat": lambda block, x: nnx.remat(lambda block, x: block(x))(block, x),
    "jit": lambda block, x: nnx.jit(lambda block, x: block(x))(block, x),
    "vmap": lambda block, x: nnx.vmap(lambda block, x: block(x), in_axes=(None, 0))(block, x),
    "scan": lambda block, x: _scan(x, block),
    "scan of attention": lambda block, x: _scan(x, block),
    "fori_loop": lambda block, x: nnx.fori_loop(0, 3, lambda _, v: (v[0], v[0](v[1])), (block, x))[1],
    "while_loop": _nnx_while,
    "cond": lambda block, x: nnx.cond(x[0, 0] < 9, lambda b, x: b(x), lambda b, x: 2 * x, block, x),
}


class NnxModel(nnx.Module):
    """As `LinenModel`."""

    def __init__(self, transform: str, half: Any = None, rule: str = "no rule") -> None:
        self.transform, self.half, rngs = transform, half, nnx.Rngs(0)
        self.embed = nnx.Embed(11, 6, dtype=half, rngs=rngs)
        attends, is_scan = transform == "scan of attention", transform.startswith("scan")
        block = lambda key: NnxBlock(half, rule, attends, nnx.Rngs(key))
        self.block = nnx.vmap(block)(jax.random.split(jax.random.key(0), 3)) if is_scan else block(0)
        self.statistics = nnx.BatchNorm(6, dtype=half, rngs=rngs)
        self.scale = nnx.Param(normal(3, 6))
        self.head = nnx.Linear(6, 3, dtype=half, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> dict[str, jax.Array]:
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            x = self.embed(inputs)
        else:
            x = angles(inputs) if inputs.ndim == 1 else inputs
        x = self.statistics(NNX[self.transform](self.block, x))
        y = self.head(x * (self.scale if self.half is None else self.scale.astype(self.half)))
        return {"y": y.astype(jnp.float32), "ids": jnp.int32(7) + (0 * inputs).astype(jnp.int32), "ok": y > 9}


# Either library as a function


def make(library: str, transform: str, inputs: str, half: Any = None, rule: str = "no rule") -> Any:
    """Returns the model of a library, its parameters and its statistics."""
    if library == "NNX":
        model = NnxModel(transform, half, rule)
        return model, nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    model = LinenModel(transform, half, rule)
    variables = model.init(jax.random.key(0), INPUTS[inputs])
    return model, variables["params"], {"batch_stats": variables["batch_stats"]}


def run(model: Any, params: Any, statistics: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
    """Returns a loss, and the results of a model with its new statistics."""
    if isinstance(model, nn.Module):
        outputs, statistics = model.apply({"params": params, **statistics}, inputs, mutable=["batch_stats"])
    else:
        # A copy of the variables belongs to this trace, in which the call may change them.
        copy = nnx.merge(nnx.graphdef(model), *jax.tree.map(lambda leaf: leaf, (params, statistics)))
        outputs = copy(inputs)
        statistics = nnx.state(copy, nnx.Not(nnx.Param))
    y = outputs["y"]
    return jnp.sum(jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y), (outputs, statistics)
