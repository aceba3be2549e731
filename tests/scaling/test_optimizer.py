"""Skipped steps leave nothing behind, wherever the transforms stand and whatever they wrap."""

import functools

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
    "sgd": optax.sgd(1e-2),
    "sgd_momentum": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lamb": optax.lamb(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
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


def test_unscale_divides_by_the_scale_that_was_given():
    tx = jmp.unscale()
    grads = {"a": jnp.float16(8), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.float32(6)}
    updates, state = tx.update(grads, tx.init(grads), loss_scale=jmp.StaticLossScale(4))
    assert bits(updates) == bits({"a": jnp.float32(2), "b": jnp.full(2, 0.25), "c": jnp.float32(1.5)})
    assert jax.tree.leaves(state) == []


def test_unscale_gives_float32_with_no_scale_too():
    updates, _ = jmp.unscale().update(jnp.float16(8), (), loss_scale=jmp.NoOpLossScale())
    assert (updates.dtype, float(updates)) == (np.float32, 8.0)


@pytest.mark.parametrize(("given", "said"), [({}, "no loss_scale="), ({"loss_scale": 4.0}, "float")])
def test_unscale_without_a_loss_scale_is_an_error(given, said):
    with pytest.raises(TypeError, match=rf"Got {said}\. Pass it on: tx.update\(grads"):
        jmp.unscale().update(jnp.float32(1), (), **given)


def test_unscale_reaches_its_place_in_a_chain():
    tx = jmp.skip_nonfinite(optax.chain(jmp.unscale(), optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    params = jnp.zeros(2)
    # True gradient (3, 4): norm 5, clipped to (0.6, 0.8). Clipped first, it would be 1024 times less.
    updates, _ = tx.update(
        jnp.array([3.0, 4.0]) * 1024, tx.init(params), params, loss_scale=jmp.StaticLossScale(1024)
    )
    np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=4 * np.finfo(np.float32).eps)


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


def test_gradients_are_unscaled_by_the_scale_that_scaled_them():
    # A period of 1: the scale doubles on every step. With the adjusted scale the update would be half.
    tx = jmp.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(2.0, period=1))
    params, x = jnp.zeros(2), jnp.array([3.0, -5.0])
    opt_state = tx.init(params)
    for step in range(1, 6):
        grads = jmp.grad(lambda w: jnp.sum(w * x), jmp.get_loss_scale(opt_state))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        assert updates.tolist() == [-3.0, 5.0]
        assert float(jmp.get_loss_scale(opt_state).loss_scale) == 2.0 ** (step + 1)


# Skipping


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("name", INNERS)
def test_a_skipped_step_leaves_params_and_state_bit_identical(name):
    tx, step = wrapped(name)
    params, opt_state = run(tx, [make_grads(0), make_grads(1)], step=step)
    for value in BAD:
        params_after, state_after = step(params, opt_state, spoil(make_grads(2), value))
        assert bits(params_after) == bits(params)
        assert bits(inner_of(state_after)) == bits(inner_of(opt_state))
    params_after, state_after = step(params, opt_state, make_grads(2))
    assert bits(inner_of(state_after)) != bits(inner_of(opt_state)) or name == "sgd"


@pytest.mark.cases(fast=4, slow=4)
@pytest.mark.parametrize("name", INNERS)
def test_steps_after_a_skip_are_as_if_it_had_never_come(name):
    tx, step = wrapped(name)
    good = [make_grads(t) for t in range(4)]
    bad = [spoil(good[0], value) for value in BAD]
    events = [bad[0], good[0], good[1], *bad, good[2], bad[1], good[3]]
    params, opt_state = run(tx, events, step=step)
    params_without, state_without = run(tx, good, step=step)
    assert bits(params) == bits(params_without)
    assert bits(inner_of(opt_state)) == bits(inner_of(state_without))
    assert bits(params) != bits(make_params())
    assert int(jmp.metrics(opt_state)["skipped_steps"]) == 5


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize("name", INNERS)
def test_finite_steps_are_those_of_the_inner_transform(name):
    # Compiled each its own way, so to the last bits and not to all of them.
    good = [make_grads(t) for t in range(4)]
    inner = INNERS[name]
    inner = inner.gradient_transformation() if isinstance(inner, optax.MultiSteps) else inner
    tx, step = wrapped(name)
    params, opt_state = run(tx, good, step=step)
    params_plain, state_plain = run(inner, good)
    chex.assert_trees_all_close(params, params_plain, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_equal_shapes_and_dtypes(inner_of(opt_state), state_plain)


def test_minus_zero_parameters_keep_their_sign_when_skipped():
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    params = jnp.array([-0.0, 0.0, 1.0])
    params_after, _ = make_step(tx)(params, tx.init(params), jnp.array([np.nan, 1.0, 1.0]))
    assert np.signbit(params_after).tolist() == [True, False, False]
    assert bits(params_after) == bits(params)


def test_complex_minus_zero_parameters_keep_their_sign_when_skipped():
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    params = jax.lax.complex(jnp.array([-0.0, 0.0]), jnp.array([-0.0, -0.0]))
    grads = jax.lax.complex(jnp.zeros(2), jnp.array([np.inf, 0.0]))
    params_after, opt_state = make_step(tx)(params, tx.init(params), grads)
    assert not jmp.grads_finite(opt_state)
    assert bits(params_after) == bits(params)


def test_an_inf_under_a_clip_is_skipped_and_not_clipped():
    for clip in (optax.clip(1.0), optax.clip_by_global_norm(1.0)):
        tx = jmp.skip_nonfinite(optax.chain(clip, optax.sgd(1.0)))
        params, opt_state = run(tx, [spoil(make_grads(0), np.inf)])
        assert bits(params) == bits(make_params())
        assert int(jmp.metrics(opt_state)["skipped_steps"]) == 1
    # The other way round the clip has made a number of it, and nobody can know.
    blind = optax.chain(optax.clip(1.0), jmp.skip_nonfinite(optax.sgd(1.0)))
    params, opt_state = run(blind, [spoil(make_grads(0), np.inf)])
    assert int(jmp.metrics(opt_state)["skipped_steps"]) == 0
    assert float(params["dense"]["kernel"][0, 0]) == -2.0


def test_a_nonfinite_update_is_never_applied_however_many_in_a_row():
    tx = jmp.with_loss_scale(optax.adamw(1e-2))
    params = make_params()

    bad = jax.tree.map(lambda g: jnp.broadcast_to(g, (500, *g.shape)), spoil(make_grads(0)))
    after, opt_state = jax.jit(scan_of(tx))((params, tx.init(params)), bad)
    assert bits(after) == bits(params)
    assert (
        int(jmp.metrics(opt_state)["skipped_steps"])
        == int(jmp.metrics(opt_state)["consecutive_skipped_steps"])
        == 500
    )
    assert float(jmp.get_loss_scale(opt_state).loss_scale) == 1.0


@pytest.mark.parametrize("where", [("dense", "kernel"), ("dense", "bias")])
def test_one_bad_element_in_any_leaf_skips_the_whole_step(where):
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    params, opt_state = run(tx, [spoil(make_grads(0), np.nan, where)])
    assert bits(params) == bits(make_params())
    named = dict(zip(opt_state.leaf_names.paths, opt_state.leaf_finite.tolist()))
    assert named == {"dense/bias": True, "dense/kernel": True, "gain": True, "/".join(where): False}


def test_leaves_whose_paths_join_to_one_name_are_each_checked():
    params = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    for bad in (
        {"a": {"b": jnp.full(2, np.nan)}, "a/b": jnp.ones(2)},
        {"a": {"b": jnp.ones(2)}, "a/b": jnp.full(2, np.nan)},
    ):
        after, opt_state = run(tx, [bad], params)
        assert bits(after) == bits(params)
        assert int(jmp.metrics(opt_state)["skipped_steps"]) == 1


# MultiSteps


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [jmp.skip_nonfinite, jmp.with_loss_scale])
def test_multi_steps_inside_drops_the_bad_micro_batch_and_counts_the_others(wrap):
    good = [make_grads(step) for step in range(6)]
    bad = spoil(make_grads(9), np.inf)
    tx = wrap(optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=3))
    params, opt_state = run(tx, [good[0], bad, good[1], good[2], good[3], good[4], bad, bad, good[5]])
    expected, _ = run(tx, good)
    assert bits(params) == bits(expected)
    assert int(opt_state.inner_state.gradient_step) == 2
    assert int(opt_state.inner_state.mini_step) == 0
    plain, _ = run(optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=3).gradient_transformation(), good)
    chex.assert_trees_all_close(params, plain, rtol=1e-5, atol=1e-7)
    assert bits(params) != bits(make_params())


def test_multi_steps_between_two_updates_leaves_the_parameters_alone():
    tx = jmp.with_loss_scale(optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2))
    params, opt_state = run(tx, [make_grads(0), spoil(make_grads(1))])
    # -0.0 becomes 0.0 here: MultiSteps itself adds plain zeros in between.
    chex.assert_trees_all_equal(params, make_params())
    assert int(opt_state.inner_state.mini_step) == 1


# dtypes


@pytest.mark.parametrize("name", sorted(set(INNERS) - {"noisy_sgd"}))
@pytest.mark.parametrize(
    ("params_dtype", "grads_dtype"),
    [(jnp.float32, jnp.float16), (jnp.float16, jnp.bfloat16), (jnp.bfloat16, jnp.float32)],
)
def test_the_state_keeps_its_dtypes_whatever_those_of_gradients_and_parameters(
    name, params_dtype, grads_dtype
):
    tx, _ = wrapped(name)
    shape = lambda dtype: jax.eval_shape(lambda: make_params(dtype))
    params, grads = (
        shape(params_dtype),
        jax.tree.map(lambda g: g.update(shape=(3, *g.shape)), shape(grads_dtype)),
    )
    opt_state = jax.eval_shape(tx.init, params)
    # A scan takes only a state whose shapes, dtypes and weak types stay from the first step on.
    after, state_after = jax.eval_shape(scan_of(tx), (params, opt_state), grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {np.dtype(params_dtype)}
    held = [
        m.dtype.name for m in jax.tree.leaves(inner_of(state_after)) if jnp.issubdtype(m.dtype, jnp.floating)
    ]
    assert set(held) <= {"float32", *(["bfloat16"] if name == "adamw_bf16_moment" else [])}


@pytest.mark.cases(fast=2, slow=2)
@pytest.mark.parametrize("params_dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("grads_dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_and_parameters_may_differ_in_dtype(params_dtype, grads_dtype):
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE))
    good = [make_grads(t, grads_dtype) for t in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *good, spoil(good[0]))
    params = make_params(params_dtype)
    after, state = jax.jit(scan_of(tx))((params, tx.init(params)), stacked)
    expected, _ = run(optax.adamw(SCHEDULE), [make_grads(t) for t in range(3)])
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(expected)):
        assert got.dtype == params_dtype
        # Each of three steps rounds the parameter once; gradients differ by their own rounding.
        tolerance = 3 * float(jnp.finfo(params_dtype).eps) + 0.03 * float(jnp.finfo(grads_dtype).eps)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance, atol=tolerance)
    assert int(jmp.metrics(state)["skipped_steps"]) == 1


def test_adam_moments_of_half_parameters_rest_in_float32():
    tx = jmp.with_loss_scale(optax.adam(1e-2))
    state = tx.init(make_params(jnp.float16)).inner_state[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state.mu, state.nu))} == {"float32"}
