"""Steps that are right when they run once in half: which faults 20 runs show, and which errors do no harm."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import doctor

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
X, Y, W = (jax.random.normal(key, (64, 8)) for key in jax.random.split(jax.random.key(0), 3))


def faults(step, *args):
    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(*args)
    return [finding for finding in diagnosis.findings if finding.severity != "speed"]


def grads_of(w, x=X):
    return jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - Y) ** 2))(w)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens_to_zero", "fault"), [(-400, "The update is lost in part: w comes"), (4400, "w ends")]
)
def test_a_schedule_that_stays_where_it_starts(tokens_to_zero, fault):
    """The next number of bfloat16 after the first count is 8192 further."""

    def step_of(dtype):
        def step(w, tokens):
            rate = 2**-6 * (1 - (tokens.astype(dtype) - 1048576) / tokens_to_zero)
            return w - rate.astype(F32) * grads_of(w), tokens + 200

        return step

    args = 0.1 * W[:8], jnp.int32(1048576)
    assert (step_of(BF16)(*args)[0] == step_of(F32)(*args)[0]).all()
    (found,) = faults(step_of(BF16), *args)
    assert found.what.startswith(fault)
    assert found.advice.startswith("To mend it: use float32 instead of bfloat16 on line")
    assert faults(step_of(F32), *args) == []


@pytest.mark.slow
def test_an_average_that_starts_as_a_copy_never_moves():
    def step(w, ema):
        ema = (ema.astype(BF16) + (0.002 * (w - ema)).astype(BF16)).astype(F32)
        return w - grads_of(w), ema

    w = W[:8].astype(BF16).astype(F32)
    assert (step(w, w)[1] == w).all()
    (found,) = faults(step, w, w)
    assert found.what.startswith("The update is lost")
    assert " ema " in found.what


@pytest.mark.slow
def test_a_metric_with_few_values_is_no_fault_of_a_right_step():
    """As the share of the ratios that PPO clips."""

    def step_of(dtype):
        def outputs(w):
            return (X.astype(dtype) @ w.astype(dtype)).astype(F32)

        def step(w, old):
            w = w - 0.02 * grads_of(w)
            return w, {"clipped": jnp.mean((jnp.abs(outputs(w) - outputs(old)) > 0.06).astype(F32))}

        return step

    ends = {}
    for dtype in (BF16, F32):
        w = W[:8]
        for _ in range(20):
            w, metrics = step_of(dtype)(w, W[:8])
        ends[dtype] = float(metrics["clipped"])
    assert ends[BF16] > 1.1 * ends[F32] > 0
    assert faults(step_of(BF16), W[:8], W[:8]) == []


@pytest.mark.slow
def test_a_loss_scale_that_falls_is_no_fault():
    """A float16 gradient overflows once the scale has grown, and float32 has no such limit."""
    tx = jmp.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(2.0**15, period=5))

    def step(w, state):
        def loss(w):
            return jnp.mean(((X.astype(F16) @ w.astype(F16)).astype(F32) - 8 * Y) ** 2)

        scale = jmp.get_loss_scale(state)
        _, grads = jmp.value_and_grad(loss, loss_scale=scale)(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    args = 0.1 * W[:8], tx.init(W[:8])
    ends, scales = args, []
    for _ in range(20):
        ends = step(*ends)
        scales.append(float(jmp.get_loss_scale(ends[1]).loss_scale))
    assert scales[0] == scales[-1] / 4
    assert sorted(scales) != scales  # It falls.
    assert faults(step, *args) == []


@pytest.mark.slow
def test_a_state_that_moves_by_its_last_digit_is_no_fault():
    """A power iteration has converged: all that moves is rounding error."""

    def step(w, vector):
        x = X.astype(BF16).astype(F32)
        vector = w.T @ (w @ vector)
        vector = vector / jnp.linalg.norm(vector)
        grads = jax.grad(lambda w: jnp.mean(((x.astype(BF16) @ w.astype(BF16)).astype(F32) - Y[:, :1]) ** 2))(
            w
        )
        return w - 0.1 * grads, vector

    assert faults(step, 0.1 * W[:8, :1], jnp.ones(1)) == []


@pytest.mark.slow
def test_a_state_that_follows_a_rounding_error_is_no_fault():
    """A bias in front of a normalization has no gradient but rounding errors, which move it anywhere."""

    rates = {"w": 1.0, "b": 100.0}

    def step(params, mean):
        def loss(p):
            h = (X.astype(BF16) @ p["w"].astype(BF16) + p["b"].astype(BF16)).astype(F32)
            own = h.mean(0)
            h = (h - own) / jnp.sqrt(h.var(0) + 1e-5)
            return jnp.mean((jnp.tanh(h) - Y) ** 2), own

        grads, own = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g, rate: p - rate * g, params, grads, rates), 0.9 * mean + 0.1 * own

    params = {"w": 0.3 * W[:8], "b": jnp.zeros(8)}
    assert faults(step, params, jnp.zeros(8)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_total_that_overflows_in_a_later_step_is_named(dtype):
    """The total is 8,000 after the first step, and beyond float16 after the ninth."""

    def step(w, total):
        total = (total.astype(jnp.float16) + jnp.asarray(8000.0, jnp.float16)).astype(dtype)
        return w * 0.99, total

    page = doctor(step, value_and_grad_fn=None, device=None)(jnp.ones(4), jnp.zeros((), dtype))
    assert "total is not finite in 20 steps on this batch, and is in float32" in " ".join(str(page).split())


def overflows_later(is_gradient):
    """A step from zero to far away, where the loss overflows; or one that returns the gradient."""

    def loss(w):
        out = X.astype(F16) @ w.astype(F16)
        return jnp.mean((out.astype(F32) - 300 * X) ** 2) + 1e-9 * jnp.sum((out * out).astype(F32))

    def step(w):
        value, grads = jax.value_and_grad(loss)(w)
        return (grads + 0.1 * w if is_gradient else w - 2.0 * grads), value

    return step


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_parameters_that_the_first_step_moves_far_are_a_state(start):
    """By the distance alone, they would be taken for gradients, and the step would not be repeated."""
    (found,) = faults(overflows_later(is_gradient=False), start * W[:8])
    assert "in 20 steps on this batch" in found.what
    assert found.advice.startswith("To mend it: use float32 instead of float16 on line")


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_gradient_with_weight_decay_is_no_state(start):
    """Repeated as if it were the new value of w, the step would diverge."""
    assert faults(overflows_later(is_gradient=True), start * W[:8]) == []
