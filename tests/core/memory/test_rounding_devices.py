"""Stochastic rounding inside `shard_map`, `pmap` and `vmap`: `axis_name=`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, WIDTH = 8, 256
PARAMS = {"split": jnp.ones((ROWS, WIDTH), jnp.bfloat16), "whole": jnp.ones((WIDTH,), jnp.bfloat16)}
GRADS = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-10), PARAMS)
SPECS = {"split": P("data"), "whole": P()}
ROUNDING = {
    "parameters": lambda **s: jmp.with_stochastic_rounding(optax.sgd(1.0), **s),
    "state": lambda **s: jmp.with_half_state(optax.trace(0.9), **s),
}


def changed(tx, check_vma, specs=SPECS, steps=2):
    """What each device has after steps inside `shard_map`: updated parameters or a state in bfloat16."""

    def body(params, grads):
        state = tx.init(params)
        for _ in range(steps):
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        rounded = state.inner_state.trace if isinstance(state, jmp._memory.half_state.HalfState) else params
        # A copy of each device, so that the replicated ones can be compared.
        return rounded, jax.tree.map(lambda leaf: leaf[None], rounded)

    copies = P(("data", "model"))
    inside = jax.shard_map(
        body, mesh=MESH, in_specs=(specs, specs), out_specs=(specs, copies), check_vma=check_vma
    )
    sums, each_device = jax.jit(inside)(PARAMS, jax.tree.map(lambda g: g * 1.37, GRADS))
    return jax.tree.map(np.asarray, (sums, each_device))


def equal_shards(split):
    """The pairs of the four shards that are equal."""
    shards = np.split(split.astype(np.float32), 4)
    return sum(np.array_equal(a, b) for i, a in enumerate(shards) for b in shards[:i])


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDING)
def test_shards_of_equal_values_round_alike_without_axis_name_and_apart_with_it(rounding):
    alike, _ = changed(ROUNDING[rounding](), False)
    apart, _ = changed(ROUNDING[rounding](axis_name="data"), False, {"split": P("data"), "whole": P("data")})
    assert equal_shards(alike["split"]) == 6
    assert equal_shards(apart["split"]) == 0
    assert len(np.unique(apart["split"])) > 1


@pytest.mark.cases(fast=2, slow=0)
@pytest.mark.parametrize("rounding", ROUNDING)
@pytest.mark.parametrize("axis_name", ["data", ("data", "model"), ["data"]])
def test_replicated_arrays_keep_the_same_bits_on_all_devices(rounding, axis_name):
    result, copies = changed(ROUNDING[rounding](axis_name=axis_name), True)
    assert equal_shards(result["split"]) == 0
    whole = copies["whole"].astype(np.float32)
    assert len(np.unique(whole)) > 1
    np.testing.assert_array_equal(whole, np.broadcast_to(whole[0], whole.shape))
    # Along "model" no array is sharded.
    split = copies["split"].reshape(4, 2, 2, WIDTH).astype(np.float32)
    np.testing.assert_array_equal(split[:, 0], split[:, 1])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("rounding", ROUNDING)
def test_members_of_an_ensemble_round_apart_with_axis_name(rounding):
    members = jnp.ones((3, WIDTH), jnp.bfloat16)

    def train(tx, params):
        state = tx.init(params)
        updates, state = tx.update(jnp.full(WIDTH, 1.37 * 2.0**-10), state, params)
        return state.inner_state.trace if rounding == "state" else optax.apply_updates(params, updates)

    run = lambda **axis: jax.vmap(functools.partial(train, ROUNDING[rounding](**axis)), **axis)
    alike, apart = jax.jit(run())(members), jax.jit(run(axis_name="e"))(members)
    count = lambda trees: len({np.asarray(member).tobytes() for member in trees})
    assert (count(alike), count(apart)) == (1, 3)


def test_the_key_of_the_state_is_the_same_on_all_devices():
    tx = ROUNDING["parameters"](axis_name="data")

    def body(params, grads):
        return tx.update(grads, tx.init(params), params)[1].key

    inside = jax.shard_map(body, mesh=MESH, in_specs=(SPECS, SPECS), out_specs=P())  # Checked: replicated.
    key, expected = jax.jit(inside)(PARAMS, GRADS), tx.init(PARAMS).key
    assert int(key.step) == (int(expected.step) + 1) % 2**32
    assert key.word == expected.word


@pytest.mark.parametrize("rounding", ROUNDING)
def test_an_axis_that_is_not_there_is_named(rounding):
    tx = ROUNDING[rounding](axis_name="data")
    with pytest.raises(ValueError, match=r"axis_name='data' is no axis of .*Under jit leave axis_name out"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


# Explicit axes


WRAPPERS = {
    "both": (
        jnp.bfloat16,
        lambda tx: jmp.with_loss_scale(jmp.with_stochastic_rounding(jmp.with_half_state(tx))),
    ),
    "masters": (jnp.bfloat16, lambda tx: jmp.with_loss_scale(jmp.with_master_params(tx))),
    "parameters": (jnp.bfloat16, jmp.with_stochastic_rounding),
    "state": (jnp.float32, jmp.with_half_state),
}


@pytest.mark.cases(slow=2)  # The others are parts of the first.
@pytest.mark.parametrize("name", WRAPPERS)
def test_explicit_axes_need_no_mesh_that_is_set(name):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = {"w": P(None, "model"), "b": P(("data", "model"))}
    dtype, wrap = WRAPPERS[name]
    values = {"w": jnp.full((16, 32), 0.3), "b": jnp.full(64, -0.7)}
    place = lambda leaf, spec: jax.device_put(leaf.astype(dtype), jax.NamedSharding(mesh, spec))
    tx = wrap(optax.adam(1e-3))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(lambda p: p * 2.0, params), state, params)
        return optax.apply_updates(params, updates), state

    def trained(params):
        state = tx.init(params)
        for _ in range(2):  # From the first step on, the key is an array of the mesh as well.
            params, state = step(params, state)
        return params

    params = trained(jax.tree.map(place, values, specs))
    whole = trained(jax.tree.map(lambda leaf: leaf.astype(dtype), values))
    for leaf, other, spec in zip(*map(jax.tree.leaves, (params, whole, specs)), strict=True):
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), leaf.ndim)
        np.testing.assert_array_equal(*(np.asarray(p, np.float32) for p in (leaf, other)))
