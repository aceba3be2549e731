"""The cotangents of a half value's float32 readers meet in float32, at the operation that made the value.

The logits of a well-fitted batch have cotangents that cancel: p/N and -1/N. Rounded one by one, they add up
to noise. So these tests go down to small losses, and the batch size is no power of two: 1/N would be exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.arrays import normal
from tests.support.jaxprs import rounded_sums
from tests.support.small_programs import HALVES

N, WIDTH, CLASSES = 24, 16, 12
F32 = jnp.float32
LABELS = jnp.arange(N) % CLASSES
HOT = jax.nn.one_hot(LABELS, CLASSES)
INTEGER = optax.softmax_cross_entropy_with_integer_labels


@jax.custom_vjp
def _cross_entropy(x):
    return INTEGER(x, LABELS).mean()


_cross_entropy.defvjp(lambda x: (_cross_entropy(x), x), lambda x, g: (g * (jax.nn.softmax(x) - HOT) / N,))


def _chunked(x):
    body = lambda total, each: (total + INTEGER(each[0], each[1]).sum(), None)
    return lax.scan(body, 0.0, (x.reshape(4, -1, CLASSES), LABELS.reshape(4, -1)))[0] / N


def _sliced(x):
    """Slices of a constant of the loop."""

    def body(i, total):
        return (
            total
            + INTEGER(
                lax.dynamic_slice(x, (i * 6, 0), (6, CLASSES)), lax.dynamic_slice(LABELS, (i * 6,), (6,))
            ).sum()
        )

    return lax.scan(lambda total, i: (body(i, total), None), 0.0, jnp.arange(4))[0] / N


def _sigmoid(x):
    return optax.sigmoid_binary_cross_entropy(x, HOT).mean()


def _kl(x):
    targets = jax.nn.softmax(20.0 * HOT)
    return optax.losses.kl_divergence(jax.nn.log_softmax(x), targets).mean()


def _ctc(x):
    logits = x.reshape(2, N // 2, CLASSES)
    zeros = jnp.zeros((2, N // 2))
    labels = jnp.arange(1, 2 * (N // 2) + 1).reshape(2, N // 2) % (CLASSES - 1) + 1
    padding = (jnp.arange(N // 2) >= 4).astype(F32)[None] * jnp.ones((2, 1))
    return optax.ctc_loss(logits, zeros, labels, padding).mean()


LOSSES = {
    "one-hot": lambda x: optax.softmax_cross_entropy(x, HOT).mean(),
    "gathered": lambda x: (jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, LABELS[:, None], 1)[:, 0]).mean(),
    "integer labels": lambda x: INTEGER(x, LABELS).mean(),
    "softplus": lambda x: (jax.nn.softplus(x) - x * HOT).sum() / N,
    "sigmoid": _sigmoid,
    "ctc": _ctc,
    "contrastive": lambda x: (
        INTEGER(x[:CLASSES], LABELS[:CLASSES]) + INTEGER(x[:CLASSES].T, LABELS[:CLASSES])
    ).mean(),
    "kl": _kl,
    "chunked": _chunked,
    "vmapped": lambda x: jax.vmap(INTEGER)(x, LABELS).mean(),
    "rematerialized": lambda x: (
        jax.checkpoint(lambda x: jax.nn.logsumexp(x, -1))(x) - x[jnp.arange(N), LABELS]
    ).mean(),
    "transposed": lambda x: (jnp.log(jnp.sum(jnp.exp(x.T), 0)) - (x * HOT).sum(-1)).mean(),
    "custom_vjp and z-loss": lambda x: _cross_entropy(x.T.T) + (jnp.exp(x) - jnp.exp(x.T).T).mean(),
    "slices of a constant": _sliced,
    "jitted": lambda x: (
        jax.jit(lambda x: jax.nn.logsumexp(x, -1))(x) - jax.jit(lambda x: x[jnp.arange(N), LABELS])(x)
    ).mean(),
    "branch": lambda x: (
        lax.cond(x[0, 0] < 1e4, lambda x: jax.nn.logsumexp(x, -1), lambda x: x[:, 0] * 2, x)
        - (x * HOT).sum(-1)
    ).mean(),
    "split": lambda x: (
        jax.nn.logsumexp(jnp.concatenate([jnp.exp(part) for part in jnp.split(x, 2, 1)], 1) * 0 + x, -1)
        - x[jnp.arange(N), LABELS]
    ).mean(),
}


X = normal(0, N, WIDTH)
SCALE = 2.0**14  # Of float16, for gradients of a loss of 1e-4.


def model(params, x):
    return jnp.tanh(x @ params["w"]) @ params["head"]


def by_hand(params, half):
    """The logits of the model with casts written by hand."""
    cast = lambda x: x.astype(half)
    hidden = jnp.tanh(cast(X) @ cast(params["w"]))
    return (hidden @ cast(params["head"])).astype(F32)


def fit(loss):
    """Returns a function of a target, which trains the model in float32 until the loss is below it."""
    keys = jax.random.split(jax.random.key(1))
    shapes = {"w": (WIDTH, 64), "head": (64, CLASSES)}
    params = {k: jax.random.normal(key, s) / s[0] ** 0.5 for key, (k, s) in zip(keys, shapes.items())}
    tx = optax.adam(3e-2)

    def step(state):
        params, opt_state, _, count = state
        value, grads = jax.value_and_grad(lambda p: loss(model(p, X)))(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value, count + 1

    @jax.jit
    def run(target):
        goes_on = lambda state: (state[2] > target) & (state[3] < 5000)
        found = lax.while_loop(goes_on, step, (params, tx.init(params), jnp.inf, 0))
        return found[0], found[2]

    return run


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)


def errors(loss, params, half):
    """The relative error of the gradient: grad(autocast), autocast(grad), and with casts by hand."""
    fun = lambda p: loss(model(p, X)) * SCALE
    reference = flat(jax.jit(jax.grad(fun))(params))
    grads = {
        "inside": jax.grad(jmp.autocast(fun, half)),
        "outside": jmp.autocast(jax.grad(fun), half),
        "by hand": jax.grad(lambda p: loss(by_hand(p, half)) * SCALE),
    }
    size = np.linalg.norm(reference)
    # Operation by operation: XLA of JAX 0.12 adds up some transposed bfloat16 products in bfloat16 on a CPU.
    return {name: np.linalg.norm(flat(g(params)) - reference) / size for name, g in grads.items()}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_fitted_batch_are_those_of_casts_by_hand(name):
    run = fit(LOSSES[name])
    for target in (1.0, 1e-4):
        params, value = run(target)
        for half in HALVES:
            found = errors(LOSSES[name], params, half)
            assert found["inside"] <= 1.3 * found["by hand"], (value, half, found)
            assert found["outside"] <= 1.3 * found["by hand"], (value, half, found)


OPTIONS = {
    "half": {"dtype": "float16"},
    "reduce_dtype": {"dtype": "bfloat16", "reduce_dtype": "float32"},
    "float8": {"dtype": "float8", "rules": {"**": "float8"}},
    "float32_results": {"dtype": "float16", "float32_results": "w"},
}


@pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu")
@pytest.mark.parametrize(
    ("option", "name"),
    [
        *(("half", "gathered"), ("reduce_dtype", "transposed"), ("float8", "rematerialized")),
        *(("float32_results", "custom_vjp and z-loss"), ("float8", "gathered")),
        *(("reduce_dtype", "custom_vjp and z-loss"), ("float32_results", "rematerialized")),
    ],
)
def test_the_law_holds_with_every_option(name, option):
    x, head = jnp.ones((48, 32)), jnp.ones((32, 16))
    short = lambda w: LOSSES[name]((x @ w)[:N, :CLASSES])
    closed = jax.make_jaxpr(jax.grad(jmp.autocast(lambda w: short(w), **OPTIONS[option])))(head)
    assert not rounded_sums(closed, in_float32=True)


def test_the_law_holds_for_a_residual_sum_in_half():
    def fun(w):
        with jax.named_scope("block"):
            stream = X @ w + jnp.tanh(X @ w)
        loss = (jax.nn.logsumexp(stream, -1) - stream[jnp.arange(N), LABELS]).mean()
        return loss + (stream @ stream.T).mean()

    half = jmp.autocast(fun, "float16", half_sums="block")
    assert not rounded_sums(jax.make_jaxpr(jax.grad(half))(jnp.ones((WIDTH, CLASSES))))


def test_the_law_holds_for_a_sum_with_a_bias_that_two_functions_read():
    def fun(w, bias, head):
        spread = jnp.exp(X @ w + bias)
        return jnp.sum((2 * spread) @ head) + jnp.sum((1 + spread) @ head)

    args = jnp.ones((WIDTH, CLASSES)), jnp.ones(CLASSES), jnp.ones((CLASSES, 8))
    assert not rounded_sums(jax.make_jaxpr(jax.grad(jmp.autocast(fun, "float16"), (0, 1)))(*args))


def test_the_law_holds_for_what_a_call_returns_as_it_is():
    def fun(w):
        logits = X @ w
        moved = jax.jit(jnp.transpose)(logits)
        return jnp.sum(jnp.exp(logits)) + jnp.sum(jnp.sin(moved))

    closed = jax.make_jaxpr(jax.grad(jmp.autocast(fun, "float16")))(jnp.ones((WIDTH, CLASSES)))
    assert not rounded_sums(closed)


def test_the_law_holds_for_the_matrix_of_a_linear_solve():
    """As in the likelihood of a Gaussian process with a learned kernel."""

    def fun(w):
        kernel = w @ w.T
        return jnp.linalg.slogdet(kernel)[1] + jnp.sum(jnp.linalg.solve(kernel, jnp.ones(CLASSES)))

    closed = jax.make_jaxpr(jax.grad(jmp.autocast(fun, "float16")))(jnp.eye(CLASSES, WIDTH))
    assert not rounded_sums(closed)


def test_a_checkpoint_keeps_a_pair_in_half():
    def fun(w):
        logits = X @ w
        first = jax.checkpoint(lambda x: jax.nn.logsumexp(x.T, 0).mean())
        second = jax.checkpoint(lambda x: x[jnp.arange(N), LABELS].mean() ** 2)
        return first(logits) - second(logits)

    pullback = jax.eval_shape(
        lambda w: jax.vjp(jmp.autocast(fun, "float16"), w)[1], jnp.ones((WIDTH, CLASSES))
    )
    kept = [
        leaf.dtype.name for leaf in jax.tree.leaves(pullback) if leaf.shape in ((N, CLASSES), (CLASSES, N))
    ]
    assert kept
    assert set(kept) == {"float16"}


@pytest.mark.parametrize("name", LOSSES)
def test_cotangents_of_float32_readers_are_rounded_after_their_sum(name):
    params = {"w": jnp.ones((WIDTH, 64)), "head": jnp.ones((64, CLASSES))}
    fun = lambda p: LOSSES[name](model(p, X))
    assert not rounded_sums(jax.make_jaxpr(jax.grad(jmp.autocast(fun, "float16")))(params), in_float32=True)


@pytest.mark.parametrize(
    ("read", "paths"),
    [(lambda y: y, []), (lambda y: y + jnp.exp(y), ["float32"])],
    ids=["a product alone", "a float32 operation too"],
)
def test_a_result_of_a_call_has_a_path_where_a_float32_operation_reads_it(read, paths):
    @jax.jit
    def inner(x, w):
        y = x @ w
        return y, jnp.exp(y).sum() + jnp.sin(y).sum()

    def fun(x, w):
        y, total = inner(x, w)
        return total + jnp.sum(read(y) @ w)

    closed = jax.make_jaxpr(jmp.autocast(fun, "float16"))(jnp.ones((4, 8)), jnp.ones((8, 8)))
    (call,) = (each for each in closed.eqns if each.params.get("name") == "inner")
    assert [var.aval.dtype.name for var in call.outvars] == ["float16", "float32", *paths]
