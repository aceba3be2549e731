"""Half states, element by element: which never move, and where the moved ones end."""

import inspect
import re

import jax
import jax.numpy as jnp
import optax
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
    assert (
        fault.advice
        == "To mend it: pass these arguments in float32: stats. Then it trains as in float32 in 20 steps on "
        "this batch."
    )
    assert "Not examined" not in str(diagnosis)  # The finding is about its rounding.


@pytest.mark.slow
def test_a_mean_among_the_parameters_is_not_said_to_have_an_optimizer():
    def step(params, x):
        mean = 0.999 * params["mean"] + 0.001 * jnp.mean(x * params["w"], 0)
        return {"w": params["w"], "mean": mean.astype(BF16)}

    x = 2 + jax.random.normal(jax.random.key(0), (8, 4))
    (fault,) = faults(step, {"w": jnp.ones(4), "mean": jnp.ones(4, BF16)}, x)
    assert "The update is lost in bfloat16" in fault.what
    assert "Or, if an optax optimizer updates it, round it with jmp.with_stochastic_rounding" in fault.advice


def place(text, fun):
    """The file and the line of a text in the source of a function."""
    lines, first = inspect.getsourcelines(fun)
    return f"{fun.__code__.co_filename}:{first + next(n for n, line in enumerate(lines) if text in line)}:"


@pytest.mark.slow
def test_a_state_that_is_widened_and_rounded_again_is_mended_in_both_places():
    """Neither the cast of the result nor the argument in half is enough."""

    def step(w, stats, x, dtype=BF16):
        mean = 0.999 * stats.astype(F32) + 0.001 * jnp.mean(x * w, 0)
        return w, mean.astype(dtype)

    w, stats, x = jnp.ones(4), jnp.ones(4), 2 + jax.random.normal(jax.random.key(0), (8, 4))
    (fault,) = faults(step, w, stats.astype(BF16), x)
    assert fault.advice.startswith(
        f"To mend it: use float32 instead of bfloat16 on line {place('return w', step)}"
    )
    assert fault.advice.endswith(
        "; pass these arguments in float32: stats. Then it trains as in float32 in 20 steps on this batch."
    )
    assert faults(lambda *args: step(*args, dtype=F32), w, stats, x) == []


@pytest.mark.slow
def test_a_factor_that_half_rounds_to_one_has_its_line():
    """A weight decay of 0.0019, whose factor bfloat16 rounds, in a step with no other half value."""

    def step_of(dtype):
        def step(w, x):
            keep = jnp.asarray(1 - 1.9e-3, dtype)
            return w * keep - 1e-3 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

        return step

    w, x = jax.random.normal(jax.random.key(0), (8,)), jax.random.normal(jax.random.key(1), (4, 8)) * 0.1
    (fault,) = faults(step_of(BF16), w, x)
    line = place("keep = ", step_of)
    assert fault.advice.startswith(f"To mend it: use float32 instead of half precision on line {line}")
    assert faults(step_of(F32), w, x) == []


@pytest.mark.slow
def test_a_metric_that_is_off_has_both_its_values_on_the_page():
    def step(w, count):
        return w * 0.99, count + 1, {"lr": 0.1 * jnp.asarray(0.9999, BF16) ** count}

    (fault,) = faults(step, jnp.ones(4), jnp.asarray(20000))
    assert fault.what == (
        "The result 2/lr of the step, counted from 0, ends at 0.1 in 20 steps on this batch, and at 0.0135 "
        "in float32."
    )


@pytest.mark.slow
def test_a_metric_that_is_not_finite_in_float32_either_is_no_fault():
    def step(mean, count, x):
        return mean_of(0.25)(mean, x), count + 1, {"log": jnp.log(3.0 - count)}

    assert faults(step, jnp.ones(8, BF16), jnp.asarray(0), jnp.full((16, 8), 1.25)) == []


@pytest.mark.slow
def test_running_means_of_which_half_never_move():
    x = jnp.tile(jnp.array([3.0, 9.0] * 4), (16, 1))
    (fault,) = faults(mean_of(0.001), jnp.ones(8, BF16), x)
    assert fault.what == (
        "The update is lost in bfloat16 for 50% of the elements of mean that have one: "
        "they never move in 20 steps on this batch."
    )
    assert (
        "pass these arguments in float32: mean. Then it trains as in float32 in 20 steps on this batch."
        in fault.advice
    )
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


@pytest.mark.slow
def test_a_float32_state_that_ends_half_of_its_movement_off():
    """Of the norm by which gradients are clipped, float16 loses the squares of the small ones."""

    def step_of(dtype):
        def step(params, x, y):
            loss = lambda p: 3e-3 * jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)
            grads = jax.grad(loss)(params)
            squares = (jnp.sum(jnp.square(grad.astype(dtype))) for grad in jax.tree.leaves(grads))
            norm = jnp.sqrt(sum(squares)).astype(F32)
            return jax.tree.map(lambda p, g: p - 3 * g * jnp.minimum(1, 5e-4 / (norm + 1e-12)), params, grads)

        return step

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a": 0.3 * jax.random.normal(keys[0], (16, 256)),
        "b": 0.1 * jax.random.normal(keys[1], (256, 16)),
    }
    x = jax.random.normal(keys[2], (64, 16))
    args = params, x, jnp.roll(x, 1, 1)
    (fault,) = faults(step_of(jnp.float16), *args)
    share = re.fullmatch(
        r"params/a ends (\d+)% as far from float32 as it moves there in 20 steps on this batch.", fault.what
    )
    ends = {}
    for dtype in (jnp.float16, F32):
        ends[dtype] = params
        step = jax.jit(step_of(dtype))
        for _ in range(20):
            ends[dtype] = step(ends[dtype], *args[1:])
    norm, exact = jnp.linalg.norm, ends[F32]["a"]
    off = float(norm(ends[jnp.float16]["a"] - exact) / norm(exact - params["a"]))
    assert int(share[1]) / 100 == pytest.approx(off, abs=0.02)
    line = place("squares = ", step_of)
    assert (
        fault.advice
        == f"To mend it: use float32 instead of float16 on line {line}42. Then it trains as in float32 in 20 "
        "steps on this batch."
    )
    assert faults(step_of(F32), *args) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, BF16])
def test_a_gradient_that_is_rounding_error_may_move_its_state_anywhere(dtype):
    """A bias in front of a normalization: Adam moves it by the learning rate, wherever rounding points."""
    tx = optax.adam(1e-3)

    def step(params, state, x):
        def loss(p):
            h = (x @ p["w"] + p["b"]).astype(dtype).astype(F32)
            h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
            return jnp.mean((jnp.tanh(h) @ p["o"] - 1) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (8, 16)), "b": jnp.ones(16)}
    params["o"] = 0.1 * jax.random.normal(keys[1], (16,))
    x = jax.random.normal(keys[2], (64, 8))
    new, half = (_steps(step, params, tx.init(params), x, rounding) for rounding in (False, True))
    moved = jnp.linalg.norm(new["b"] - params["b"])
    assert jnp.linalg.norm(half["b"] - new["b"]) > 0.25 * moved
    assert faults(step, params, tx.init(params), x) == []


def _steps(step, params, state, x, rounding):
    """The parameters after 20 steps, from the last digits on if `rounding`."""
    if rounding:
        x = x * (1 + 2.0**-23)
    step = jax.jit(step)
    for _ in range(20):
        params, state = step(params, state, x)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_an_average_of_the_data_that_stands_alone_is_a_state(first):
    """A loss depends on the parameters, and such a scalar does not."""

    def step(w, baseline, returns):
        baseline = (0.99 * baseline.astype(BF16) + 0.01 * returns.mean().astype(BF16)).astype(F32)
        value, grads = jax.value_and_grad(lambda w: jnp.mean((w * returns - baseline) ** 2))(w)
        w = w - 1e-3 * grads
        return (baseline, w, value) if first else (w, value, baseline)

    args = jnp.ones(4), jnp.float32(12.0), 10 + jax.random.normal(jax.random.key(0), (16, 4))
    assert step(*args)[0 if first else 2] == 12
    (fault,) = faults(step, *args)
    assert fault.what.startswith("The update is lost for 100% of the elements of baseline that have one")


@pytest.mark.slow
def test_what_keeps_a_rounding_error_is_zero_in_float32_and_no_fault():
    """Kahan's compensation of parameters in bfloat16."""

    def step(params, compensation, x):
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w.astype(F32) - 1) ** 2))(params)
        update = (-1e-2 * grads.astype(F32)).astype(BF16) + compensation
        new = params + update
        return new, update - (new - params), value

    keys = jax.random.split(jax.random.key(0))
    params = jax.random.normal(keys[0], (8,)).astype(BF16)
    args = params, jnp.zeros(8, BF16), jax.random.normal(keys[1], (16, 8))
    assert jnp.linalg.norm(step(*args)[1].astype(F32)) > 0
    assert faults(step, *args) == []


@pytest.mark.slow
def test_a_decay_of_one_that_few_steps_do_not_show_is_named_beside_the_remedy():
    """Without the first 1, a debiased average divides by 0. That the second one never decays shows later."""

    def step(w, average, steps):
        new = (1 - jnp.asarray(0.999, BF16)) * grad(w)  # The remedy.
        average = jnp.asarray(0.999, BF16) * average + new
        return w - 0.01 * average / (1 - 0.999 ** (steps + 1)), average, steps + 1

    def grad(w):
        return 2 * w - 1

    (fault,) = faults(step, jnp.ones(4), jnp.zeros(4), jnp.asarray(0.0))
    first, second = place("new = (1 - ", step), place("average = ", step)
    assert fault.advice.startswith(f"To mend it: use float32 instead of bfloat16 on line {first}")
    assert f"The number 0.999 on {second}" in fault.advice
    assert fault.advice.endswith("is 1 in half precision.")


@pytest.mark.slow
def test_a_step_that_diverges_in_float32_as_well_is_not_examined():
    def step(w, x):
        return w - 1e3 * jax.grad(lambda w: jnp.mean((x.astype(BF16) @ w.astype(BF16)).astype(F32) ** 2))(w)

    x = jax.random.normal(jax.random.key(0), (4, 8))
    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(1e-3 * jnp.ones(8), x)
    said = " ".join(str(diagnosis).split())
    assert (
        "Not examined: what the step trains. It is not finite in 20 steps on this batch in float32 either."
        in said
    )
