"""Ways to write an attention, and ways to write something that is nearly one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from tests.support.arrays import normal

BATCH, LENGTH, HEADS, FEATURES = 2, 16, 4, 8
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
SCALE = FEATURES**-0.5
BIG, LEAST = -1e9, float(np.finfo(np.float32).min)

scores_of = functools.partial(jnp.einsum, "bqhd,bkhd->bhqk")
mix = functools.partial(jnp.einsum, "bhqk,bkhd->bqhd")


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays and the arrays; the first two of them make the scores."""

    fun: Callable[..., Any]
    arrays: tuple[Any, ...]
    kind: str  # What `Mask.kind` should be, or a part of the reason for which it is not fused.
    count: int = 1


FUSED: dict[str, Case] = {}
LEFT: dict[str, Case] = {}


def heads(seed: int, length: int = LENGTH, count: int = HEADS) -> jax.Array:
    return normal(seed, BATCH, length, count, FEATURES)


def qkv() -> tuple[jax.Array, ...]:
    return heads(0), heads(1), heads(2)


def _case(name: str, kind: str, arrays: Any = None, where: dict[str, Case] = FUSED, count: int = 1):
    def register(fun):
        where[name] = Case(fun, tuple(qkv() if arrays is None else arrays), kind, count)
        return fun

    return register


def _left(name: str, reason: str, arrays: Any = None, count: int = 1):
    return _case(name, reason, arrays, LEFT, count)


def _masked(name: str, kind: str, mask: Callable[[jax.Array], jax.Array], arrays: Any = None) -> None:
    """An attention whose scores `mask` changes."""

    @_case(name, kind, arrays)
    def attend(q, k, v, *more):
        return mix(jax.nn.softmax(mask(scores_of(q, k) * SCALE, *more)), v)


# Layouts of the two products.
@_case("plain", "none")
def plain(q, k, v):
    return mix(jax.nn.softmax(scores_of(q, k)), v)


@_case("an axis of size 1 in between", "none")
def with_new_axis(q, k, v):
    return mix(jax.nn.softmax(scores_of(q, k)[:, None])[:, 0], v)


_case("the queries are scaled", "none")(lambda q, k, v: plain(q * SCALE, k, v))
_case("numbers from outside", "none")(lambda q, k, v: mix(jax.nn.softmax(scores_of(q, k) / np.sqrt(8.0)), v))


@_case("matmul of heads", "none")
def matmuls(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return (jax.nn.softmax(q @ k.mT * SCALE, axis=-1) @ v).swapaxes(1, 2)


@_case("keys times queries", "none")
def keys_first(q, k, v):
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q).swapaxes(-1, -2) * SCALE
    return jnp.einsum("bkhd,bhqk->bqhd", v, jax.nn.softmax(scores))


@_case("softmax over the first axis of the keys", "none")
def other_axis(q, k, v):
    scores = jnp.moveaxis(jnp.einsum("bqhd,bkhd->bkhq", q, k), 1, -1) * SCALE
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


@_case("a batch without heads", "none", (normal(0, 2, 16, 8), normal(1, 2, 16, 8), normal(2, 2, 16, 8)))
def batch_alone(q, k, v):
    return jax.nn.softmax(q @ k.mT) @ v


@_case("heads without a batch", "none", (normal(0, 16, 4, 8), normal(1, 16, 4, 8), normal(2, 16, 4, 8)))
def heads_alone(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) * SCALE)
    return jnp.einsum("hqk,khd->qhd", weights, v)


@_case("two batches", "none", tuple(normal(n, 2, 3, 16, 4, 8) for n in range(3)))
def two_batches(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, k) * SCALE)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@_case("a softmax by hand", "none")
def by_hand(q, k, v):
    scores = scores_of(q, k) * SCALE
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return mix(weights / weights.sum(-1, keepdims=True), v)


@_case("a softmax without a maximum", "none")
def no_maximum(q, k, v):
    weights = jnp.exp(scores_of(q, k) * SCALE)
    return mix(weights / weights.sum(-1)[..., None], v)


@_case("a shift of the rows", "none")
def shifted(q, k, v):
    scores = scores_of(q, k) * SCALE
    weights = jnp.exp(scores - lax.stop_gradient(scores.mean(-1, keepdims=True)))
    return mix(weights / weights.sum(-1, keepdims=True), v)


@_case("cross attention", "none", (heads(0), heads(1, 24), heads(2, 24)))
def cross(q, k, v):
    return mix(jax.nn.softmax(scores_of(q, k) * SCALE), v)


@_case("rotary positions", "causal")
def rotary(q, k, v):
    angles = jnp.arange(LENGTH)[:, None] / 10 ** jnp.arange(FEATURES // 2)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def turn(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    scores = jnp.where(CAUSAL, scores_of(turn(q), turn(k)) * SCALE, BIG)
    return mix(jax.nn.softmax(scores), v)


# Heads of keys that several heads of queries share.
GROUPED = heads(0), heads(1, count=2), heads(2, count=2)


@_case("grouped heads, repeated", "causal", GROUPED)
def repeated(q, k, v):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    return mix(jax.nn.softmax(jnp.where(CAUSAL, scores_of(q, k), BIG)), v)


@_case("grouped heads, an axis of groups", "causal", GROUPED)
def grouped(q, k, v):
    q = q.reshape(BATCH, LENGTH, 2, 2, FEATURES)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) * SCALE
    weights = jax.nn.softmax(jnp.where(CAUSAL, scores, BIG))
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(BATCH, LENGTH, HEADS, FEATURES)


@_case("one head of keys", "bias", (heads(0), *(normal(n, 2, 16, 8) for n in (1, 2)), normal(3, 4, 16, 16)))
def one_head(q, k, v, bias):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k) * SCALE + bias)
    return jnp.einsum("bhqk,bkd->bqhd", weights, v)


# Masks and biases.
PADDING = np.arange(LENGTH) < np.array([[16], [9]])
SEGMENTS = np.repeat(np.arange(4), 4)[None] // np.array([[1], [2]])
ROWS, COLUMNS = np.arange(LENGTH)[:, None], np.arange(LENGTH)
_masked("a mask of numbers", "causal", lambda s: jnp.where(CAUSAL, s, BIG))
_masked("tril", "causal", lambda s: jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH))) > 0, s, -jnp.inf))
_masked("tril as zeros", "causal", lambda s: jnp.where(jnp.tril(jnp.ones_like(s)) == 0, -jnp.inf, s))
_masked("the least float", "causal", lambda s: jnp.where(CAUSAL, s, jnp.finfo(s.dtype).min))
_masked("an added triangle", "causal", lambda s: s + jnp.triu(jnp.full((LENGTH, LENGTH), BIG), 1))
_masked("1 - mask", "causal", lambda s: s - 1e9 * (1 - jnp.tril(jnp.ones((LENGTH, LENGTH)))))
_masked(
    "iotas",
    "causal",
    lambda s: jnp.where(
        lax.broadcasted_iota(int, s.shape, 2) >= lax.broadcasted_iota(int, s.shape, 3), s, BIG
    ),
)
_masked("a window", "bias", lambda s: jnp.where((COLUMNS <= ROWS) & (COLUMNS > ROWS - 5), s, BIG))
_masked("an added window", "bias", lambda s: s + jnp.where(abs(COLUMNS - ROWS) < 5, 0, BIG))
_masked("a prefix", "bias", lambda s: jnp.where((COLUMNS <= ROWS) | (COLUMNS < 4), s, BIG))
_masked("padding", "bias", lambda s, m: jnp.where(m[:, None, None] > 0, s, BIG), (*qkv(), jnp.int32(PADDING)))
_masked(
    "added padding", "bias", lambda s, m: s + (1 - m[:, None, None]) * BIG, (*qkv(), jnp.float32(PADDING))
)
_masked(
    "causal and padding",
    "bias",
    lambda s, m: jnp.where(CAUSAL & (m[:, None, None] > 0), s, BIG),
    (*qkv(), jnp.int32(PADDING)),
)
_masked(
    "segments",
    "bias",
    lambda s, m: jnp.where((m[:, :, None] == m[:, None, :])[:, None], s, BIG),
    (*qkv(), jnp.int32(SEGMENTS)),
)
_masked("ALiBi", "bias", lambda s: s - 2.0 ** -jnp.arange(1, 5)[:, None, None] * abs(ROWS - COLUMNS))
_masked(
    "ALiBi and a mask",
    "bias",
    lambda s: jnp.where(CAUSAL, s - 0.5 ** jnp.arange(1, 5)[:, None, None] * abs(ROWS - COLUMNS), BIG),
)
_masked("a bias", "bias", lambda s, b: s + b, (*qkv(), normal(3, HEADS, LENGTH, LENGTH)))
_masked("a bias of an example", "bias", lambda s, b: s + b, (*qkv(), normal(3, BATCH, 1, LENGTH, LENGTH)))
_masked("a bias of keys", "bias", lambda s, b: s + b[:, None, None], (*qkv(), normal(3, BATCH, LENGTH)))
_masked(
    "T5",
    "bias",
    lambda s, b: s + b[jnp.minimum(abs(ROWS - COLUMNS), 7)].transpose(2, 0, 1),
    (*qkv(), normal(3, 8, 4)),
)
_masked(
    "T5 and a mask",
    "bias",
    lambda s, b: jnp.where(CAUSAL, s + b[jnp.minimum(abs(ROWS - COLUMNS), 7)].transpose(2, 0, 1), LEAST),
    (*qkv(), normal(3, 8, 4)),
)
# Rows that are masked as a whole.
_masked(
    "an empty row",
    "bias",
    lambda s, m: jnp.where(m[:, None], s, BIG),
    (*qkv(), jnp.bool_([[COLUMNS > 3] * 8 + [COLUMNS > 99] * 8] * 2)),
)
_masked(
    "an empty row, added",
    "bias",
    lambda s, m: s + jnp.where(m[:, None], 0, BIG),
    (*qkv(), jnp.bool_([[COLUMNS > 3] * 8 + [COLUMNS > 99] * 8] * 2)),
)
_masked("an empty row, known and added", "bias", lambda s: s + jnp.where((ROWS < 8) & (COLUMNS > 3), 0, -1e4))


# JAX's own functions, and those of libraries.
_case("jax.nn", "none")(lambda q, k, v: jax.nn.dot_product_attention(q, k, v))
_case("jax.nn, causal", "causal")(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
_case("jax.nn, grouped", "causal", GROUPED)(
    lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
)
_case("jax.nn, a mask", "bias", (*qkv(), jnp.bool_(PADDING)))(
    lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, mask=m[:, None, None])
)
_case("jax.nn, a bias", "bias", (*qkv(), normal(3, 1, HEADS, LENGTH, LENGTH)))(
    lambda q, k, v, b: jax.nn.dot_product_attention(q, k, v, bias=b)
)
_case("jax.nn, lengths", "bias", (*qkv(), jnp.int32([16, 9])))(
    lambda q, k, v, n: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=n)
)
_case("jax.nn, a window", "bias")(
    lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(4, 0))
)
_case("Linen's function", "causal")(
    lambda q, k, v: nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(jnp.ones((BATCH, LENGTH))))
)
_case("NNX's function", "none")(lambda q, k, v: nnx.dot_product_attention(q, k, v))

X = normal(5, BATCH, LENGTH, 32)


@_case("Linen", "bias|none", (X, jnp.bool_(PADDING)), count=2)  # One in `init`.
def linen(x, mask):
    layer = nn.MultiHeadDotProductAttention(HEADS)
    params = layer.init(jax.random.key(0), x)
    return layer.apply(params, x, mask=mask[:, None, None])


@_case("NNX", "none", (X,))
def of_nnx(x):
    layer = nnx.MultiHeadAttention(HEADS, 32, decode=False, rngs=nnx.Rngs(0))
    return layer(x)


@_case("Haiku", "causal", (X,), count=2)
def haiku(x):
    def attend(x):
        return hk.MultiHeadAttention(HEADS, FEATURES, w_init=hk.initializers.VarianceScaling())(
            x, x, x, mask=CAUSAL[None, None]
        )

    run = hk.without_apply_rng(hk.transform(attend))
    return run.apply(run.init(jax.random.key(0), x), x)


@_case("Equinox", "none", (X,))
def equinox(x):
    layer = eqx.nn.MultiheadAttention(HEADS, 32, key=jax.random.key(0))
    return jax.vmap(lambda x: layer(x, x, x))(x)


# Calls.
_case("jit", "none")(jax.jit(plain))
_case("checkpoint", "none")(jax.checkpoint(plain))
_case("vmap", "none", tuple(x[:, None] for x in qkv()))(jax.vmap(plain))


@_case("scan", "causal")
def scanned(q, k, v):
    def layer(x, scale):
        return x + repeated_mask(x * scale, k, v), None

    return lax.scan(jax.checkpoint(layer), q, jnp.ones(3))[0]


def repeated_mask(q, k, v):
    return mix(jax.nn.softmax(jnp.where(CAUSAL, scores_of(q, k) * SCALE, BIG)), v)


@_case("a scan of constant masks", "bias", (*qkv(), jnp.bool_(PADDING)))
def scanned_mask(q, k, v, mask):
    def layer(x, scale):
        scores = jnp.where(mask[:, None, None], scores_of(x * scale, k), BIG)
        return x + mix(jax.nn.softmax(scores), v), None

    return lax.scan(layer, q, jnp.ones(3))[0]


@_case("a branch", "none")
def branch(q, k, v):
    return lax.cond(q[0, 0, 0, 0] > 9, lambda: v, lambda: plain(q, k, v))


@_case("two layers", "causal", count=2)
def two_layers(q, k, v):
    return repeated_mask(repeated_mask(q, k, v), k, v)


# What is left as it is.
def _weights(q, k):
    return jax.nn.softmax(scores_of(q, k) * SCALE)


_left("a soft cap", "the scores pass through tanh")(
    lambda q, k, v: mix(jax.nn.softmax(5 * jnp.tanh(scores_of(q, k) / 5)), v)
)
_left("a learned temperature", "the factor of the scores is not a number", (*qkv(), normal(3, HEADS, 1, 1)))(
    lambda q, k, v, t: mix(jax.nn.softmax(scores_of(q, k) * t), v)
)


@_left(
    "scores that a bias repeats",
    "repeats the scores",
    (heads(0, 1), heads(1), heads(2), normal(3, 1, 1, 4, 16)),
)
def repeated_scores(q, k, v, bias):
    return mix(jax.nn.softmax(scores_of(q, k) + bias), v)


@_left("weights read elsewhere", "another operation reads its scores or weights")
def read_elsewhere(q, k, v):
    weights = _weights(q, k)
    return mix(weights, v) + weights.mean()


@_left("scores read elsewhere", "another operation reads its scores or weights")
def scores_elsewhere(q, k, v):
    scores = scores_of(q, k)
    return mix(jax.nn.softmax(scores), v) + 1e-3 * jnp.square(scores).mean()


@_left("scores that are printed", "another operation reads its scores or weights")
def printed_scores(q, k, v):
    scores = scores_of(q, k)
    jax.debug.print("{}", scores.max())
    return mix(jax.nn.softmax(scores), v)


@_left("the best keys alone", "the scores pass through")
def best_keys(q, k, v):
    scores = scores_of(q, k)
    least = lax.top_k(scores, 4)[0][..., -1:]
    return mix(jax.nn.softmax(jnp.where(scores >= least, scores, BIG)), v)


@_left("sums of scores", "the scores pass through cumsum")
def sums_of_scores(q, k, v):
    scores = scores_of(q, k) * SCALE
    return mix(jax.nn.softmax(scores + jnp.cumsum(scores, -1)), v)


_left(
    "talking heads", "no matmul gives its scores|combined|its first matmul", (*qkv(), normal(3, HEADS, HEADS))
)(lambda q, k, v, w: mix(jax.nn.softmax(jnp.einsum("bhqk,hg->bgqk", scores_of(q, k), w)), v))


@_left("dropout", "its weights pass through")
def dropout(q, k, v):
    weights = _weights(q, k)
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return mix(jnp.where(keep, weights / 0.9, 0), v)


@_left(
    "a softmax with a sink", "its weights pass through slice|the scores pass through concatenate|no matmul"
)
def sink(q, k, v):
    scores = scores_of(q, k)
    scores = jnp.concatenate([scores, jnp.zeros_like(scores[..., :1])], -1)
    return mix(jax.nn.softmax(scores)[..., :-1], v)


_left("a router", "its first matmul", (normal(0, 2, 16, 8), normal(1, 8, 4), normal(2, 4, 8)))(
    lambda x, w, v: jax.nn.softmax(x @ w) @ v
)
_left("a softmax within an MLP", "its first matmul", (normal(0, 32, 8), normal(1, 8, 16), normal(2, 16, 8)))(
    lambda x, w, v: jax.nn.softmax(x @ w) @ v
)
_left("values of another size", "other features", (heads(0), heads(1), normal(2, BATCH, LENGTH, HEADS, 12)))(
    lambda q, k, v: mix(_weights(q, k), v)
)
_left("a mask of small numbers", "a mask replaces scores by numbers that may be above -10000")(
    lambda q, k, v: mix(jax.nn.softmax(jnp.where(CAUSAL, scores_of(q, k), -30.0)), v)
)
_left("a factor behind a mask", "the scores pass through mul")(  # It brings the mask back to -1.
    lambda q, k, v: mix(jax.nn.softmax(jnp.where(CAUSAL, scores_of(q, k), -1e5) * 1e-5), v)
)
_left("two products", "the scores are combined", (*qkv(), heads(3)))(
    lambda q, k, v, p: mix(jax.nn.softmax(scores_of(q, k) + scores_of(q, p)), v)
)


@_left("a program in bfloat16", "the program does not compute it in float32")
def in_bfloat16(q, k, v):
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return mix(jax.nn.softmax(scores_of(q, k).astype(jnp.float32)).astype(jnp.bfloat16), v)


@_left("queries in bfloat16", "the program does not compute it in float32")
def queries_in_bfloat16(q, k, v):
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    return mix(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)), v)


_left("a precision", "the program asks for a precision")(
    lambda q, k, v: mix(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")), v)
)


# Softmaxes that are written in other ways.
_AS_WRITTEN = "its softmax is not written as"
_left("a softmax of base 2", _AS_WRITTEN)(lambda q, k, v: mix(_normalized(jnp.exp2(scores_of(q, k))), v))
_left("exp of log_softmax", _AS_WRITTEN)(lambda q, k, v: mix(jnp.exp(jax.nn.log_softmax(scores_of(q, k))), v))
_left("a softmax of two axes", _AS_WRITTEN)(
    lambda q, k, v: mix(jax.nn.softmax(scores_of(q, k), axis=(-2, -1)), v)
)
_left("a softmax of the queries", _AS_WRITTEN)(
    lambda q, k, v: mix(jax.nn.softmax(scores_of(q, k), axis=-2), v)
)
_left("a softmax with where=", "its weights pass through _where")(
    lambda q, k, v: mix(jax.nn.softmax(scores_of(q, k), where=CAUSAL), v)
)
_left("a jitted softmax", "its weights pass through softmax_of_keys")(
    lambda q, k, v: mix(softmax_of_keys(scores_of(q, k)), v)
)


@jax.jit
def softmax_of_keys(scores):
    return jax.nn.softmax(scores)


def _normalized(exponentials):
    return exponentials / exponentials.sum(-1, keepdims=True)


@_left("a division behind the values", _AS_WRITTEN)
def divided_last(q, k, v):
    exponentials = jnp.exp(scores_of(q, k))
    return mix(exponentials, v) / exponentials.sum(-1).swapaxes(1, 2)[..., None]


@_left("exp of scores less their logsumexp", _AS_WRITTEN)
def of_logsumexp(q, k, v):
    scores = scores_of(q, k)
    return mix(jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)), v)


def _left_mask(name: str, reason: str, mask: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    """An attention whose scores `mask` changes with a bias of the keys."""
    arrays = (*qkv(), normal(3, BATCH, LENGTH))
    _left(name, reason, arrays)(
        lambda q, k, v, b: mix(jax.nn.softmax(mask(scores_of(q, k), b[:, None, None])), v)
    )


# A query without a key could have the weights of both masks, or of the bias.
_left_mask("a mask, then a bias", "scores pass through add", lambda s, b: jnp.where(CAUSAL, s, BIG) + b)
_left_mask("a bias, then a mask", "a bias by numbers above -1e", lambda s, b: jnp.where(CAUSAL, s + b, BIG))
_left_mask(
    "a mask by numbers like those of the bias",
    "by numbers like those of its bias",
    lambda s, b: jnp.where(CAUSAL, s - 1e3 * (LENGTH - COLUMNS), -1e4),
)
