"""Skipped steps leave nothing behind, wherever the transforms stand and whatever they wrap."""

import functools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from tests.support.optimizers import BAD, SCHEDULE, scan_of
from tests.support.steps import bits, make_grads, make_params, make_step, run, spoil

INNERS = {
    "adamw_schedule": optax.adamw(SCHEDULE, weight_decay=0.1),
    "adamw_bf16_moment": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "sgd_momentum": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lamb": optax.lamb(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "clipped_decayed": optax.chain(
        optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.adam(SCHEDULE), optax.ema(0.9)
    ),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
}


@functools.cache
def wrapped(name):
    """One of the transforms above with a loss scale, and its step, compiled once for all tests."""
    tx = jmp.with_loss_scale(INNERS[name])
    return tx, make_step(tx)


def inner_of(opt_state):
    return opt_state.inner_state


# unscale


def test_unscale_divides_by_the_scale_that_was_given_and_gives_float32():
    tx = jmp.unscale()
    grads = {"a": jnp.float16(8), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.float32(6)}
    updates, state = tx.update(grads, tx.init(grads), loss_scale=jmp.StaticLossScale(4))
    assert bits(updates) == bits({"a": jnp.float32(2), "b": jnp.full(2, 0.25), "c": jnp.float32(1.5)})
    assert jax.tree.leaves(state) == []
    updates, _ = tx.update(jnp.float16(8), (), loss_scale=jmp.NoOpLossScale())
    assert (updates.dtype, float(updates)) == (np.float32, 8.0)
    for given, said in (({}, "no loss_scale="), ({"loss_scale": "4"}, "str")):
        with pytest.raises(TypeError, match=rf"Got {said}\. Pass it on: tx.update\(grads"):
            tx.update(jnp.float32(1), (), **given)


def test_the_threaded_scale_of_the_design_skips_and_adjusts():
    tx = jmp.skip_nonfinite(optax.chain(jmp.unscale(), optax.clip_by_global_norm(1.0), optax.adamw(3e-4)))

    @jax.jit
    def step(params, opt_state, loss_scale, grads):
        updates, opt_state = tx.update(loss_scale.scale(grads), opt_state, params, loss_scale=loss_scale)
        loss_scale = loss_scale.adjust(jmp.grads_finite(opt_state))
        return optax.apply_updates(params, updates), opt_state, loss_scale

    params, loss_scale = make_params(), jmp.DynamicLossScale(2.0**15, period=2)
    opt_state, scales = tx.init(params), []
    for t, bad in enumerate([False, True, False, False]):
        before = bits((params, inner_of(opt_state)))
        grads = spoil(make_grads(t)) if bad else make_grads(t)
        params, opt_state, loss_scale = step(params, opt_state, loss_scale, grads)
        scales.append(float(loss_scale.loss_scale))
        assert (bits((params, inner_of(opt_state))) == before) == bad
    assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**15]


# Skipping


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize("name", INNERS)
def test_finite_steps_are_those_of_the_inner_transform_and_skipped_ones_leave_no_bit(name):
    tx, step = wrapped(name)
    good = [make_grads(t) for t in range(4)]
    bad = [spoil(good[0], value) for value in BAD]
    events = [bad[0], good[0], good[1], *bad, good[2], bad[1], good[3]]
    params, opt_state = make_params(), tx.init(make_params())
    for grads in events:
        before = bits((params, inner_of(opt_state)))
        params, opt_state = step(params, opt_state, grads)
        unchanged = bits((params, inner_of(opt_state))) == before
        assert unchanged == any(grads is each for each in bad)
    without, state_without = run(tx, good, step=step)
    assert bits((params, inner_of(opt_state))) == bits((without, inner_of(state_without)))
    assert int(jmp.get_metrics(opt_state)["skipped_steps"]) == 5
    # The inner transform alone is compiled its own way, so they agree to the last bits and not in all.
    inner = INNERS[name]
    inner = inner.gradient_transformation() if isinstance(inner, optax.MultiSteps) else inner
    params_plain, state_plain = run(inner, good)
    chex.assert_trees_all_close(params, params_plain, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_equal_shapes_and_dtypes(inner_of(opt_state), state_plain)


@pytest.mark.parametrize("part", [lambda x: x, lambda x: jax.lax.complex(x, -jnp.abs(x))])
def test_minus_zero_parameters_keep_their_sign_when_skipped(part):
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    params = part(jnp.array([-0.0, 0.0, 1.0]))
    after, opt_state = make_step(tx)(params, tx.init(params), part(jnp.array([np.inf, 1.0, 1.0])))
    assert not jmp.grads_finite(opt_state)
    assert np.signbit(after.real).tolist() == [True, False, False]
    assert bits(after) == bits(params)


def test_a_nonfinite_update_is_never_applied_however_many_in_a_row():
    tx = jmp.with_loss_scale(optax.adamw(1e-2))
    params = make_params()

    bad = jax.tree.map(lambda g: jnp.broadcast_to(g, (500, *g.shape)), spoil(make_grads(0)))
    after, opt_state = jax.jit(scan_of(tx))((params, tx.init(params)), bad)
    assert bits(after) == bits(params)
    assert (
        jmp.get_metrics(opt_state)["skipped_steps"]
        == jmp.get_metrics(opt_state)["consecutive_skipped_steps"]
        == 500
    )
    assert float(jmp.get_loss_scale(opt_state).loss_scale) == 1.0


# dtypes


DTYPES = [(jnp.float32, jnp.float16), (jnp.float16, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
NAMES = sorted(set(INNERS) - {"noisy_sgd"})


@pytest.mark.parametrize(
    ("name", "params_dtype", "grads_dtype"), [(name, *DTYPES[i % 3]) for i, name in enumerate(NAMES)]
)
def test_the_state_keeps_its_dtypes_whatever_those_of_gradients_and_parameters(
    name, params_dtype, grads_dtype
):
    tx, _ = wrapped(name)

    def shape(dtype):
        return jax.eval_shape(lambda: make_params(dtype))

    params = shape(params_dtype)
    grads = jax.tree.map(lambda g: g.update(shape=(3, *g.shape)), shape(grads_dtype))
    opt_state = jax.eval_shape(tx.init, params)
    # A scan takes only a state whose shapes, dtypes and weak types stay from the first step on.
    after, state_after = jax.eval_shape(scan_of(tx), (params, opt_state), grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {np.dtype(params_dtype)}
    held = {leaf.dtype for leaf in jax.tree.leaves(inner_of(state_after))}
    floating = {dtype.name for dtype in held if jnp.issubdtype(dtype, jnp.floating)}
    assert floating <= {"float32", *(["bfloat16"] if name == "adamw_bf16_moment" else [])}


# What stays outside


OUTSIDE = {
    "weight decay": optax.add_decayed_weights(-0.1),
    "momentum": optax.trace(0.9),
    "schedule": optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 10)),
}


def selecting_step(tx):
    """The step that docs/loss-scaling.md describes for transforms that stay outside."""

    @jax.jit
    def step(params, opt_state, grads):
        updates, new_state = tx.update(grads, opt_state, params)
        finite = jmp.grads_finite(new_state)
        new_params = jmp.select_tree(finite, optax.apply_updates(params, updates), params)
        others = jmp.select_tree(finite, new_state[1:], opt_state[1:])
        return new_params, (new_state[0], *others)

    return step


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_chained_after_acts_on_a_skipped_step_and_selecting_stops_it(name):
    tx = optax.chain(jmp.with_loss_scale(optax.adam(1e-2)), OUTSIDE[name])
    params, state = make_step(tx)(make_params(), tx.init(make_params()), make_grads(0))
    bad = spoil(make_grads(1))
    moved = make_step(tx)(params, state, bad)
    assert (bits(moved[0]), bits(moved[1][1:])) != (bits(params), bits(state[1:]))
    selecting = selecting_step(tx)
    kept = selecting(params, state, bad)
    assert bits(kept[0]) == bits(params)
    assert bits(kept[1][1:]) == bits(state[1:])
    assert jmp.get_metrics(kept[1])["skipped_steps"] == 1
    assert float(jmp.get_loss_scale(kept[1]).loss_scale) == 2.0**14
    # A step that is taken is the same.
    start = make_params(), tx.init(make_params()), make_grads(0)
    assert bits(selecting(*start)) == bits((params, state))


def test_what_is_outside_sees_minus_zero():
    seen = []

    def update(updates, state, params=None):
        seen.append(updates)
        return updates, state

    watch = optax.GradientTransformation(lambda params: (), update)
    tx = optax.chain(jmp.with_loss_scale(optax.adamw(1e-2)), watch)
    params = make_params()
    tx.update(spoil(make_grads(0)), tx.init(params), params)
    for leaf in jax.tree.leaves(seen):
        assert (leaf == 0).all()
        assert np.signbit(leaf).all()


SOLVER = """
import jax, jax.numpy as jnp, lineax, optax, jmp_lite as jmp

def loss_fn(w, x):
    return jnp.mean(lineax.linear_solve(lineax.MatrixLinearOperator(w), x @ w).value ** 2)

tx = jmp.with_loss_scale(optax.sgd(1e-3))
w = 2 * jnp.eye(8)
state = tx.init(w)

@jax.jit
def step(w, state, x):
    half = jmp.autocast(loss_fn, jnp.float16)
    loss, grads = jmp.value_and_grad(half, jmp.get_loss_scale(state))(w, x)
    updates, state = tx.update(grads, state, w)
    return optax.apply_updates(w, updates), state

for x in (jnp.ones(8), jnp.full(8, 1e30), jnp.ones(8)):
    w, state = jax.block_until_ready(step(w, state, x))
print("skipped", jmp.get_metrics(state)["skipped_steps"], bool(jnp.isfinite(w).all()))
"""


@pytest.mark.exhaustive
def test_lineax_ends_the_program_on_an_overflow_and_skips_with_its_switch():
    pytest.importorskip("lineax")
    ended, skipped = (
        subprocess.run(
            [sys.executable, "-c", SOLVER],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | extra,
        )
        for extra in ({}, {"EQX_ON_ERROR": "nan"})
    )
    assert ended.returncode != 0
    assert "non-finite" in ended.stderr
    assert skipped.returncode == 0, skipped.stderr
    assert skipped.stdout.split() == ["skipped", "1", "True"]
