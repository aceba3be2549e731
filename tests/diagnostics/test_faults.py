"""Faults that runs of other people had: each has an oracle, and the remedy of its report is applied."""

import inspect
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite.diagnostics import doctor, find_nonfinite

pytestmark = pytest.mark.slow  # On one Python: see .ci/run.

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
NORMAL = jax.random.normal
KEYS = jax.random.split(jax.random.key(0), 8)


def line(fun, text):
    """The line of a function that holds a text, as reports write it."""
    source, first = inspect.getsourcelines(fun)
    (number,) = (first + n for n, each in enumerate(source) if text in each and "# " in each)
    return f"test_faults.py:{number}"


def fault_of(fun, *args, **options):
    """The only fault of values that `doctor` finds."""
    findings = doctor(fun, device=None, **options)(*args).findings
    (fault,) = (finding for finding in findings if finding.severity != "speed")
    return fault


def test_a_running_variance_that_becomes_inf():
    def loss(w, state, x, dtype=F16):
        h = x * w
        new = 0.9 * state["var"] + 0.1 * jnp.var(h, 0).astype(dtype)  # The cast.
        return jnp.mean((h - h.mean(0)) ** 2), {"var": new}

    w, state, x = jnp.ones(4), {"var": jnp.ones(4, F16)}, 1000 * NORMAL(KEYS[0], (8, 4))
    assert not jnp.isfinite(loss(w, state, x)[1]["var"]).any()
    report = find_nonfinite(loss, has_aux=True)(w, state, x)
    assert (report.is_finite, report.gradients, report.aux) == (False, (), ("var",))
    assert report.cause.operation == "convert_element_type"
    assert line(loss, "The cast") in report.remedies[0].change
    assert jnp.isfinite(loss(w, state, x, F32)[1]["var"]).all()  # The remedy, applied.
    masked = lambda w, x: (jnp.mean((x.astype(F16) * w).astype(F32)), jnp.full(2, -jnp.inf))
    assert find_nonfinite(masked, has_aux=True)(w, x / 1000).is_finite  # A mask is inf in float32 too.


def test_statistics_that_never_move():
    def loss(w, state, x):
        mean = jnp.mean(x * w, 0)
        return jnp.mean((x * w - mean) ** 2), {"mean": (0.999 * state["mean"] + 0.001 * mean.astype(BF16))}

    state, x = {"mean": jnp.ones(4, BF16)}, 2 + NORMAL(KEYS[0], (8, 4))
    assert (loss(jnp.ones(4), state, x)[1]["mean"] == 1).all()
    fault = fault_of(loss, jnp.ones(4), state, x, has_aux=True)
    assert fault.what.startswith(
        "The update is lost in bfloat16 for 100% of the elements of state/mean that have one"
    )


def trained(loss, tx, params, *args, steps=50):
    def step(carry, _):
        value, grads = jax.value_and_grad(loss)(carry[0], *args)
        updates, state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), value

    (params, state), losses = jax.jit(lambda p: lax.scan(step, (p, tx.init(p)), None, steps))(params)
    return params, state, losses


def regression():
    shapes = {"a": (64, 64), "b": (64, 8)}
    params = {n: NORMAL(key, shape) / 10 for key, (n, shape) in zip(KEYS, shapes.items())}
    loss = lambda p, x, y: jnp.mean((jax.nn.relu(x @ p["a"]) @ p["b"] - y) ** 2)
    return loss, params, NORMAL(KEYS[2], (32, 64)), NORMAL(KEYS[3], (32, 8))


def test_the_first_step_of_adam_is_no_fault():
    loss, params, x, y = regression()
    tx = optax.adam(1e-3)
    half, full = (trained(f, tx, params, x, y)[2] for f in (jmp.autocast(loss, BF16), loss))
    assert np.allclose(half, full, rtol=0.01)

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(jmp.autocast(loss, BF16))(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(params, tx.init(params), x, y)
    assert [finding.what for finding in diagnosis.findings if finding.severity != "speed"] == []


@pytest.mark.parametrize("steps", [1, 1000])
def test_near_its_optimum_a_loss_has_gradients_that_are_mostly_rounding_error(steps):
    loss, params, x, y = regression()
    params, _, losses = trained(loss, optax.adam(1e-3), params, x, y, steps=steps)
    grads = [jax.jit(jax.grad(f))(params, x, y) for f in (jmp.autocast(loss, BF16), loss)]
    half, full = (jnp.concatenate(list(map(jnp.ravel, jax.tree.leaves(each)))) for each in grads)
    error = float(jnp.linalg.norm(half - full) / jnp.linalg.norm(full))
    assert (error > 1) == (losses[-1] < 1e-4) == (steps == 1000)
    diagnosis = doctor(loss, BF16, device=None)(params, x, y)
    found = [finding.severity for finding in diagnosis.findings if finding.severity != "speed"]
    assert found == (["precision"] if steps == 1000 else [])
    report = diagnosis.precision
    assert report.is_close
    if steps == 1000:
        assert report.by_hand.gradients > 1
        assert report.limits.tolerance == 2 * report.by_hand.gradients
        # Where training in half ends, its gradient is right at one of the points nearby.
        params = trained(jmp.autocast(loss, BF16), optax.adam(1e-3), regression()[1], x, y, steps=steps)[0]
        findings = doctor(loss, BF16, device=None)(params, x, y).findings
        assert [finding.what for finding in findings if finding.severity != "speed"] == []


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("scale", [None, 1.0, 2.0])
def test_a_loss_scale_that_is_too_small_is_told_a_larger_one(scale):
    def loss(p, x, y, dtype=F16):
        h = jax.nn.relu(x.astype(dtype) @ p["a"].astype(dtype))
        return jnp.mean(((h @ p["b"].astype(dtype)).astype(F32) - y) ** 2) * 1e-5

    p = {"a": 0.3 * NORMAL(KEYS[0], (8, 16)), "b": 0.3 * NORMAL(KEYS[1], (16, 8))}
    args = p, NORMAL(KEYS[2], (256, 8)), NORMAL(KEYS[3], (256, 8))
    fault = fault_of(loss, *args, loss_scale=scale)
    assert "Start with jmp.DynamicLossScale(2.0**15)" in fault.advice
    exact = jax.grad(loss)(*args, F32)

    def error(scale):
        return optax.tree.norm(
            jax.tree.map(jnp.subtract, jax.jit(jmp.grad(loss, jmp.StaticLossScale(scale)))(*args), exact)
        )

    assert error(2.0**15) < 0.01 * optax.tree.norm(exact) < error(scale or 1.0)


def test_the_casts_of_a_policy_are_those_of_the_line_that_calls_it():
    policy = jmp.get_policy("p=f32,c=f16,o=f32")

    def loss(p, x, policy=policy):
        p, x = policy.cast_to_compute((p, x))  # The cast.
        e = jnp.exp(x @ p["w"] * 4)
        return -jnp.mean(policy.cast_to_output(jnp.log(e / e.sum(-1, keepdims=True))[:, 0]))

    args = {"w": jnp.eye(4)}, jnp.ones((6, 4)) * 3
    remedy = find_nonfinite(loss)(*args).remedies[0]
    assert remedy.change.endswith(line(loss, "The cast"))
    assert jnp.isfinite(loss(*args, jmp.get_policy("float32")))  # The remedy, applied.


def test_a_target_network_in_bfloat16():
    def step(w, target, x):
        w = w - 1e-2 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w, optax.incremental_update(w.astype(target.dtype), target, 0.001)

    w, x = NORMAL(KEYS[0], (8, 4)), jnp.ones((4, 8))
    moved = lambda dtype: float(jnp.mean(step(w + 0.1, w.astype(dtype), x)[1] != w.astype(dtype)))
    assert moved(BF16) < 0.1 < 0.9 < moved(F32)
    fault = fault_of(step, w + 0.1, w.astype(BF16), x, value_and_grad_fn=None)
    assert " of the elements of target that have one: they never move in 20 steps" in fault.what
    # 0.999 is 1 in bfloat16: a number in optax, which the program with the edit has as it is written. So that
    # one is far from the run in float32, and no edit is named.
    assert fault.advice == "Keep it in float32."


def test_a_count_that_a_loop_carries():
    def count(xs, start=F16, dtype=F16):
        add = lambda n, x: (n + (x > 0).astype(dtype), None)  # The cast.
        return lax.scan(add, jnp.zeros((), start), xs)[0].astype(F32)  # The loop.

    assert (count(jnp.ones(6000)), count(jnp.ones(6000), F32, F32)) == (2048, 6000)
    with pytest.raises(TypeError, match="carry"):
        count(jnp.ones(6000), F16, F32)
    assert count(jnp.ones(6000), F32, F16) == 6000  # The remedy.
    advice = fault_of(lambda xs: count(xs), jnp.ones(6000), value_and_grad_fn=None).advice
    assert re.match(
        rf"To mend it: start the carry in float32 for the loop on line \S*{line(count, 'The loop')}:15\.",
        advice,
    )


def test_a_decay_that_is_one_in_bfloat16():
    def step(w, ema, dtype=F32):
        decay = jnp.asarray(0.9999, BF16)  # The number.
        if dtype == F16:
            decay = jnp.asarray(0.9999, F32)
        return w * 0.99, (decay * ema + (1 - decay) * w.astype(BF16)).astype(F32)

    w = NORMAL(KEYS[0], (8, 4))
    assert not step(w, 0 * w)[1].any()
    fault = fault_of(lambda w, ema: step(w, ema), w, 0 * w, value_and_grad_fn=None)
    assert "100% of the elements of ema that have one" in fault.what
    assert line(step, "The number") in fault.advice
    assert step(w, 0 * w, F16)[1].any()  # The remedy, applied.


def test_what_no_edit_brings_to_float32_has_no_remedy():
    """An activation function in half has no cast of its own: the casts in front of it are the edit."""

    def loss(p, x):
        h = jnp.exp(x.astype(F16) @ p.astype(F16))  # The casts.
        return jnp.sum(jax.nn.relu(h - jnp.sum(h)).astype(F32))

    p, x = jnp.full((4, 4), 0.5), jnp.full((2, 4), 5.0)
    for advice in (trial.change for trial in find_nonfinite(loss)(p, x).tried):
        assert "relu" not in advice
        assert "outside of modules" not in advice


def test_the_line_that_calls_a_jitted_function_of_jax_makes_its_half_values():
    def loss(p, x, expert, dtype=BF16):
        chosen = jax.nn.one_hot(expert, 2, dtype=dtype)  # The half values.
        place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(jnp.int32)
        out = jnp.zeros(1024).at[place].set(x @ p["w"])
        return jnp.mean((out - jnp.arange(1024)) ** 2)

    args = {"w": jnp.ones(4)}, NORMAL(KEYS[0], (1000, 4)), jnp.arange(1000) % 2
    fault = fault_of(loss, *args)
    assert line(loss, "The half values") in fault.advice
    exact, half = (jax.grad(loss)(*args, dtype)["w"] for dtype in (F32, BF16))
    assert jnp.linalg.norm(half - exact) > 0.1 * jnp.linalg.norm(exact)


def test_what_a_layer_with_a_dtype_gives_is_in_float32_with_it():
    class Model(nn.Module):
        dtype: Any = F16

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, dtype=self.dtype, name="out")(nn.Dense(4, dtype=self.dtype, name="first")(x))

    def loss(p, x, dtype=F16):
        h = Model(dtype).apply(p, x)
        return jnp.mean(jnp.sqrt(jnp.sum(h * h, -1)).astype(F32))

    x = 300 * NORMAL(KEYS[0], (8, 4))
    p = Model().init(KEYS[1], x)
    remedy, *_ = find_nonfinite(loss)(p, x).remedies
    assert remedy.change == "dtype=jnp.float32 in Model/out"
    assert jnp.isinf(loss(p, x))
    assert jnp.isfinite(loss(p, x, F32))


def test_random_numbers_of_float16_are_not_rounded_to_bfloat16():
    def loss(w, x, key, dtype=F16):
        noise = jax.random.normal(key, (4000,), dtype)  # Of numbers up to 0.9995, whose erf_inv is finite.
        square = (x.astype(dtype) * w.astype(dtype)) ** 2
        return jnp.mean(square.astype(F32)) + jnp.mean((noise * w.astype(dtype)).astype(F32))

    args = jnp.ones(()), jnp.full(8, 300.0), KEYS[0]
    remedies = find_nonfinite(loss)(*args).remedies
    assert "bfloat16 in place of float16" in [remedy.change for remedy in remedies]
    assert jnp.isinf(loss(*args))
    assert jnp.isfinite(loss(*args, BF16))


def test_a_counter_in_half_that_stops():
    def step(w, count, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
        return w - 0.1 * jnp.minimum(1.0, count.astype(F32) / 2048) * grad, count + 1, loss

    args = jnp.ones(4), jnp.asarray(256, BF16), NORMAL(KEYS[0], (8, 4))
    assert step(*args)[1] == 256
    fault = fault_of(step, *args, value_and_grad_fn=None)
    assert fault.what.startswith(
        "The update is lost in bfloat16 for 100% of the elements of count that have one"
    )
    assert "pass these arguments in float32: count" in fault.advice
