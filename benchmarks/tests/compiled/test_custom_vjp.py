"""The H100 program of a transformer whose attention has a derivative of its own, as flash attention has."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite.programs import compile_for, read_program

WIDTH, HEADS, LENGTH, BATCH, LAYERS = 256, 4, 1024, 4, 2


def attention(half):
    """Attention of one head, a block of queries at a time. The backward rule computes the weights again."""
    cast = lambda x: x if half is None else x.astype(half)

    def scores(q, k):
        return (cast(q) @ cast(k).T).astype(jnp.float32) * q.shape[-1] ** -0.5

    def forward(q, k, v):
        def rows(q):
            s = scores(q, k)
            sums = jax.nn.logsumexp(s, -1, keepdims=True)
            return cast(cast(jnp.exp(s - sums)) @ cast(v)), sums

        out, sums = lax.map(rows, q.reshape(4, -1, q.shape[-1]))
        return out.reshape(q.shape), (q, k, v, out, sums)

    def backward(saved, g):
        q, k, v, out, sums = saved

        def rows(totals, block):
            q, out, sums, g = block
            p = jnp.exp(scores(q, k) - sums)
            dp = (cast(g) @ cast(v).T).astype(jnp.float32)
            inner = jnp.sum(g.astype(jnp.float32) * out, -1, keepdims=True)
            ds = cast(p * (dp - inner) * q.shape[-1] ** -0.5)
            dk, dv = totals
            return (dk + ds.T @ cast(q), dv + cast(p).T @ cast(g)), ds @ cast(k)

        blocks = (q.reshape(out.shape), out, sums, g.reshape(out.shape))
        zeros = jnp.zeros(k.shape, jnp.float32)
        (dk, dv), dq = lax.scan(rows, (zeros, zeros), blocks)
        return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    attend = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    attend.defvjp(forward, backward)
    return jax.vmap(jax.vmap(attend))


def loss(params, x, half=None):
    cast = lambda x: x if half is None else x.astype(half)
    norm = lambda x: cast(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5))
    for layer in params:
        projected = norm(x) @ cast(layer["qkv"])
        heads = (
            head.reshape(BATCH, LENGTH, HEADS, -1).swapaxes(1, 2) for head in jnp.split(projected, 3, -1)
        )
        mixed = attention(half)(*heads).swapaxes(1, 2).reshape(x.shape)
        x = x + mixed @ cast(layer["out"])
        x = x + jax.nn.gelu(norm(x) @ cast(layer["up"])) @ cast(layer["down"])
    return jnp.mean(x**2)


@functools.cache
def program(way):
    half = jnp.bfloat16
    steps = {
        "float32": jax.grad(loss),
        "by hand": jax.grad(functools.partial(loss, half=half)),
        "inside": jax.grad(jmp.autocast(loss, half)),
        "outside": jmp.autocast(jax.grad(loss), half),
    }
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    params = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}] * LAYERS
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    return read_program(compile_for("h100", steps[way], params, x))


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_a_derivative_of_its_own_holds_as_little_as_casts_by_hand(order):
    full, hand, ours = program("float32"), program("by hand"), program(order)
    assert {product.arithmetic for product in full.matmuls} == {"tf32"}
    assert {product.arithmetic for product in ours.matmuls} == {"bf16"}
    assert len(ours.matmuls) == len(hand.matmuls)
    assert ours.kernels <= hand.kernels
    assert ours.bytes_moved <= hand.bytes_moved
    assert ours.temporary_bytes <= 1.02 * hand.temporary_bytes < full.temporary_bytes
