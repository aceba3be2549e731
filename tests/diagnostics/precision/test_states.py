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
