"""Small arrays and layers from which the tests of autocast make their programs."""

import jax
import jax.numpy as jnp
import numpy as np

import jmp_lite as jmp

HALVES = ["float16", "bfloat16"]
ORDERS = ["inside", "outside"]
_numbers = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(_numbers.normal(size=shape) * scale, jnp.float32)


W, V, X = normal(8, 8, scale=0.35), normal(8, 8, scale=0.35), normal(4, 8)
B, STACK = normal(8), normal(3, 8, 8, scale=0.35)
PARAMS = {"w": W, "v": V, "b": B}


def layer(x, w, b):
    return jnp.tanh(x @ w + b)


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def with_vjp(fun):
    """The function with a `custom_vjp`, which computes the function again in its backward rule."""
    ruled = jax.custom_vjp(fun)
    ruled.defvjp(lambda *args: (fun(*args), args), lambda saved, g: jax.vjp(fun, *saved)[1](g))
    return ruled


def with_jvp(fun):
    """The function with a `custom_jvp`."""
    ruled = jax.custom_jvp(fun)
    ruled.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return ruled


def in_mesh(fun, devices):
    """The function of (x, w, b) in a `shard_map` that splits the rows of `x`."""
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("d",), axis_types=kinds, devices=jax.devices()[:devices])
    rows, whole = jax.P("d"), jax.P()
    return jax.shard_map(fun, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def value_and_grad(fun, half, order):
    """The value and the gradients of the sum of the sines of `fun`'s outputs, in one of both orders."""

    def loss(f):
        return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*args)))

    if order == "inside":
        return jax.value_and_grad(loss(jmp.autocast(fun, half)), (0, 1, 2))
    return jmp.autocast(jax.value_and_grad(loss(fun), (0, 1, 2)), half)
