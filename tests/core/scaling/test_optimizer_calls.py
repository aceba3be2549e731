"""The wrapped optimizer under jit, scan, vmap, shard_map and donation, with extra arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from tests.support.optimizers import SCHEDULE
from tests.support.steps import bits, make_grads, make_params, make_step, spoil


def recorder():
    def update(updates, state, params=None, *, value, factor=1.0, **extra):
        assert not extra, extra
        return jax.tree.map(lambda u: u * factor, updates), state + value

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)


def test_extra_arguments_reach_the_inner_transform():
    tx = optax.chain(jmp.with_loss_scale(optax.chain(recorder(), optax.sgd(1.0))), optax.identity())
    params = jnp.ones(2)
    state = tx.init(params)
    updates, state = tx.update(params, state, params, value=jnp.float32(7), factor=3.0)
    assert updates.tolist() == [-3.0, -3.0]
    assert float(state[0].inner_state[0]) == 7.0
    _, state = tx.update(params * np.nan, state, params, value=jnp.float32(7), factor=3.0)
    assert float(state[0].inner_state[0]) == 7.0


@pytest.mark.slow
def test_extra_arguments_reach_the_optimizer_of_an_accumulation():
    plateau = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    accumulation = optax.MultiSteps(plateau, 2)
    wrapped, params = jmp.with_loss_scale(jmp.with_half_state(accumulation)), {"w": jnp.ones(2)}
    plain, ours = accumulation.init(params), wrapped.init(params)
    update, our_update = jax.jit(accumulation.update), jax.jit(wrapped.update)
    for _ in range(8):
        expected, plain = update(params, plain, params, value=jnp.float32(1))
        found, ours = our_update(params, ours, params, value=jnp.float32(1))
        np.testing.assert_array_equal(found["w"], expected["w"])
    assert expected["w"][0] > -1  # The plateau has reduced it.


def test_with_loss_scale_turns_down_a_second_loss_scale():
    tx = jmp.with_loss_scale(optax.sgd(1.0))
    with pytest.raises(TypeError, match=r"given loss_scale=, but this optimizer holds its own"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), loss_scale=jmp.NoOpLossScale())


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


@pytest.mark.slow
def test_each_member_of_an_ensemble_skips_alone():
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE))

    def stack(*trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

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

    def member(i):
        return bits(jax.tree.map(lambda leaf: leaf[i], params))

    assert member(1) == member(2) != member(0)


@pytest.mark.slow
def test_all_devices_of_a_shard_map_agree_to_skip():
    """Each device holds and updates its own slice of the parameters."""
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE), axis_name="data")
    params = {"w": jnp.linspace(-1, 1, 16), "v": jnp.full(8, -0.0)}
    opt_state = tx.init(jax.tree.map(lambda leaf: leaf[: leaf.size // 8], params))
    is_slice = lambda leaf: leaf.dtype == np.float32 and leaf.ndim == 1
    opt_state = jax.tree.map(lambda s: jnp.tile(s, 8) if is_slice(s) else s, opt_state)
    specs = jax.tree.map(lambda s: P("data") if is_slice(s) else P(), opt_state)
    mesh, arguments = Mesh(np.asarray(jax.devices()[:8]), ("data",)), (P("data"), specs, P("data"))
    step = make_step(tx).__wrapped__
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=arguments, out_specs=(P("data"), specs)))
    grads = jax.tree.map(jnp.ones_like, params)
    params, opt_state = sharded(params, opt_state, grads)
    bad = {**grads, "w": grads["w"].at[7].set(np.inf)}  # On device 3 alone.
    after, state_after = sharded(params, opt_state, bad)
    assert bits(after) == bits(params)
    assert bits(state_after.inner_state) == bits(opt_state.inner_state)
    assert state_after.leaf_finite.tolist() == [True, False]
    for leaf in jax.tree.leaves((state_after.loss_scale, state_after.counts, state_after.leaf_finite)):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert float(state_after.loss_scale.loss_scale) == 2.0**14
    after, state_after = sharded(after, state_after, grads)
    assert bits(after) != bits(params)


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


@pytest.mark.parametrize("wrap", [jmp.skip_nonfinite, jmp.with_half_state])
def test_a_state_of_another_structure_is_an_error(wrap):
    """optax.monitor is such a transform: its `init` returns an empty dict."""
    inner = optax.GradientTransformation(lambda params: (jnp.int32(0),), lambda u, s, p=None: (u, (*s, s[0])))
    tx = wrap(inner)
    with pytest.raises(ValueError, match="returned a state of another structure than it was given"):
        tx.update(jnp.float32(1), tx.init(jnp.float32(0)))


# Compilation and memory


def test_one_compilation_in_three_steps_and_no_weak_types():
    policy = jmp.get_policy("O2")
    tx = jmp.with_loss_scale(optax.adamw(SCHEDULE), jmp.DynamicLossScale(2.0**10, period=2, hysteresis=1))
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
    assert int(jmp.get_metrics(opt_state)["skipped_steps"]) == 1


def test_donated_parameters_and_moments_stay_in_place():
    tx, leaf = jmp.with_loss_scale(optax.adamw(1e-3)), 4 * 128**2
    params = {f"w{i}": jax.ShapeDtypeStruct((128, 128), jnp.float32) for i in range(6)}
    step = jax.jit(make_step(tx).__wrapped__, donate_argnums=(0, 1))
    memory = step.lower(params, jax.eval_shape(tx.init, params), params).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * 6 * leaf
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < leaf


@pytest.mark.slow
def test_strict_dtype_promotion_is_kept():
    tx = jmp.with_loss_scale(optax.sgd(jnp.float32(0.1)))
    with jax.numpy_dtype_promotion("strict"):
        _, opt_state = tx.update(make_grads(0), tx.init(make_params()), make_params())
    assert int(jmp.get_metrics(opt_state)["skipped_steps"]) == 0


# A CPU has a condition, a GPU selects


def test_a_cpu_has_a_condition_and_a_gpu_none():
    """benchmarks/tests/compiled/test_h100.py counts the conditions and kernels of a whole GPU program."""
    tx = jmp.with_loss_scale(optax.adamw(1e-2))
    traced = make_step(tx).trace(make_params(), tx.init(make_params()), make_grads(0))
    lowered = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")}
    # JAX writes the choice of the platform as conditions on a constant, which XLA folds.
    cases = {name: text.count("stablehlo.case") for name, text in lowered.items()}
    assert cases["cpu"] - 1 == cases["cuda"] == cases["tpu"]
    assert traced.lower().compile().as_text().count(" conditional(") == 1


def test_the_optimizer_is_traced_once():
    calls = []
    update = lambda updates, state, params=None: (calls.append(1) or updates, state)
    tx = jmp.with_loss_scale(optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    make_step(tx).trace(make_params(), tx.init(make_params()), make_grads(0))
    assert len(calls) == 1


@pytest.mark.slow
def test_a_gradient_goes_through_an_update():
    """As in meta-learning: of a plain SGD step the gradient is minus the learning rate."""
    tx = jmp.skip_nonfinite(optax.sgd(0.25))
    state = tx.init(make_params())
    total = lambda grads: sum(x.sum() for x in jax.tree.leaves(tx.update(grads, state, make_params())[0]))
    for reverse in (jax.grad(total), jax.jit(jax.grad(total))):
        assert all((leaf == -0.25).all() for leaf in jax.tree.leaves(reverse(make_grads(0))))
