"""Softmaxes of half scores: computed in float32, with half values kept for the backward pass."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import equations, operands_of, primitives, products
from tests.support.small_programs import normal

LENGTH = 6
X, W, TABLE = normal(2, LENGTH, 2, 8), normal(8, 8, scale=0.5), normal(1, 2, LENGTH, LENGTH)
CAUSAL = jnp.tri(LENGTH, dtype=bool)
PADDING = jnp.arange(LENGTH) < jnp.array([LENGTH, 4])[:, None, None, None]


def scores_of(x, w):
    return jnp.einsum("bqhd,bkhd->bhqk", (x @ w) * 8**-0.5, x @ w[::-1])


def off_by_one(s):
    exps = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True)))
    return exps / (1 + jnp.sum(exps, axis=-1, keepdims=True))


def by_hand(s):
    exps = jnp.exp(s)
    return exps / jnp.sum(exps, axis=-1, keepdims=True)


def drop(weights, rate=0.5):
    return nn.Dropout(rate, deterministic=False).apply({}, weights, rngs={"dropout": jax.random.key(0)})


SOFTMAXES = {
    "plain": lambda s, table: jax.nn.softmax(s),
    "causal": lambda s, table: jax.nn.softmax(jnp.where(CAUSAL, s, -jnp.inf)),
    "where": lambda s, table: jax.nn.softmax(s, where=CAUSAL),
    "padding": lambda s, table: jax.nn.softmax(jnp.where(PADDING, s, jnp.finfo(s.dtype).min)),
    "an added mask": lambda s, table: jax.nn.softmax(s + jnp.where(PADDING, 0.0, -1e9)),
    "scaled": lambda s, table: jax.nn.softmax(s * table[0, 0, 0, 0]),
    "capped": lambda s, table: jax.nn.softmax(5 * jnp.tanh(s / 5)),
    "off by one": lambda s, table: off_by_one(s),
    "two scores": lambda s, table: jax.nn.softmax(s + jnp.einsum("bhqk,kd->bhqd", s, TABLE[0, 0])),
    "dropout": lambda s, table: drop(jax.nn.softmax(s)),
    "a mask of the scores": lambda s, table: jax.nn.softmax(jnp.where(s > -1, s, -1e9)),
    "a position bias": lambda s, table: jax.nn.softmax(s + table),
    "by hand": lambda s, table: by_hand(s - jnp.max(s, axis=-1, keepdims=True)),
    "by hand, no maximum": lambda s, table: by_hand(s),
}


def attention(softmax):
    def fun(w, table):
        return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores_of(X, w), table), X @ w)

    return fun


def loss_of(fun):
    return lambda w, table: jnp.sum(jnp.sin(fun(w, table)))


def kept(fun, half):
    """The shapes and dtypes of what the backward pass keeps of a softmax: weights, scores, sums of rows."""
    pullback = jax.eval_shape(
        lambda w, table: jax.vjp(jmp.autocast(loss_of(fun), half), w, table)[1], W, TABLE
    )
    rows = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[:3] == (2, 2, LENGTH)]
    return collections.Counter((leaf.shape[3:], leaf.dtype.name) for leaf in rows)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes_have_the_values_and_derivatives_of_float32(name):
    half = "float16"
    fun = attention(SOFTMAXES[name])
    loss, of_half = loss_of(fun), jmp.autocast(loss_of(fun), half)
    grad, inside, outside = (
        jax.grad(loss, (0, 1)),
        jax.grad(of_half, (0, 1)),
        jmp.autocast(jax.grad(loss, (0, 1)), half),
    )

    def push(f):
        return lambda *args: jax.jvp(f, args, (W / 8, TABLE / 8))

    def run(*funs):
        return jax.jit(lambda *args: [each(*args) for each in funs])(W, TABLE)

    value, gradients, of_loss, of_grad = run(fun, grad, push(loss), push(grad))
    ours, *both, of_our_loss, of_inside = run(
        jmp.autocast(fun, half), inside, outside, push(of_half), push(inside)
    )
    assert_close(ours, value, half, factor=8)
    for each in both:
        assert_close(each, gradients, half, factor=24)
    for each in (inside, outside):
        assert set(products(each, W, TABLE)) == {(half, half)}
    assert_close(of_our_loss, of_loss, half, factor=24)
    assert_close(of_inside, of_grad, half, factor=64)
    assert set(operands_of("exp", inside, W, TABLE)) == {"float32"}


# What the backward pass keeps beside the half weights, and how often the exponentials are computed.
KEPT = {
    "where": (["half"], 2),
    "off by one": (["half"], 2),
    "dropout": (["half", "bool"], 2),
    "scaled": (["half"], 1),
    "capped": (["half"], 1),
    "a mask of the scores": (["bool"], 1),
}


@each_half
@pytest.mark.parametrize("name", SOFTMAXES)
def test_the_backward_pass_keeps_half_weights_and_only_scores_that_it_needs(name, half):
    others, exps = KEPT.get(name, ([], 1))
    dtypes = [half, *(half if each == "half" else each for each in others)]
    assert kept(attention(SOFTMAXES[name]), half) == collections.Counter(((LENGTH,), each) for each in dtypes)
    grad = jax.grad(jmp.autocast(loss_of(attention(SOFTMAXES[name])), half))
    assert primitives(grad, W, TABLE).count("exp") == exps


OTHERS = {
    "over another axis": lambda s, table: jax.nn.softmax(s, axis=-2),
    "read in float32 too": lambda s, table: (lambda p: p + 0 * jnp.sum(jnp.sin(p)))(jax.nn.softmax(s)),
    "of float32 scores": lambda s, table: jax.nn.softmax(jnp.exp(TABLE) + 0 * jnp.sum(s)),
    "a position bias and dropout": lambda s, table: drop(jax.nn.softmax(s + table)),
}


@pytest.mark.cases(slow=2)
@each_half
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_softmax_of_half_scores_for_matmuls_alone_is_computed_once(name, half):
    fun = attention(OTHERS[name])
    grad = jax.grad(jmp.autocast(loss_of(fun), half))
    exps = lambda grad: primitives(grad, W, TABLE).count("exp")
    assert exps(grad) == exps(jax.grad(loss_of(fun)))
    assert_close(jax.jit(grad)(W, TABLE), jax.grad(loss_of(fun))(W, TABLE), half, factor=24)


def dtypes_kept(softmax, length):
    """The dtypes of what the backward pass keeps of the size of the scores."""
    loss = lambda q, k: jnp.sum(softmax(q @ k.T) @ k)
    q, k = jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((length, 8), "float32")
    leaves = jax.tree.leaves(jax.eval_shape(lambda q, k: jax.vjp(jmp.autocast(loss), q, k)[1], q, k))
    return [leaf.dtype.name for leaf in leaves if leaf.shape == (4, length)]


@pytest.mark.parametrize("length", [16384, 256, 257, 197, 6])
def test_a_softmax_keeps_its_weights_alone_whether_its_rows_are_padded_or_not(length):
    assert dtypes_kept(jax.nn.softmax, length) == ["bfloat16"]


def test_rows_longer_than_one_kernel_are_no_softmax():
    assert "float32" in dtypes_kept(jax.nn.softmax, 16392)


@pytest.mark.parametrize(
    ("length", "again"), [(256, True), (257, False), (197, False), (264, True), (6, True)]
)
def test_padded_rows_are_not_computed_again(length, again):
    assert ("float32" not in dtypes_kept(off_by_one, length)) == again


def masked_sum(s):
    exps = jnp.exp(s)
    return exps / jnp.sum(jnp.where(s > 0, exps, 0), axis=-1, keepdims=True)


@pytest.mark.parametrize("nearly", [masked_sum, lambda s: by_hand(s - jax.lax.max(s, 0.0))])
def test_what_is_nearly_a_softmax_has_a_derivative_of_its_own(nearly):
    """Another sum divides, or each score is shifted by another number."""
    scores, values = normal(16, 16), normal(16, 8)
    loss = lambda scores: jnp.mean(jnp.sin(nearly(scores @ jnp.eye(16)) @ values))
    found, expected = (jax.jit(jax.grad(f))(scores) for f in (jmp.autocast(loss), loss))
    assert jnp.linalg.norm(found - expected) < 0.05 * jnp.linalg.norm(expected)


@pytest.mark.slow
@each_half
def test_the_derivative_from_rounded_weights_is_exact_where_one_weight_is_nearly_1(half):
    """Without the division by their sum it would be 16 times as far off: rounded, w near 1 loses 1 - w."""
    scores = jnp.round(4 * normal(256, 64, scale=6)) / 4  # Half holds them, the values and their products.
    values = jnp.round(normal(64, 8)) + 16
    loss = lambda scores: jnp.sum(jax.nn.softmax(scores @ jnp.eye(64)) @ values)
    found, expected = (jax.jit(jax.grad(f))(scores) for f in (jmp.autocast(loss, half), loss))
    assert jnp.mean(jnp.max(jax.nn.softmax(scores), axis=-1)) > 0.6
    assert jnp.linalg.norm(found - expected) < jnp.finfo(half).eps * jnp.linalg.norm(expected)


MASK = jnp.broadcast_to(PADDING, (2, 1, LENGTH, LENGTH))
ATTENTIONS = {
    "flax": lambda q: nn.dot_product_attention(
        q, q, q, mask=MASK, dropout_rng=jax.random.key(0), dropout_rate=0.1, deterministic=False
    ),
    # As `flax.linen.make_causal_mask` gives it.
    "flax, a float32 mask": lambda q: nn.dot_product_attention(q, q, q, mask=MASK.astype("float32")),
    "jax": lambda q: jax.nn.dot_product_attention(q, q, q, mask=MASK, is_causal=True),
    "jax, no mask": lambda q: jax.nn.dot_product_attention(q, q, q),  # It transposes the scores.
}


def loss_of_attention(name):
    return lambda w: jnp.sum(jnp.sin(ATTENTIONS[name](X @ w)))


@each_half
@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_attention_of_flax_and_of_jax_keeps_its_weights_or_is_computed_again(name, half):
    jaxpr = jax.make_jaxpr(jax.grad(jmp.autocast(loss_of_attention(name), half)))(W)
    exps = [each for each in equations(jaxpr) if each.primitive.name == "exp"]
    assert len(exps) == (2 if name == "flax" else 1)  # With dropout, or without.


@each_half
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_attention_of_flax_and_of_jax_has_the_gradient_of_float32(name, half):
    loss = loss_of_attention(name)
    assert_close(jax.jit(jax.grad(jmp.autocast(loss, half)))(W), jax.grad(loss)(W), half, factor=24)


@pytest.mark.slow
@each_half
def test_the_mask_of_a_softmax_may_come_from_an_activation_function(half):
    """The comparison is a part of the activation function, and the softmax reads its result."""

    def fun(w, table):
        s = scores_of(X, w)
        is_low = s < -0.5
        gate = jnp.where(is_low, jnp.exp(s), s)  # Only a matmul reads it.
        weights = jax.nn.softmax(jnp.where(is_low, -1e9, s))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, X @ w) + jnp.einsum("bhqk,bkhd->bqhd", gate, X @ w)

    selected = lambda f: jax.jit(jax.grad(loss_of(f)))(W, TABLE)
    assert_close(selected(jmp.autocast(fun, half)), selected(fun), half, factor=64)


@pytest.mark.slow
@each_half
def test_softmaxes_that_differ_in_a_number_or_in_the_order_of_their_operands_are_not_mixed_up(half):
    """Equal layers share the trace of a softmax."""

    def fun(w, table):
        s, x = scores_of(X, w), X @ w
        ways = (
            lambda s: jnp.where(CAUSAL, s, -1e9),
            lambda s: jnp.where(CAUSAL, s, -1.0),
            lambda s: s - jnp.tanh(s),
            lambda s: jnp.tanh(s) - s,
        )
        return sum(
            (i + 1) * jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(f(s)), x) for i, f in enumerate(ways)
        )

    assert_close(jax.jit(jmp.autocast(fun, half))(W, TABLE), fun(W, TABLE), half, factor=16)
    grad = lambda f: jax.jit(jax.grad(loss_of(f)))(W, TABLE)
    assert_close(grad(jmp.autocast(fun, half)), grad(fun), half, factor=96)
