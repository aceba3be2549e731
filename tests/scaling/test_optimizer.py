"""Skipped steps leave nothing behind, wherever the transforms stand and whatever they wrap."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import bits, make_grads, make_params, make_step, run, spoil

import jmp_lite as jmp

BAD = [np.nan, np.inf, -np.inf]
SCHEDULE = optax.cosine_decay_schedule(1e-2, 20)

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


@pytest.mark.parametrize(("given", "said"), [({}, "nothing"), ({"loss_scale": 4.0}, "float")])
def test_unscale_without_a_loss_scale_is_an_error(given, said):
    with pytest.raises(TypeError, match=rf"was given\s+{said}. Pass it on: tx.update\(grads"):
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


def scan_of(tx):
    def step(carry, grads):
        params, opt_state = carry
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return lambda carry, grads: jax.lax.scan(step, carry, grads)[0]


@pytest.mark.parametrize("name", sorted(set(INNERS) - {"noisy_sgd"}))
@pytest.mark.parametrize("params_dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("grads_dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
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


# Extra arguments


def recorder():
    def update(updates, state, params=None, *, value, factor=1.0, **extra):
        assert not extra, extra
        return jax.tree.map(lambda u: u * factor, updates), state + value

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)


@pytest.mark.parametrize("wrap", [jmp.skip_nonfinite, jmp.with_loss_scale])
def test_extra_arguments_reach_the_inner_transform(wrap):
    tx = optax.chain(wrap(optax.chain(recorder(), optax.sgd(1.0))), optax.identity())
    params = jnp.ones(2)
    state = tx.init(params)
    updates, state = tx.update(params, state, params, value=jnp.float32(7), factor=3.0)
    assert updates.tolist() == [-3.0, -3.0]
    assert float(state[0].inner_state[0]) == 7.0
    _, state = tx.update(params * np.nan, state, params, value=jnp.float32(7), factor=3.0)
    assert float(state[0].inner_state[0]) == 7.0


def test_reduce_on_plateau_gets_its_value():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = jmp.with_loss_scale(optax.chain(optax.sgd(1.0), plateau))
    params = jnp.ones(2)
    state = tx.init(params)
    for _ in range(4):
        _, state = tx.update(params, state, params, value=jnp.float32(1))
    assert float(state.inner_state[1].scale) < 1.0
    before = bits(state.inner_state)
    _, state = tx.update(params * np.inf, state, params, value=jnp.float32(np.nan))
    assert bits(state.inner_state) == before


def test_a_line_search_gets_value_and_function():
    value_fn = lambda w: jnp.sum((w - 3.0) ** 2)
    tx = jmp.skip_nonfinite(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)))
    params = jnp.zeros(2)
    state = tx.init(params)
    for _ in range(5):
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
        params = optax.apply_updates(params, updates)
    assert float(value_fn(params)) < 1.0 < float(value_fn(jnp.zeros(2)))
    bad = params * np.nan
    updates, after = tx.update(bad, state, params, value=value_fn(bad), grad=bad, value_fn=value_fn)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert bits(after.inner_state) == bits(state.inner_state)


def test_with_loss_scale_turns_down_a_second_loss_scale():
    tx = jmp.with_loss_scale(optax.sgd(1.0))
    with pytest.raises(TypeError, match=r"given loss_scale=, but this optimizer holds its own"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), loss_scale=jmp.NoOpLossScale())
    with pytest.raises(TypeError, match=r"expected a loss scale such as .* got float"):
        jmp.with_loss_scale(optax.sgd(1.0), 2.0**15)


def test_gradients_of_unknown_parameters_are_an_error():
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"not initialised with: \['b'\]. It knows \['a'\]"):
        tx.update({"b": jnp.ones(2)}, tx.init({"a": jnp.ones(2)}))


def test_parameters_without_a_gradient_count_as_finite():
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    _, state = tx.update({"a": jnp.ones(2), "b": None}, tx.init(params))
    assert bool(jmp.grads_finite(state))
    _, state = tx.update({"a": None, "b": jnp.ones(2) * np.nan}, tx.init(params))
    assert state.leaf_finite.tolist() == [True, False]


def test_an_empty_parameter_tree_is_finite():
    tx = jmp.with_loss_scale(optax.sgd(1.0))
    updates, state = tx.update({}, tx.init({}), {})
    assert (updates, bool(jmp.grads_finite(state))) == ({}, True)


# Transformations


def test_a_scan_and_a_loop_of_jitted_steps_agree():
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE), jmp.DynamicLossScale(2.0**10, period=2, hysteresis=1))
    grads = [make_grads(t) for t in range(6)]
    grads[1], grads[2], grads[5] = (spoil(grads[i], v) for i, v in zip((1, 2, 5), BAD))
    params, opt_state = run(tx, grads)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    carry = (make_params(), tx.init(make_params()))
    scanned, scanned_state = jax.jit(scan_of(tx))(carry, stacked)
    chex.assert_trees_all_close(scanned, params, rtol=1e-5, atol=1e-7)
    assert bits(scanned_state.loss_scale) == bits(opt_state.loss_scale)
    assert scanned_state.leaf_finite.tolist() == opt_state.leaf_finite.tolist() == [True, False, True]
    assert int(scanned_state.counts[..., 1]) == int(opt_state.counts[..., 1]) == 3


def test_each_member_of_an_ensemble_skips_alone():
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE))
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    params = stack(make_params(), make_params(), make_params())
    opt_state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(make_step(tx)))
    good, bad = make_grads(0), spoil(make_grads(0), np.inf)
    params, opt_state = step(params, opt_state, stack(good, bad, good))
    params, opt_state = step(params, opt_state, stack(good, good, bad))
    params, opt_state = step(params, opt_state, stack(good, good, good))
    assert opt_state.counts[..., 1].tolist() == [0, 1, 1]
    assert opt_state.loss_scale.loss_scale.tolist() == [2.0**15, 2.0**14, 2.0**14]
    assert opt_state.inner_state[0].count.tolist() == [3, 2, 2]
    member = lambda i: bits(jax.tree.map(lambda leaf: leaf[i], params))
    assert member(1) == member(2) != member(0)


def device_mesh():
    assert jax.device_count() >= 8
    return Mesh(np.asarray(jax.devices()[:8]), ("data",))


def sharded_update(axis_name):
    """A step in which each device holds and updates its own slice of the parameters."""
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE), axis_name=axis_name)
    params = {"w": jnp.linspace(-1, 1, 16), "v": jnp.full(8, -0.0)}
    opt_state = tx.init(jax.tree.map(lambda leaf: leaf[: leaf.size // 8], params))
    is_slice = lambda leaf: leaf.dtype == np.float32 and leaf.ndim == 1
    opt_state = jax.tree.map(lambda s: jnp.tile(s, 8) if is_slice(s) else s, opt_state)
    specs = jax.tree.map(lambda s: P("data") if is_slice(s) else P(), opt_state)

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return params, opt_state, specs, step


def test_all_devices_of_a_shard_map_agree_to_skip():
    params, opt_state, specs, step = sharded_update("data")
    arguments = (P("data"), specs, P("data"))
    sharded = jax.jit(
        jax.shard_map(step, mesh=device_mesh(), in_specs=arguments, out_specs=(P("data"), specs))
    )
    grads = jax.tree.map(jnp.ones_like, params)
    params, opt_state = sharded(params, opt_state, grads)
    bad = {**grads, "w": grads["w"].at[7].set(np.inf)}  # On device 3 alone.
    after, state_after = sharded(params, opt_state, bad)
    assert bits(after) == bits(params)
    assert bits(state_after.inner_state) == bits(opt_state.inner_state)
    assert state_after.leaf_finite.tolist() == [True, False]
    for leaf in jax.tree.leaves(
        (state_after.loss_scale, state_after.counts[..., 1], state_after.leaf_finite)
    ):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert float(state_after.loss_scale.loss_scale) == 2.0**14
    after, state_after = sharded(after, state_after, grads)
    assert bits(after) != bits(params)


def test_without_an_axis_name_the_devices_of_a_shard_map_part_ways():
    params, opt_state, specs, step = sharded_update(None)
    arguments = (P("data"), specs, P("data"))
    sharded = jax.shard_map(
        step, mesh=device_mesh(), in_specs=arguments, out_specs=(P("data"), specs), check_vma=False
    )
    grads = jax.tree.map(jnp.ones_like, params)
    after, _ = jax.jit(sharded)(params, opt_state, {**grads, "w": grads["w"].at[7].set(np.inf)})
    changed = np.asarray(after["w"] != params["w"]).reshape(8, 2).any(1)
    assert changed.tolist() == [True] * 3 + [False] + [True] * 4


@pytest.mark.parametrize("param_spec", [P(), P("data")], ids=["replicated", "sharded"])
def test_an_inf_in_one_shard_skips_everywhere_under_jit(param_spec):
    mesh = device_mesh()
    place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE))
    params = place({"w": jnp.linspace(-1, 1, 64).reshape(16, 4), "v": jnp.full((8, 4), -0.0)}, param_spec)
    opt_state = jax.jit(tx.init)(params)

    def loss_fn(params, x):
        hidden = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16))
        return jnp.mean((hidden.astype(jnp.float32) @ params["v"].T - 1.0) ** 2)

    @jax.jit
    def step(params, opt_state, x):
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    x = np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16)
    x_bad = x.copy()
    x_bad[13, 2] = np.nan  # One example, on device 3.
    params, opt_state, _ = step(params, opt_state, place(x, P("data")))
    after, state_after, loss = step(params, opt_state, place(x_bad, P("data")))
    assert np.isnan(float(loss))
    assert bits(after) == bits(params)
    assert bits(state_after.inner_state) == bits(opt_state.inner_state)
    assert int(state_after.counts[..., 1]) == 1
    for leaf in jax.tree.leaves(
        (state_after.loss_scale, state_after.counts[..., 1], state_after.leaf_finite)
    ):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert float(state_after.loss_scale.loss_scale) == 2.0**14
    after, state_after, _ = step(after, state_after, place(x, P("data")))
    assert bits(after) != bits(params)
    assert int(state_after.counts[..., 2]) == 0


# The inner transform is called as it is


def test_a_transform_may_read_its_state_outside_jit():
    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: u * int(state), updates), state + 1

    inner = optax.GradientTransformation(lambda params: jnp.int32(1), update)
    tx = jmp.skip_nonfinite(inner)
    state = tx.init(jnp.float32(0))
    found = []
    for grad in (1.0, np.nan, 1.0):
        updates, state = tx.update(jnp.float32(grad), state)
        found.append(float(updates))
    assert found == [1.0, 0.0, 2.0]


def test_a_state_of_another_structure_is_an_error():
    inner = optax.GradientTransformation(lambda params: (jnp.int32(0),), lambda u, s, p=None: (u, (*s, s[0])))
    tx = jmp.skip_nonfinite(inner)
    with pytest.raises(ValueError, match="returned a state of another structure than it was given"):
        tx.update(jnp.float32(1), tx.init(jnp.float32(0)))


# Compilation and memory

POLICIES = ["full", "p=f32,c=f16,o=f32", "p=f32,c=bf16,o=f32", "half", "O2"]
LOSS_SCALES = {
    "none": jmp.NoOpLossScale(),
    "static": jmp.StaticLossScale(2.0**10),
    "dynamic": jmp.DynamicLossScale(2.0**10, period=2),
    "hysteresis": jmp.DynamicLossScale(2.0**10, period=2, hysteresis=1),
}


@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
@pytest.mark.parametrize("policy_name", POLICIES)
def test_one_compilation_in_three_steps_and_no_weak_types(policy_name, loss_scale):
    policy = jmp.get_policy(policy_name)
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE), LOSS_SCALES[loss_scale])
    params = policy.cast_to_param(
        {"dense": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4)}, "norm": {"scale": jnp.ones(4)}}
    )
    traces = []

    def loss_fn(params, x):
        params, x = policy.cast_to_compute((params, x))
        hidden = (x @ params["dense"]["kernel"]) * params["norm"]["scale"]
        return jnp.mean(policy.cast_to_output(hidden).astype(jnp.float32) ** 2)

    @jax.jit
    def step(params, opt_state, x):
        traces.append(1)
        loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    avals = [jax.typeof(leaf) for leaf in jax.tree.leaves((params, opt_state))]
    for t in range(3):
        x = jnp.full((2, 3), np.inf if t == 1 else 1.0)
        params, opt_state, loss = step(params, opt_state, x)
        assert [jax.typeof(leaf) for leaf in jax.tree.leaves((params, opt_state))] == avals
        assert not any(leaf.weak_type for leaf in jax.tree.leaves((params, opt_state, loss)))
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert int(jmp.metrics(opt_state)["skipped_steps"]) == 1


def memory_of(tx):
    """The memory of a compiled, donated update of six equal leaves, and the bytes of one of them."""
    params = {f"w{i}": jax.ShapeDtypeStruct((128, 128), jnp.float32) for i in range(6)}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.eval_shape(tx.init, params)
    return step.lower(params, opt_state, params).compile().memory_analysis(), 4 * 128**2


def test_donated_parameters_and_moments_stay_in_place():
    memory, leaf = memory_of(jmp.with_loss_scale(optax.adamw(1e-3)))
    assert memory.alias_size_in_bytes >= 3 * 6 * leaf
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < leaf


def test_strict_dtype_promotion_is_kept():
    tx = jmp.with_loss_scale(optax.sgd(jnp.float32(0.1)))
    with jax.numpy_dtype_promotion("strict"):
        _, opt_state = tx.update(make_grads(0), tx.init(make_params()), make_params())
    assert int(jmp.metrics(opt_state)["skipped_steps"]) == 0


def test_lookahead_keeps_two_sets_of_parameters_and_skips_both():
    params = optax.LookaheadParams.init_synced(make_params())
    tx = jmp.skip_nonfinite(optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5))
    opt_state = tx.init(params)
    updates, opt_state = tx.update(spoil(make_grads(0)), opt_state, params)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert int(jmp.metrics(opt_state)["skipped_steps"]) == 1
