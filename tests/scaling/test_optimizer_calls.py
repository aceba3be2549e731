"""The wrapped optimizer under jit, scan, vmap, shard_map and donation, with extra arguments."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from tests.support.optimizers import BAD, SCHEDULE, scan_of
from tests.support.steps import bits, make_grads, make_params, make_step, run, spoil


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
    with pytest.raises(TypeError, match=r"expected a loss scale such as .* Got float"):
        jmp.with_loss_scale(optax.sgd(1.0), 2.0**15)


def test_gradients_of_unknown_parameters_are_an_error():
    tx = jmp.skip_nonfinite(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"not initialized with: \['b'\]. It knows \['a'\]"):
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


@pytest.mark.slow
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


def test_without_an_axis_name_the_devices_of_a_shard_map_skip_different_steps():
    params, opt_state, specs, step = sharded_update(None)
    arguments = (P("data"), specs, P("data"))
    sharded = jax.shard_map(
        step, mesh=device_mesh(), in_specs=arguments, out_specs=(P("data"), specs), check_vma=False
    )
    grads = jax.tree.map(jnp.ones_like, params)
    after, _ = jax.jit(sharded)(params, opt_state, {**grads, "w": grads["w"].at[7].set(np.inf)})
    changed = np.asarray(after["w"] != params["w"]).reshape(8, 2).any(1)
    assert changed.tolist() == [True] * 3 + [False] + [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("param_spec", [P(), P("data")], ids=["replicated", "sharded"])
def test_an_inf_in_one_shard_skips_everywhere_under_jit(param_spec):
    mesh = device_mesh()
    shard = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE))
    params = shard({"w": jnp.linspace(-1, 1, 64).reshape(16, 4), "v": jnp.full((8, 4), -0.0)}, param_spec)
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
    params, opt_state, _ = step(params, opt_state, shard(x, P("data")))
    after, state_after, loss = step(params, opt_state, shard(x_bad, P("data")))
    assert np.isnan(float(loss))
    assert bits(after) == bits(params)
    assert bits(state_after.inner_state) == bits(opt_state.inner_state)
    assert int(state_after.counts[..., 1]) == 1
    for leaf in jax.tree.leaves(
        (state_after.loss_scale, state_after.counts[..., 1], state_after.leaf_finite)
    ):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert float(state_after.loss_scale.loss_scale) == 2.0**14
    after, state_after, _ = step(after, state_after, shard(x, P("data")))
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
    sizes = []
    for grad in (1.0, np.nan, 1.0):
        updates, state = tx.update(jnp.float32(grad), state)
        sizes.append(float(updates))
    assert sizes == [1.0, 0.0, 2.0]


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


@pytest.mark.cases(fast=1, slow=4)
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


@pytest.mark.slow
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
