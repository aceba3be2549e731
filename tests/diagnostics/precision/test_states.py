"""Half states, element by element: which never move, and where the moved ones end."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from jmp_lite.diagnostics import doctor

BF16, F32 = jnp.bfloat16, jnp.float32


def faults(step, *args):
    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(*args)
    return [finding for finding in diagnosis.findings if finding.severity != "speed"]


def mean_of(rate):
    def step(mean, x):
        x = x.astype(BF16)
        return ((1 - rate) * mean + rate * x.mean(0)).astype(mean.dtype)

    return step


@pytest.mark.slow
def test_a_float32_state_of_which_most_elements_never_move():
    keys = jax.random.split(jax.random.key(0), 3)
    x, c = jax.random.normal(keys[0], (256, 64)) * 0.06, jax.random.normal(keys[2], (256, 16)) * 0.06

    def step(w, x, divide=lambda g: (g / 2.0**14).astype(F32)):
        def loss(half):
            h = jnp.tanh(x.astype(jnp.float16) @ half).astype(F32)
            return 2.0**14 * 1e-3 * jnp.mean(h * c)

        return w - 1e3 * divide(jax.grad(loss)(w.astype(jnp.float16)))

    w = jax.random.normal(keys[1], (64, 16)) * 0.02
    assert jnp.mean(step(w, x) == w) > 0.9
    (fault,) = faults(lambda w, x: step(w, x), w, x)
    assert " of the elements of w that have one: they never move in 20 steps" in fault.what
    assert "To mend it: cast the gradients to float32 before the arithmetic on line" in fault.advice
    in_float32 = lambda w, x: step(w, x, lambda g: g.astype(F32) / 2.0**14)
    assert jnp.mean(in_float32(w, x) == w) < 0.05
    assert faults(in_float32, w, x) == []  # What the remedy says, applied.


@pytest.mark.slow
def test_statistics_of_the_users_own_get_no_advice_about_optimizers():
    def step(w, stats, x):
        mean = jnp.mean(x * w, 0).astype(BF16)
        return w, 0.999 * stats + 0.001 * mean

    args = jnp.ones(4), jnp.ones(4, BF16), 2 + jax.random.normal(jax.random.key(0), (8, 4))
    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(*args)
    (fault,) = diagnosis.findings
    assert fault.advice == "To mend it: pass these arguments in float32: stats. Then it trains as in float32."
    assert "Not examined" not in str(diagnosis)  # The finding is about its rounding.


@pytest.mark.slow
def test_a_metric_that_is_off_has_both_its_values_on_the_page():
    def step(w, count):
        return w * 0.99, count + 1, {"lr": 0.1 * jnp.asarray(0.9999, BF16) ** count}

    (fault,) = faults(step, jnp.ones(4), jnp.asarray(20000))
    assert fault.what == (
        "The result 2/lr of the step ends at 0.1 in 20 steps on this batch, and at 0.0135 in float32."
    )


@pytest.mark.slow
def test_running_means_of_which_half_never_move():
    x = jnp.tile(jnp.array([3.0, 9.0] * 4), (16, 1))
    (fault,) = faults(mean_of(0.001), jnp.ones(8, BF16), x)
    assert fault.what == (
        "The update is lost in bfloat16 for 50% of the elements of mean that have one: "
        "they never move in 20 steps on this batch."
    )
    assert "pass these arguments in float32: mean. Then it trains as in float32." in fault.advice
    assert faults(mean_of(0.001), jnp.ones(8), x) == []  # What the remedy says, applied.
    assert faults(mean_of(0.25), jnp.ones(8, BF16), x) == []


@pytest.mark.slow
def test_a_teacher_that_bfloat16_shrinks():
    def step(teacher, params):
        return jax.tree.map(
            lambda t, p: (0.99 * t + 0.01 * p.astype(t.dtype)).astype(t.dtype), teacher, params
        )

    params = {"w": jax.random.normal(jax.random.key(0), (16, 8))}
    teacher = jax.tree.map(lambda p: (p * (1 + 1e-4)).astype(BF16), params)
    (fault,) = faults(step, teacher, params)
    assert "times as far from float32 as it moves there" in fault.what
    assert "pass these arguments in float32: teacher" in fault.advice


@pytest.mark.slow
def test_a_best_loss_that_starts_as_inf_is_no_fault():
    def step(state, x):
        loss = jnp.mean((state["w"].astype(BF16) * x.astype(BF16)).astype(F32) ** 2)
        return {"w": 0.9 * state["w"], "best": jnp.minimum(state["best"], loss)}

    state = {"w": jnp.ones(8), "best": jnp.full(1, jnp.inf)}
    assert faults(step, state, jnp.linspace(1, 2, 8)) == []


@pytest.mark.slow
def test_a_state_that_is_rounded_at_random_moves():
    def step(params, x, key):
        key, own = jax.random.split(key)
        new = params.astype(F32) * (1 - 1e-3) + 1e-3 * x
        return jmp.stochastic_round(new, BF16, own), key

    params = jax.random.normal(jax.random.key(0), (4096,)).astype(BF16)
    assert faults(step, params, jnp.linspace(1, 9, 4096), jax.random.key(1)) == []
