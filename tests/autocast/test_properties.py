"""Programs put together at random: autocast gives what float32 gives, within half precision's tolerance."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import jmp_lite as jmp
from tests.support.jaxprs import products, text
from tests.support.small_programs import HALVES, normal, with_jvp, with_vjp

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

EXAMPLES = hypothesis.settings.default.max_examples // 6  # Four, and 33 before a release.

SIZE, BATCH = 8, 4


PARAMS = {
    "w": normal(SIZE, SIZE, scale=SIZE**-0.5),
    "v": normal(SIZE, SIZE, scale=SIZE**-0.5),
    "stack": normal(3, SIZE, SIZE, scale=SIZE**-0.5),
    "kernel": normal(3, SIZE, SIZE, scale=(3 * SIZE) ** -0.5),
    "bias": normal(SIZE, scale=0.3),
    "shift": normal(1, SIZE, scale=0.3),
    "rows": normal(5, SIZE, scale=0.3),
    "gain": jnp.float32(0.9),
}
X = normal(BATCH, SIZE)
INTEGER = jnp.int32(1)


def _convolve(p, x):
    return lax.conv_general_dilated(
        x[None], p["kernel"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )[0]


# Every step takes and gives (BATCH, SIZE), is smooth and does not magnify much what it is given.
STEPS = {
    "dense": lambda p, x: x @ p["w"],
    "dense of the transposed": lambda p, x: (p["v"] @ x.T).T,
    "einsum": lambda p, x: jnp.einsum("bi,ij->bj", x, p["v"]),
    "gram": lambda p, x: jnp.tanh(x @ x.T / SIZE) @ x,
    "convolution": _convolve,
    "weight twice": lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"],
    "weights added": lambda p, x: x @ (p["w"] + p["v"]) * 0.7,
    "scaled weight": lambda p, x: x @ (p["w"] * p["gain"]),
    "weight standardised": lambda p, x: x @ (p["w"] / (1 + jnp.std(p["w"], axis=0))),
    "bias": lambda p, x: x + p["bias"],
    "row of bias": lambda p, x: x + p["shift"],
    "scalar parameter": lambda p, x: x * p["gain"],
    "embedding": lambda p, x: x + p["rows"][jnp.array([0, 3, 3, 1])],
    "tanh": lambda p, x: jnp.tanh(x),
    "logistic": lambda p, x: jax.nn.sigmoid(x),
    "sin": lambda p, x: jnp.sin(x) + 0.5 * jnp.cos(x),
    "gelu": lambda p, x: jax.nn.gelu(x),
    "silu": lambda p, x: jax.nn.silu(x),
    "softplus": lambda p, x: jax.nn.softplus(x),
    "softmax": lambda p, x: jax.nn.softmax(x) * 2,
    "log of softmax": lambda p, x: jax.nn.log_softmax(x) * 0.5,
    "logsumexp": lambda p, x: x * 0.5 + 0.2 * jax.nn.logsumexp(x, axis=-1, keepdims=True),
    "normalise": lambda p, x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1.0),
    "over the batch": lambda p, x: x - 0.5 * x.mean(0),
    "square": lambda p, x: x * x / (1 + x**2),
    "cube": lambda p, x: x**3 / (1 + x * x),
    "divide": lambda p, x: x / (1.5 + jnp.sin(x)),
    "halves swapped": lambda p, x: jnp.concatenate([x[:, 4:], -x[:, :4]], axis=1),
    "reshape": lambda p, x: jnp.sin(x.reshape(2, 2, SIZE).transpose(1, 0, 2)).reshape(BATCH, SIZE),
    "rolled": lambda p, x: jnp.roll(x, 1, axis=0) * 0.5 + x * 0.5,
    "row taken": lambda p, x: x + 0.5 * x[1:2],
    "rows gathered": lambda p, x: x[jnp.array([2, 2, 0, 1])],
    "row written": lambda p, x: x.at[1].set(jnp.tanh(x[0])),
    "row added": lambda p, x: x.at[jnp.array([0, 0])].add(0.3),
    "padded": lambda p, x: jnp.pad(x, ((1, 0), (0, 0)))[:-1] + x,
    "cumulative": lambda p, x: jnp.cumsum(x, axis=0) / BATCH + x * 0.5,
    "selected": lambda p, x: jnp.where(jnp.arange(SIZE) % 2 == 0, x, 0.5),
    "masked": lambda p, x: jax.nn.softmax(jnp.where(jnp.arange(SIZE) < 6, x, -jnp.inf)) + x,
    "large mask": lambda p, x: jax.nn.softmax(x + jnp.where(jnp.arange(SIZE) < 6, 0.0, -1e9)) + x,
    "small literal": lambda p, x: x / (jnp.abs(x).sum(-1, keepdims=True) + 1e-8) + x,
    "large literal": lambda p, x: x * 1e5 * 1e-5,
    "half of one's own": lambda p, x: (x.astype(jnp.bfloat16) * jnp.bfloat16(0.5)).astype(jnp.float32) + x,
    "kept": lambda p, x: jmp.keep_float32(x) * 0.5,
    "linear solve": lambda p, x: jnp.linalg.solve(3 * jnp.eye(SIZE) + 0.3 * p["v"], x.T).T * 3,
    "bounded": lambda p, x: with_jvp(jnp.tanh)(x),
    "relu6 smooth": lambda p, x: jax.nn.hard_tanh(x * 0.01) * 100,
    "custom product": lambda p, x: with_vjp(lambda w, x: jnp.tanh(x @ w))(p["w"], x),
    "integers": lambda p, x: x + jnp.arange(SIZE) * 0.01,
    "counted": lambda p, x: x * (1 + 0.01 * (x.shape[0] + INTEGER)),
}


def _scan_carry(inside, p, x):
    return lax.scan(lambda x, w: (inside({**p, "w": w}, x), None), x, p["stack"])[0]


def _scan_slices(inside, p, x):
    ys = lax.scan(lambda total, row: (total + row.sum(), inside(p, jnp.tile(row, (BATCH, 1)))[0]), 0.0, x)
    return ys[1] + 0.01 * jnp.tanh(ys[0])


def _scan_reverse(inside, p, x):
    carry, ys = lax.scan(lambda x, _: (jnp.tanh(inside(p, x)), x.mean()), x, length=2, reverse=True, unroll=2)
    return carry + 0.1 * ys.mean()


def _cond(inside, p, x):
    return lax.cond(x.shape[0] + INTEGER > 2, lambda p, x: inside(p, x), lambda p, x: x @ p["v"], p, x)


def _switch(inside, p, x):
    return lax.switch(INTEGER, [lambda x: x, lambda x: inside(p, x), lambda x: x @ p["w"]], x)


def _rows(inside, p, x):
    return jax.vmap(lambda row: inside(p, jnp.stack([row] * BATCH))[0])(x)


def _stacked(inside, p, x):
    return jax.vmap(lambda w: inside({**p, "w": w}, x))(p["stack"]).mean(0)


def _named(inside, p, x):
    with jax.named_scope("block"):
        return inside(p, x)


# What runs other steps within.
AROUND = {
    "jit": lambda inside, p, x: jax.jit(inside)(p, x),
    "jit twice": lambda inside, p, x: (lambda f: f(p, f(p, x)))(jax.jit(inside)),
    "inline": lambda inside, p, x: jax.jit(inside, inline=True)(p, x),
    "scan": _scan_carry,
    "scan of slices": _scan_slices,
    "scan backwards": _scan_reverse,
    "cond": _cond,
    "switch": _switch,
    "remat": lambda inside, p, x: jax.checkpoint(inside)(p, x),
    "remat dots": lambda inside, p, x: jax.checkpoint(
        inside, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )(p, x),
    "custom_jvp": lambda inside, p, x: with_jvp(inside)(p, x),
    "custom_vjp": lambda inside, p, x: with_vjp(inside)(p, x),
    "vmap": _rows,
    "vmap of weights": _stacked,
    "residual": lambda inside, p, x: x * 0.5 + 0.5 * inside(p, x),
    "named scope": _named,
    "autocast": lambda inside, p, x: jmp.autocast(inside, jnp.float16)(p, x),
    "full precision": lambda inside, p, x: jmp.full_precision(inside)(p, x),
}


def programs(steps=tuple(STEPS), around=tuple(AROUND), longest=4):
    blocks = st.lists(st.sampled_from(steps), min_size=1, max_size=longest)
    return st.recursive(
        blocks,
        lambda inside: st.lists(
            st.one_of(st.sampled_from(steps), st.tuples(st.sampled_from(around), inside)),
            min_size=1,
            max_size=3,
        ),
        max_leaves=5,
    )


def build(program):
    """The function of a parameter dictionary and an array that a program describes."""

    def fun(p, x):
        for step in program:
            x = STEPS[step](p, x) if isinstance(step, str) else AROUND[step[0]](build(step[1]), p, x)
        return x

    return fun


def depth(program):
    return sum(1 if isinstance(step, str) else 1 + 3 * depth(step[1]) for step in program)


def loss_of(fun):
    return lambda p, x: jnp.sum(jnp.sin(fun(p, x)))


def assert_close(actual, expected, half, factor):
    """Within `factor` roundings of the largest number, or of 1 where all are small and may underflow."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    scale = max(1.0, *(float(jnp.abs(b).max()) for _, b in pairs))
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=factor * float(jnp.finfo(half).eps) * scale)


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(program=programs(), half=st.sampled_from(HALVES))
def test_a_program_gives_what_float32_gives_in_the_same_dtype(program, half):
    fun = build(program)
    expected, actual = (jax.jit(f)(PARAMS, X) for f in (fun, jmp.autocast(fun, half)))
    assert (actual.dtype, actual.shape) == (jnp.float32, expected.shape)
    assert_close(actual, expected, half, factor=12 + 4 * depth(program))


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(program=programs(), half=st.sampled_from(HALVES))
def test_applying_autocast_twice_gives_the_same_jaxpr(program, half):
    once = jmp.autocast(build(program), half)
    assert text(jmp.autocast(once, half), PARAMS, X) == text(once, PARAMS, X)


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(program=programs(), half=st.sampled_from(HALVES))
def test_gradients_in_both_orders_are_those_of_float32(program, half):
    fun = build(program)
    expected = jax.jit(jax.grad(loss_of(fun)))(PARAMS, X)
    inside = jax.grad(loss_of(jmp.autocast(fun, half)))
    outside = jmp.autocast(jax.grad(loss_of(fun)), half)
    for grad in (inside, outside):
        grads = jax.jit(grad)(PARAMS, X)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
        assert_close(grads, expected, half, factor=16 + 8 * depth(program))


NO_FULL = tuple(name for name in AROUND if name not in ("full precision", "autocast"))
NO_SOLVE = tuple(name for name in STEPS if name not in ("linear solve", "kept"))


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(program=programs(NO_SOLVE, NO_FULL), half=st.sampled_from(HALVES))
def test_every_product_is_half_forward_and_backward_in_both_orders(program, half):
    fun = build(program)
    plain = len(products(fun, PARAMS, X))
    grad_plain = len(products(jax.grad(loss_of(fun)), PARAMS, X))
    forward = products(jmp.autocast(fun, half), PARAMS, X)
    assert forward == [(half, half)] * plain
    assert set(products(jax.grad(loss_of(jmp.autocast(fun, half))), PARAMS, X)) <= {(half, half)}
    outside = products(jmp.autocast(jax.grad(loss_of(fun)), half), PARAMS, X)
    assert outside == [(half, half)] * grad_plain
