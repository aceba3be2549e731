"""On healthy models `find_nonfinite` and the doctor of a step name nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import doctor, find_nonfinite

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
W = {
    name: np.random.default_rng(n).normal(size=(8, 8)).astype(np.float32) / 3 for n, name in enumerate("abc")
}
LABELS = np.array([0, 3, 7, 1])
CAUSAL = np.tri(4, dtype=bool)


def attention(mask):
    def loss(w, x):
        x = x.astype(jnp.float16)
        query, key, value = (x @ w[name].astype(jnp.float16) for name in "abc")
        scores = mask(query @ key.T)
        return jnp.mean((jax.nn.softmax(scores) @ value).astype(jnp.float32))

    return loss


def norms(w, x):
    h = (30 * x).astype(jnp.float16)
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + jnp.float16(1e-5))
    h = h @ w["a"].astype(jnp.float16)
    h = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + jnp.float16(1e-3))
    return jnp.mean(h.astype(jnp.float32) @ w["b"])


def activations(w, x):
    h = (5 * x).astype(jnp.float16) @ w["a"].astype(jnp.float16)
    parts = [jax.nn.gelu(h), jax.nn.silu(h), jax.nn.softplus(h), jnp.tanh(h), jax.nn.relu6(h), jax.nn.elu(h)]
    return jnp.mean(sum(parts).astype(jnp.float32) * 1e-3)


def cross_entropy(w, x):
    logits = jnp.where(np.arange(8) < 8 - np.arange(4)[:, None] // 4, x @ w["a"] * 50, -jnp.inf)
    half = logits.astype(jnp.float16)
    losses = optax.softmax_cross_entropy_with_integer_labels(half.astype(jnp.float32), LABELS)
    return jnp.mean(losses) + jnp.mean(jax.nn.logsumexp(half, axis=-1).astype(jnp.float32))


def masked_logsumexp(w, x):
    h = jnp.where(CAUSAL, (x @ w["a"] @ x.T).astype(jnp.float16), -jnp.inf)
    return jnp.mean(jax.nn.logsumexp(h, axis=-1).astype(jnp.float32))


def gaussian_kernel(w, x):
    distances = (x * 200).astype(jnp.float16) - w["a"][0].astype(jnp.float16)
    return jnp.mean(jnp.exp(-jax.lax.stop_gradient(distances**2)).astype(jnp.float32)) + jnp.mean(x @ w["b"])


def pooling(w, x):
    h = (x @ w["a"]).astype(jnp.float16)
    pooled = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "SAME")
    return jnp.mean(pooled.astype(jnp.float32))


def scan(w, x):
    @jax.checkpoint
    def cell(carry, row):
        carry = jax.nn.sigmoid(row.astype(jnp.float16) + carry @ w["a"].astype(jnp.float16))
        return carry, jnp.where(carry > 2, carry, -jnp.inf)

    carry, gates = jax.lax.scan(cell, jnp.zeros(8, jnp.float16), x)
    return jnp.mean((carry + jnp.max(jnp.exp(gates), axis=0)).astype(jnp.float32))


LOSSES = {
    "a mask of -inf": attention(lambda scores: jnp.where(CAUSAL, scores, -jnp.inf)),
    "a mask of -1e9": attention(lambda scores: scores + jnp.where(CAUSAL, 0, -1e9).astype(jnp.float16)),
    "a mask of the least number": attention(
        lambda scores: jnp.where(CAUSAL, scores, jnp.finfo(scores.dtype).min)
    ),
    "a mask before the scale": attention(lambda s: jnp.where(CAUSAL, s, -jnp.inf) * jnp.float16(0.35)),
    "norms": norms,
    "activations": activations,
    "cross entropy": cross_entropy,
    "logsumexp": masked_logsumexp,
    "gaussian kernel": gaussian_kernel,
    "pooling": pooling,
    "scan": scan,
}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", LOSSES)
def test_find_nonfinite_is_silent(name):
    report = find_nonfinite(LOSSES[name], loss_scale=2.0**10)(W, X)
    assert report.is_finite
    assert report.cause is None


# Steps.


def make_step(tx, dtype, compute=jnp.float16):
    loss_fn = jmp.autocast(lambda w, x: jnp.mean(jax.nn.relu(x @ w["a"]) @ w["b"] ** 2), compute)

    def step(params, state, x):
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(state))(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), {"a": W["a"], "b": W["b"]})
    return step, params, tx.init(params)


@pytest.mark.slow
def test_a_healthy_step_has_no_findings():
    step, params, state = make_step(jmp.with_loss_scale(optax.adamw(1e-3)), jnp.float32)
    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(params, state, X)
    assert [f for f in diagnosis.findings if f.severity != "speed"] == []
    assert diagnosis.nonfinite.loss is None
    assert (
        diagnosis.nonfinite.summary()
        == f"All {diagnosis.nonfinite.parameters} results of one step are finite."
    )


@pytest.mark.slow
def test_a_step_that_is_skipped_names_the_overflow_that_its_results_do_not_show():
    tx = jmp.with_loss_scale(optax.sgd(1e-3), jmp.DynamicLossScale(2.0**24))
    step, params, state = make_step(tx, jnp.float32)
    report = find_nonfinite(step, value_and_grad_fn=None)(params, state, X * 100)
    assert report.is_finite  # The update is left out.
    assert report.cause.direction == "backward"
    assert report.cause.what == "inf"
    assert report.is_finite_in_float32


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("rate", "is_lost"), [(1e-6, True), (1e-1, False)])
def test_the_updates_of_bfloat16_parameters_are_lost_at_a_small_rate(rate, is_lost):
    step, params, state = make_step(jmp.with_loss_scale(optax.adam(rate)), jnp.bfloat16, jnp.bfloat16)
    findings = doctor(step, value_and_grad_fn=None, device=None)(params, state, X).findings
    lost = [f for f in findings if "update is lost" in f.what]
    assert bool(lost) == is_lost
    if is_lost:
        assert {"params/a", "params/b"} <= {
            word for f in lost for word in f"{f.what} {f.where.rstrip('.')}".replace(",", "").split()
        }
