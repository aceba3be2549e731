"""Float32 master weights for parameters that rest in half precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from tests.support.optimizers import SCHEDULE
from tests.support.steps import bits, make_step, spoil

HALF = [jnp.float16, jnp.bfloat16]
# A float32 parameter among the half ones, as O2's normalization.
SHAPES = {"dense": {"kernel": (3, 4), "bias": (4,)}, "norm": {"scale": (4,)}, "gain": ()}


def make_params(dtype):
    def leaf(path, shape):
        return jnp.asarray(
            np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape) + 0.1,
            jnp.float32 if "norm" in str(path) else dtype,
        )

    return jax.tree_util.tree_map_with_path(leaf, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def make_grads(step):
    leaf = lambda p: jnp.asarray(np.cos(step + 3 * np.asarray(p, np.float32)) / 4, np.float32)
    return jax.tree.map(leaf, make_params(jnp.float16))


def wide(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def rounded(tree, like):
    return jax.tree.map(lambda leaf, p: leaf.astype(p.dtype), tree, like)


INNER = {
    "adamw": lambda: optax.adamw(SCHEDULE, weight_decay=0.1),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.1), optax.sgd(1e-3)
    ),
    "lamb": lambda: optax.lamb(1e-3),
    "multi steps": lambda: optax.MultiSteps(optax.adamw(1e-3), 2),
    "masked": lambda: optax.masked(
        optax.add_decayed_weights(0.1),
        {"dense": {"kernel": True, "bias": False}, "norm": {"scale": True}, "gain": False},
    ),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-3),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", INNER)
def test_the_masters_are_the_parameters_of_a_float32_program(name):
    """Any optimizer on half parameters with masters does what it does on float32 parameters."""
    params = make_params(jnp.float16)
    full = wide(params)
    plain = INNER[name]()
    if isinstance(plain, optax.MultiSteps):
        plain = plain.gradient_transformation()
    tx = jmp.with_loss_scale(jmp.with_master_params(INNER[name]()), jmp.NoOpLossScale())
    step, plain_step = make_step(tx), make_step(plain)
    opt_state, plain_state = tx.init(params), plain.init(full)
    for t in range(4):
        params, opt_state = step(params, opt_state, make_grads(t))
        full, plain_state = plain_step(full, plain_state, make_grads(t))
        assert bits(params) == bits(rounded(jmp.get_master_params(opt_state, params), params))
    ours = jmp.get_master_params(opt_state, params), opt_state.inner_state.inner_state
    # The compiler fuses the two programs in its own way.
    for our, their in zip(*map(jax.tree.leaves, (ours, (full, plain_state))), strict=True):
        np.testing.assert_allclose(our, their, rtol=16 * np.finfo(np.float32).eps, atol=1e-9)


@pytest.mark.cases(fast=1, slow=0)
@pytest.mark.parametrize("dtype", HALF)
def test_twenty_steps_below_half_a_unit_are_not_lost(dtype):
    """The trap of O2 without masters: 20 SGD steps of 2e-6 leave a parameter at exactly 1.0."""
    lost, kept = jnp.ones(3, dtype), jnp.ones(3, dtype)
    tx = jmp.with_master_params(optax.sgd(2e-6))
    opt_state, grads = tx.init(kept), jnp.ones(3)
    update = jax.jit(tx.update)
    for _ in range(20):
        lost = optax.apply_updates(lost, -2e-6 * grads)
        updates, opt_state = update(grads, opt_state, kept)
        kept = optax.apply_updates(kept, updates)
    assert (lost == 1).all()
    np.testing.assert_allclose(opt_state.masters, 1 - 4e-5, rtol=1e-6)
    for _ in range(980):
        updates, opt_state = update(grads, opt_state, kept)
        kept = optax.apply_updates(kept, updates)
    assert kept.dtype == dtype
    # float32 adds 2e-6 to 1 a thousand times with an error of up to half a unit each.
    np.testing.assert_allclose(
        kept.astype(jnp.float32), 1 - 2e-3, atol=float(jnp.finfo(dtype).eps) / 4 + 3e-5
    )


def test_float32_and_other_parameters_have_no_master():
    params = {"half": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2), "count": jnp.arange(2)}
    masters = jmp.with_master_params(optax.sgd(1.0)).init(params).masters
    assert masters["half"].dtype == jnp.float32
    assert masters["full"] == masters["count"] == optax.MaskedNode()
    assert len(jax.tree.leaves(masters)) == 1


@pytest.mark.slow
def test_a_zero_update_leaves_all_bits_of_every_half_number():
    for dtype in HALF:
        params = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(np.dtype(dtype)))
        size = jnp.abs(params.astype(jnp.float32))
        params = jnp.where(
            (size >= np.finfo(np.float32).tiny) & jnp.isfinite(size), params, -jnp.zeros_like(params)
        )
        tx = jmp.with_master_params(optax.set_to_zero())
        after, _ = make_step(tx)(params, tx.init(params), jnp.zeros(2**16))
        assert bits(after) == bits(params)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("inside", [True, False])
def test_the_loss_scale_may_be_inside_or_outside(inside):
    adam = optax.adam(1e-3)
    params = make_params(jnp.float16)
    tx = (
        jmp.with_master_params(jmp.with_loss_scale(adam))
        if inside
        else jmp.with_loss_scale(optax.chain(optax.clip(1.0), jmp.with_master_params(adam)))
    )
    opt_state = tx.init(params)
    step = make_step(tx)
    params, opt_state = step(params, opt_state, make_grads(0))
    before = bits(params), bits(jmp.get_master_params(opt_state, params))
    params, opt_state = step(params, opt_state, spoil(make_grads(1)))
    assert (bits(params), bits(jmp.get_master_params(opt_state, params))) == before
    assert jmp.get_loss_scale(opt_state).loss_scale == 2.0**14
    moments = [leaf.dtype for leaf in jax.tree.leaves(opt_state) if leaf.ndim == 2]
    assert moments == [jnp.dtype("float32")] * 3


def test_one_compilation_no_weak_types_and_all_in_place():
    tx = jmp.with_loss_scale(jmp.with_master_params(optax.adamw(SCHEDULE)))
    params = {f"w{i}": jnp.ones((128, 128), jnp.float16) for i in range(3)}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves((params, opt_state))]
    memory = step.lower(params, opt_state, params).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * 128**2 * (2 + 3 * 4)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        params, opt_state = step(params, opt_state, grads)
        leaves = jax.tree.leaves((params, opt_state))
        assert [jax.typeof(leaf) for leaf in leaves] == types
        assert not any(leaf.weak_type for leaf in leaves)
    assert step._cache_size() == 1


def test_tree_map_params_finds_masters_and_moments():
    params = {"w": jnp.ones((16, 2), jnp.bfloat16), "norm": jnp.ones(8)}
    tx = jmp.with_loss_scale(jmp.with_master_params(optax.adamw(1e-3)))
    mapped = optax.tree_map_params(
        tx,
        lambda leaf, name: leaf if isinstance(leaf, optax.MaskedNode) else name,
        tx.init(params),
        {"w": "W", "norm": "N"},
        transform_non_params=lambda _: None,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    assert mapped.inner_state.masters == {"w": "W", "norm": optax.MaskedNode()}
    assert mapped.inner_state.inner_state[0].mu == {"w": "W", "norm": "N"}


# A parameter that was changed between two steps


def test_the_optimizer_goes_on_from_a_parameter_that_was_changed():
    tx = jmp.with_master_params(optax.sgd(2**-12))
    params = jnp.asarray([1, 1, 1], jnp.float16)
    updates, state = tx.update(jnp.ones(3), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    changed = params.at[1].set(3)  # The others keep what their masters have below the last place.
    np.testing.assert_array_equal(jmp.get_master_params(state, changed), [1 - 2**-12, 3, 1 - 2**-12])
    updates, state = tx.update(jnp.ones(3), state, changed)
    np.testing.assert_array_equal(state.masters, [1 - 2**-11, 3 - 2**-12, 1 - 2**-11])
    np.testing.assert_array_equal(optax.apply_updates(changed, updates), state.masters.astype(jnp.float16))


@pytest.mark.parametrize("wrap", [jmp.with_master_params, jmp.with_stochastic_rounding])
@pytest.mark.parametrize("dtype", HALF)
def test_a_parameter_beyond_the_largest_half_number_stays_at_it_and_comes_back(dtype, wrap):
    largest = float(jnp.finfo(dtype).max)
    params, tx = {"w": jnp.array([largest, -largest, 1.0], dtype)}, wrap(optax.sgd(largest))
    state, step, seen = tx.init(params), jax.jit(tx.update), []
    for size in (-(2.0**-9), 2.0**-6):
        updates, state = step({"w": jnp.array([size, -size, 0.0])}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params["w"].astype(jnp.float32).tolist())
        if wrap is jmp.with_master_params and size < 0:  # The master goes on beyond it.
            assert jmp.get_master_params(state, params)["w"][0] == largest * (1 + 2.0**-9)
    assert seen[0] == [largest, -largest, 1]
    assert largest / 2 < seen[1][0] < largest
    assert seen[1] == [seen[1][0], -seen[1][0], 1]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", HALF)
def test_a_parameter_that_shrinks_a_lot_in_one_step_is_as_exact_as_in_float32(dtype):
    params = jnp.asarray([30000.0, 30000.0], dtype)
    tx = jmp.with_master_params(optax.sgd(1.0))
    updates, state = tx.update(params.astype(jnp.float32) - jnp.asarray([1e-3, 0.7]), tx.init(params), params)
    new = optax.apply_updates(params, updates)
    error = np.abs(np.asarray(new, np.float64) - np.asarray(state.masters.astype(dtype), np.float64))
    assert (error <= 30000 * 2.0**-24).all()
    np.testing.assert_array_equal(jmp.get_master_params(state, new).astype(dtype), new)


# Misuse


def test_misuse_is_named():
    params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
    tx = jmp.with_master_params(optax.sgd(1.0))
    state, grads = tx.init(params), {"w": jnp.ones(2), "norm": jnp.ones(2)}
    with pytest.raises(TypeError, match=r"with_master_params\(inner\) wraps an optax transform.*Got 0.1"):
        jmp.with_master_params(0.1)
    with pytest.raises(ValueError, match=r"depends on the parameters: tx.update\(grads"):
        tx.update(grads, state)
    with pytest.raises(TypeError, match=r"Got dict\. The state comes before the parameters"):
        tx.update(grads, params, state)
    with pytest.raises(ValueError, match=r"'norm' is float16, and had no master .* jmp\.migrate_state\(tx"):
        tx.update(grads, state, {**params, "norm": jnp.ones(2, jnp.float16)})
    with pytest.raises(ValueError, match="another structure than those that the optimizer was"):
        tx.update(grads, state, {"w": params["w"]})


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, jmp.with_loss_scale, lambda tx: optax.chain(jmp.skip_nonfinite(tx))]
)
def test_parameters_that_equinox_made_float32_are_named_and_go_on_once_they_are_cast_back(wrap):
    import equinox as eqx

    params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    tx = wrap(jmp.with_master_params(optax.adam(2.0**-12)))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = tx.update(grads, tx.init(params), params)
    wide = eqx.apply_updates(params, updates)
    with pytest.raises(
        ValueError, match=r"'w' is float32, and was in half precision .*equinox\.apply_updates"
    ) as error:
        tx.update(grads, state, wide)
    assert "migrate_state" not in str(error.value)
    with pytest.raises(ValueError, match=r"has the parts \['masters'\] there and \[\] in tx"):
        jmp.migrate_state(tx, wide, state)
    back = jax.tree.map(lambda p, old: p.astype(old.dtype), wide, params)
    full = jmp.get_master_params(state, back)
    assert 0 < 1 - float(full["w"][0]) < 2.0**-11
    tx.update(grads, state, back)
    for params in (full, back):
        with pytest.raises(ValueError, match="the state of a wrapper that tx lacks"):
            jmp.migrate_state(optax.chain(optax.adam(1e-3)), params, state)
