"""The programs of the laws: small losses of public kinds, each with parameters and data of its own.

A program is a function of a dictionary of parameters and a dictionary of data, and returns a loss. Its parts
stand in the scopes `body` and `head`, which the options of the laws name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

BATCH, WIDTH = 4, 8


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, and how to make what it takes from a seed."""

    loss: Callable[[dict[str, Any], dict[str, Any]], jax.Array]
    arguments: Callable[[int], tuple[dict[str, Any], dict[str, Any]]]


PROGRAMS: dict[str, Program] = {}


def _program(*params: str, **more: Callable[[Any], Any]):
    """Registers a loss with its parameters: weights by name, and functions of a generator for others.

    Every program has data `x` of shape (BATCH, WIDTH) and labels `y` of shape (BATCH,).
    """

    def register(loss):
        def arguments(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
            rng = np.random.default_rng(seed)
            normal = lambda *shape, scale=1.0: jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)
            made = {name: normal(WIDTH, WIDTH, scale=WIDTH**-0.5) for name in params}
            made |= {name: make(normal) for name, make in more.items()}
            x, y = normal(BATCH, WIDTH), jnp.asarray(rng.integers(0, WIDTH, BATCH), jnp.int32)
            return made, {"x": x, "y": y}

        PROGRAMS[loss.__name__] = Program(loss, arguments)
        return loss

    return register


body, head = (lambda: jax.named_scope("body")), (lambda: jax.named_scope("head"))
_vector = lambda normal: normal(WIDTH, scale=0.3)
_gain = lambda normal: 1 + normal(WIDTH, scale=0.1)
_stack = lambda normal: normal(3, WIDTH, WIDTH, scale=WIDTH**-0.5)
_kernel = lambda normal: normal(3, WIDTH, WIDTH, scale=(3 * WIDTH) ** -0.5)


def _cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _squares(x):
    return jnp.mean(jnp.square(x))


def _norm(x, gain, bias):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * gain + bias


@_program("w", "v", "u", b=_vector)
def residual_mlp(p, d):
    x = d["x"] @ p["u"]
    with body():
        x = x + jax.nn.gelu(x @ p["w"] + p["b"]) @ p["v"]
        x = x + jax.nn.relu(x @ p["v"]) @ p["w"]
    with head():
        return _cross_entropy(x @ p["u"], d["y"])


def _attention(q, k, v, mask, heads):
    split = lambda x: x.reshape(BATCH, -1, WIDTH // heads).swapaxes(0, 1)
    q, k, v = map(split, (q, k, v))
    k, v = (jnp.repeat(x, q.shape[0] // x.shape[0], axis=0) for x in (k, v))
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / (WIDTH // heads) ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("hqk,hkd->hqd", weights, v).swapaxes(0, 1).reshape(BATCH, WIDTH)


@_program("q", "k", "v", "o")
def attention(p, d):
    x, mask = d["x"], jnp.tril(jnp.ones((BATCH, BATCH), bool))
    with body():
        x = x + _attention(x @ p["q"], x @ p["k"], x @ p["v"], mask, heads=2) @ p["o"]
    with head():
        return _squares(x)


@_program("q", "o", kv=lambda normal: normal(WIDTH, 4, scale=WIDTH**-0.5))
def grouped_attention(p, d):
    """Two query heads share one head of keys, which is not differentiated: frozen and known by the data."""
    x, mask = d["x"], jnp.tril(jnp.ones((BATCH, BATCH), bool))
    frozen = lax.stop_gradient(x @ p["kv"])
    scores_of = lambda q, k: jnp.einsum("qhd,kd->hqk", q.reshape(BATCH, 2, 4), k)
    with body():
        scores = scores_of(x @ p["q"], x @ p["kv"]) + scores_of(d["x"], frozen)
        weights = jax.nn.softmax(jnp.where(mask, scores / 2, -jnp.inf))
        mixed = jnp.einsum("hqk,kd->qhd", weights, x @ p["kv"]).reshape(BATCH, WIDTH)
    with head():
        return _squares(x + mixed @ p["o"])


@_program("w", "v", g=_gain, b=_vector)
def norms(p, d):
    x = d["x"]
    with body():
        x = x + jax.nn.silu(_norm(x, p["g"], p["b"]) @ p["w"]) @ p["v"]
    with head():
        return _squares(_norm(x, p["g"], p["b"]) @ p["v"])


@_program("w", kernel=_kernel, g=_gain, b=_vector)
def convolution(p, d):
    """A convolution with the statistics of its batch."""
    with body():
        x = lax.conv_general_dilated(
            d["x"][None], p["kernel"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
        mean = x.mean((0, 1))
        variance = jnp.maximum(0.0, jnp.mean(jnp.square(x), (0, 1)) - jnp.square(mean))
        x = jax.nn.relu((x - mean) * (lax.rsqrt(variance + 1e-5) * p["g"]) + p["b"])
    with head():
        return _squares(x.mean((0, 1)) @ p["w"])


@_program("w", "v", stack=_stack, b=_vector)
def scanned_layers(p, d):
    """A scan whose carry has an activation, a counter, a running maximum and a half value."""

    def step(carry, w):
        x, count, largest, half = carry
        x = x + jnp.tanh(x @ w + p["b"])
        return (x, count + 1, jnp.maximum(largest, jnp.abs(x).max()), half + half), x.mean()

    start = d["x"] @ p["w"], jnp.int32(0), jnp.float32(0), jnp.ones((2, WIDTH), jnp.bfloat16)
    with body():
        (x, count, largest, _), means = lax.scan(step, start, p["stack"])
    with head():
        return _squares(x @ p["v"]) / count + 1e-3 * (means.sum() + largest)


@_program("w", "v")
def loops_and_branches(p, d):
    """A loop that stops when its residual is small, a `cond` and a `switch`."""
    x = d["x"] @ p["w"]
    step = lambda z: 0.5 * jnp.tanh(z @ p["v"]) + 0.1 * x
    with body():
        z, _, _ = lax.while_loop(
            lambda c: (c[1] > 1e-4) & (c[2] < 40),
            lambda c: (step(c[0]), jnp.abs(step(c[0]) - c[0]).max(), c[2] + 1),
            (jnp.zeros_like(x), jnp.float32(1), 0),
        )
        z = step(lax.stop_gradient(z))
        z = lax.cond(d["y"][0] > 3, lambda z: z @ p["w"], lambda z: jnp.sin(z @ p["v"]), z)
        z = lax.switch(d["y"][1] % 3, [lambda z: z, lambda z: z + z @ p["w"], jnp.tanh], z)
    with head():
        return _squares(z @ p["v"])


@jax.custom_jvp
def _smooth_sign(h, w):
    return jnp.tanh(h @ w)


_smooth_sign.defjvp(lambda primals, tangents: jax.jvp(lambda h, w: jnp.tanh(h @ w), primals, tangents))


@jax.custom_vjp
def _clipped(h, w):
    return jnp.sin(h @ w) + h


def _clipped_backward(saved, g):
    h, w = saved
    inner = jnp.clip(g * jnp.cos(h @ w), -1, 1)
    return inner @ w.T + g, h.T @ inner


_clipped.defvjp(lambda h, w: (_clipped(h, w), (h, w)), _clipped_backward)


@_program("w", "v", "u")
def custom_rules(p, d):
    with body():
        x = _clipped(_smooth_sign(d["x"], p["w"]), p["v"])
        x = x + jax.nn.relu(x @ p["u"])
    with head():
        return jax.nn.logsumexp(x @ p["w"])


@_program("w", "v", table=lambda normal: normal(WIDTH, WIDTH))
def lookups(p, d):
    """An embedding, one-hot labels, a gather, a scatter, and slices at traced places."""
    ids = d["y"]
    with body():
        x = p["table"][ids] + d["x"] @ p["w"]
        x = x + jax.nn.one_hot(ids, WIDTH) @ p["v"]
        x = x.at[ids[0] % BATCH].add(x[1])
        rows = lax.dynamic_slice(x, (ids[0] % 2 + ids[1] % 2, jnp.int32(0)), (2, WIDTH))
        x = x.at[:2].set(rows @ p["w"])
        x = x[jnp.arange(BATCH)[::-1] + 0 * ids]
    with head():
        return _cross_entropy(x @ p["table"].T, ids)


@_program("w", "v")
def sequences(p, d):
    """Sums of log-probabilities: a cumulative sum, a logsumexp and a CTC loss."""
    with body():
        x = jnp.cumsum(d["x"] @ p["w"], axis=0) / BATCH
    with head():
        logits = x @ p["v"]
        padding = jnp.zeros((1, BATCH))
        labels = 1 + d["y"][None, :2] % (WIDTH - 1)
        ctc = optax.ctc_loss(logits[None], padding, labels, jnp.zeros((1, 2)))
        return ctc.mean() + jax.nn.logsumexp(logits, axis=-1).mean()


@_program("w", "v", rates=_vector)
def spectrum(p, d):
    """A Fourier transform, products of complex numbers, and a complex state."""
    with body():
        z = jnp.fft.rfft(d["x"] @ p["w"], axis=-1)
        z = z * lax.complex(jnp.cos(p["rates"][:5]), jnp.sin(p["rates"][:5]))
        x = jnp.fft.irfft(z + z * 0.5j, n=WIDTH, axis=-1)
    with head():
        return _squares(x @ p["v"]) + 1e-2 * jnp.abs(z).mean()


@_program("w", "v")
def solves(p, d):
    x = d["x"] @ p["w"]
    with body():
        matrix = 3 * jnp.eye(WIDTH) + 0.3 * jnp.tanh(p["v"])
        x = jnp.linalg.solve(matrix, x.T).T
    with head():
        return _squares(x @ p["v"])


@_program("w", "v", "u")
def choices(p, d):
    """A router of two experts: top_k, sort, argmax, and a prediction that is compared with the labels."""
    x = d["x"]
    with body():
        gates, chosen = lax.top_k(jax.nn.softmax(x @ p["u"]), 2)
        experts = jnp.stack([x @ p["w"], jnp.tanh(x @ p["v"])])
        x = (jnp.take_along_axis(experts, (chosen % 2).T[:, :, None], axis=0) * gates.T[:, :, None]).sum(0)
    with head():
        logits = jnp.sort(x, axis=-1) @ p["u"]
        accuracy = (logits.argmax(-1) == d["y"]).mean()
        return _cross_entropy(logits, d["y"]) + 0 * accuracy


@_program("w", "v")
def dropout(p, d):
    key, other = jax.random.split(jax.random.fold_in(jax.random.key(0), d["y"][0]))
    with body():
        x = jax.nn.relu(d["x"] @ p["w"])
        x = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)
    with head():
        x = x @ p["v"]
        return _squares(x + 0.1 * jax.random.normal(other, x.shape))


@_program("w", "v")
def integers(p, d):
    """Products that become integers and indexes: lengths, bits, and codes of a quantizer."""
    x, powers = d["x"], jnp.asarray(3.0 ** np.arange(5), jnp.float32)
    with body():
        lengths = (jnp.abs(x) > 0.1).astype(jnp.float32) @ jnp.ones((WIDTH, 1)) * 37
        digits = jnp.clip(jnp.round(x[:, :5] + 1), 0, 2)
        codes = (digits @ powers).astype(jnp.int32)
        table = jnp.sin(jnp.arange(3.0**5))[:, None] * jnp.ones(WIDTH)
        x = x @ p["w"] + table[codes]
        mask = (jnp.arange(WIDTH) * 37 < lengths.astype(jnp.int32)) & (codes[:, None] >= 0)
    with head():
        return _squares(jnp.where(mask, x @ p["v"], 0.0)) + 0 * (codes + codes).sum()


@_program("w", "v")
def masks(p, d):
    """Products that masks of the program compare, beside predicates of derivatives."""
    with body():
        x = (d["x"] @ p["w"] > 0).astype(jnp.float32) * jnp.sin(d["x"] @ p["v"])
        x = jnp.clip(x @ p["w"], -1, 1)
    with head():
        y = x @ p["v"]
        return _squares(jnp.where(y > 0, y, 0.1 * y)) + jnp.where(y == 1.0, x @ p["w"], 0.0).mean()


@_program("w", "v", b=_vector)
def deep_stack(p, d):
    """Many layers of one activation, where the errors of each add up."""
    x = d["x"]
    with body():
        for _ in range(4):
            x = jax.nn.silu(x @ p["w"] + p["b"]) @ p["v"] * 1.5
    with head():
        return 1e-3 * _squares(x @ p["w"])


@_program("q", "k", "v")
def quotients(p, d):
    """A linear attention, whose normalizers are large numbers, an angle, and an absmax scaling."""
    feature = lambda x: jax.nn.elu(20 * x) + 1
    with body():
        q, k, v = feature(d["x"] @ p["q"]), feature(d["x"] @ p["k"]), d["x"] @ p["v"]
        x = (q @ (k.T @ v)) / (q @ k.sum(0)[:, None])
        scaled = v / jnp.abs(v).max(-1, keepdims=True)
    with head():
        return _squares(x + scaled) + 0.1 * jnp.arctan2(300 * x, 300 * v).mean()


@_program("w", "v", b=_vector)
def fitted(p, d):
    """A classifier near its optimum: labels that it predicts, and a loss of 1e-3."""
    with body():
        x = jnp.tanh(d["x"] @ p["w"] + p["b"])
    with head():
        logits = x @ p["v"] * 4
        labels = lax.stop_gradient(logits).argmax(-1)
        return _cross_entropy(logits + 9 * jax.nn.one_hot(labels, WIDTH), labels)


@_program("w", "v")
def optimizer_step(p, d):
    """A step of Adam within the program, as meta-learning takes it."""
    inner = lambda p: _squares(jnp.tanh(d["x"] @ p["w"]) @ p["v"])
    tx = optax.adam(1e-2, eps=1e-3)
    with body():
        updates, _ = tx.update(jax.grad(inner)(p), tx.init(p), p)
        new = optax.apply_updates(p, updates)
    with head():
        return inner(new)
