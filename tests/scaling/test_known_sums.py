"""Sums that the optimizer computes anyway tell whether gradients are finite; nothing else is believed."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from steps import bits

import jmp_lite as jmp
from jmp_lite._scaling.known_sums import find_known_sums

BAD = [np.nan, np.inf, -np.inf]
CLIP = optax.clip_by_global_norm(1.0)
EPS = float(np.finfo(np.float32).eps)

SHAPES = {
    "many": {"dense": {"bias": (4,), "kernel": (3, 4)}, "gain": (), "shift": (1,), "table": (2, 1, 5)},
    "one leaf": (3, 4),
    "scalars": {"a": (), "b": (1,), "c": (1, 1)},
    "one scalar": (),
    "one of shape (1,)": (1,),
}


def make_tree(shapes, value=0.5, dtype=jnp.float32):
    is_shape = lambda node: isinstance(node, tuple)
    return jax.tree.map(lambda shape: jnp.full(shape, value, dtype), shapes, is_leaf=is_shape)


def spoil(tree, place, value, where=0.0):
    """`tree` with `value` in its leaf number `place`, at the fraction `where` of its elements."""
    leaves, structure = jax.tree.flatten(tree)
    bad = np.array(leaves[place])
    bad.flat[min(int(where * bad.size), bad.size - 1)] = value
    return structure.unflatten([*leaves[:place], jnp.asarray(bad), *leaves[place + 1 :]])


# What is added to the update


def checks(tx, grads, **extra):
    """The operand shapes of every `is_finite` in the update, and those of every reduction."""
    state = jax.eval_shape(tx.init, grads)
    jaxpr = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p, **extra))(grads, state, grads)
    shapes = lambda named: sorted(
        (equation.primitive.name, equation.invars[0].aval.shape)
        for equation in equations(jaxpr)
        if named(equation.primitive.name) and equation.params.get("axes") != ()
    )
    return (
        [shape for _, shape in shapes(lambda name: name == "is_finite")],
        shapes(lambda name: name.startswith("reduce_")),
    )


# Optimizers that add up the squares of all gradients, and what their update needs besides.
SUMMING = {
    "clip": (optax.chain(CLIP, optax.adamw(1e-3)), {}),
    "nested": (
        optax.chain(optax.identity(), optax.chain(optax.chain(CLIP), optax.trace(0.9)), optax.sgd(0.1)),
        {},
    ),
    "normalize": (optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)), {}),
    "injected": (
        optax.inject_hyperparams(lambda rate: optax.chain(CLIP, optax.adamw(rate)))(rate=1e-3),
        {},
    ),
    "threaded": (
        optax.chain(jmp.unscale(), CLIP, optax.adamw(1e-3)),
        {"loss_scale": jmp.DynamicLossScale(2.0**10)},
    ),
    "unscaled": (optax.chain(jmp.unscale(), CLIP, optax.adamw(1e-3)), {"loss_scale": jmp.NoOpLossScale()}),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", SUMMING)
def test_where_the_optimizer_sums_the_check_looks_at_scalars_only(name, shapes):
    inner, extra = SUMMING[name]
    grads = make_tree(shapes, dtype=jnp.float16 if name in ("threaded", "unscaled") else jnp.float32)
    looked_at, reductions = checks(jmp.skip_nonfinite(inner), grads, **extra)
    assert looked_at == [()] * (len(jax.tree.leaves(grads)) + 1)
    assert reductions == checks(inner, grads, **extra)[1]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_with_a_loss_scale_and_a_clip_no_reduction_is_added(shapes):
    inner, grads = SUMMING["clip"][0], make_tree(shapes)
    looked_at, reductions = checks(jmp.with_loss_scale(inner), grads)
    assert looked_at == [()] * (len(jax.tree.leaves(grads)) + 1)
    assert reductions == checks(inner, grads)[1]


@pytest.mark.parametrize("wrap", [jmp.skip_nonfinite, jmp.with_loss_scale])
@pytest.mark.parametrize("inner", [optax.adamw(1e-3), optax.lamb(1e-3), optax.chain(optax.clip(1.0), CLIP)])
def test_without_such_a_sum_the_check_reads_the_leaves(wrap, inner):
    grads = make_tree(SHAPES["many"])
    looked_at, reductions = checks(wrap(inner), grads)
    assert looked_at == sorted(leaf.shape for leaf in jax.tree.leaves(grads))
    assert len(reductions) > len(checks(inner, grads)[1])


def test_one_gradient_in_half_precision_and_the_check_reads_the_leaves():
    """Its sum, of squares that are rounded to float16, may be inf where it is finite."""
    grads = {**make_tree(SHAPES["scalars"]), "d": jnp.ones(3, jnp.float16)}
    looked_at, _ = checks(jmp.skip_nonfinite(SUMMING["clip"][0]), grads)
    assert looked_at == sorted(leaf.shape for leaf in jax.tree.leaves(grads))


# The same as without such a sum

PARAMS = make_tree(SHAPES["many"], -0.0)
INNERS = {
    "clip": SUMMING["clip"][0],
    "no clip": optax.adamw(1e-3),
    "nested": SUMMING["nested"][0],
    "normalize": SUMMING["normalize"][0],
}
NAMES = ("dense/bias", "dense/kernel", "gain", "shift", "table")


@functools.cache
def stepped(name):
    """An optimizer with a loss scale after one step, and its step, compiled once for all examples."""
    tx = jmp.with_loss_scale(INNERS[name])

    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, *step(PARAMS, tx.init(PARAMS), make_tree(SHAPES["many"]))


@pytest.mark.parametrize("name", INNERS)
@hypothesis.given(place=st.integers(0, 4), value=st.sampled_from(BAD), where=st.floats(0, 1))
def test_one_bad_element_skips_the_step_and_names_its_leaf(name, place, value, where):
    step, params, opt_state = stepped(name)
    assert opt_state.leaf_finite.tolist() == [True] * 5
    after, state_after = step(params, opt_state, spoil(make_tree(SHAPES["many"]), place, value, where))
    assert bits(after) == bits(params)
    assert bits(state_after.inner_state) == bits(opt_state.inner_state)
    assert state_after.leaf_names == NAMES
    assert state_after.leaf_finite.tolist() == [i != place for i in range(5)]
    assert not jmp.grads_finite(state_after)
    assert int(state_after.skipped_steps) == int(opt_state.skipped_steps) + 1 == 1
    assert float(jmp.get_loss_scale(state_after).loss_scale) == 2.0**14


@pytest.mark.parametrize("name", INNERS)
def test_several_bad_leaves_are_all_named(name):
    step, params, opt_state = stepped(name)
    # Inf and minus inf, which are NaN together.
    grads = spoil(spoil(make_tree(SHAPES["many"]), 0, np.inf), 3, -np.inf)
    after, state_after = step(params, opt_state, grads)
    assert bits(after) == bits(params)
    assert state_after.leaf_finite.tolist() == [False, True, True, False, True]


@functools.cache
def plain_and_wrapped(name):
    inner = INNERS[name]
    tx = jmp.skip_nonfinite(inner)
    step = lambda tx: jax.jit(lambda g, s, p: tx.update(g, s, p))
    return inner, step(inner), tx, step(tx)


@pytest.mark.parametrize("name", INNERS)
@hypothesis.given(seed=st.integers(0, 1000), exponent=st.integers(-6, 8))
def test_finite_gradients_are_updated_as_by_the_optimizer_alone(name, seed, exponent):
    inner, plain_step, tx, step = plain_and_wrapped(name)
    rng = np.random.default_rng(seed)
    random = lambda: jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape) * 10.0**exponent, jnp.float32), PARAMS
    )
    state, plain_state = tx.init(PARAMS), inner.init(PARAMS)
    for _ in range(2):
        grads = random()
        updates, state = step(grads, state, PARAMS)
        plain_updates, plain_state = plain_step(grads, plain_state, PARAMS)
        assert int(state.skipped_steps) == 0
        got, want = (updates, state.inner_state), (plain_updates, plain_state)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            # The largest element is what a sum of several terms may be rounded by.
            np.testing.assert_allclose(a, b, rtol=4 * EPS, atol=4 * EPS * np.abs(b).max())
        assert all(np.any(leaf) for leaf in jax.tree.leaves(updates))


def test_gradients_in_float16_are_unscaled_and_checked_by_the_clip():
    tx = jmp.skip_nonfinite(optax.chain(jmp.unscale(), CLIP, optax.sgd(1.0)))
    step = jax.jit(lambda g, s, p, loss_scale: tx.update(g, s, p, loss_scale=loss_scale))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(())}
    scale = jmp.StaticLossScale(2.0**10)
    # Squared in float16 these would be inf. True gradients: 30, 40, 0.
    grads = {"a": jnp.asarray([30720, 40960], jnp.float16), "b": jnp.float16(0)}
    updates, state = step(grads, tx.init(params), params, scale)
    assert bool(jmp.grads_finite(state))
    np.testing.assert_allclose(updates["a"], [-0.6, -0.8], rtol=4 * EPS)
    for place, value in [(0, np.inf), (1, -np.inf), (1, np.nan)]:
        updates, state = step(spoil(grads, place, value), tx.init(params), params, scale)
        assert state.leaf_finite.tolist() == [i != place for i in range(2)]
        assert [not np.any(leaf) for leaf in jax.tree.leaves(updates)] == [True, True]


def test_each_member_of_an_ensemble_is_checked_by_its_own_sums():
    tx = jmp.with_loss_scale(INNERS["clip"])
    members = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tree)
    params = members(PARAMS)
    state = jax.vmap(tx.init)(params)
    grads = members(make_tree(SHAPES["many"]))
    grads["gain"] = grads["gain"].at[1].set(np.nan)
    updates, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    assert jmp.grads_finite(state).tolist() == [True, False, True]
    assert state.leaf_finite[1].tolist() == [name != "gain" for name in NAMES]
    assert [bool(np.any(updates["table"][i])) for i in range(3)] == [True, False, True]


def test_a_sum_that_the_optimizer_keeps_is_the_old_one_after_a_skipped_step():
    def update(updates, state, params=None):
        total = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(updates))
        return jax.tree.map(lambda leaf: leaf / total, updates), total

    inner = optax.GradientTransformation(lambda params: jnp.float32(7), update)
    tx, grads = jmp.skip_nonfinite(inner), make_tree(SHAPES["scalars"])
    assert checks(tx, grads)[0] == [()] * 4
    _, state = jax.jit(tx.update)(spoil(grads, 1, np.inf), tx.init(grads))
    assert (float(state.inner_state), int(state.skipped_steps)) == (7.0, 1)
    _, state = jax.jit(tx.update)(grads, state)
    assert (float(state.inner_state), int(state.skipped_steps)) == (0.75, 1)


# The one difference


def test_gradients_whose_squares_no_float32_holds_count_as_not_finite_under_a_clip():
    step, params, opt_state = stepped("clip")
    for size, finite in [(1e18, True), (1e25, False), (3e38, False)]:
        grads = spoil(make_tree(SHAPES["many"]), 1, size)
        after, state_after = step(params, opt_state, grads)
        assert bool(jmp.grads_finite(state_after)) is finite
        assert state_after.leaf_finite.tolist() == [True, finite, True, True, True]
        assert (bits(after) == bits(params)) is not finite
        step_without, _, state_without = stepped("no clip")
        assert bool(jmp.grads_finite(step_without(params, state_without, grads)[1]))


# Sums that do not tell

FLOATS = lambda tree: jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), tree)


def looking_at(function):
    """A transform that multiplies by a number that it computes of the gradients, and of a state of zeros."""

    def update(updates, state, params=None):
        number = function(updates, state)
        return jax.tree.map(lambda u: (u * number).astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def norms_of(function):
    return looking_at(lambda updates, state: norm(jax.tree.map(function, updates, state)))


# What hides inf or NaN of a gradient, or makes one of finite ones.
MISLEADING = {
    "masked clip": optax.chain(
        optax.masked(CLIP, {"a": True, "b": [True, False], "c": True}), optax.adamw(1e-3)
    ),
    "two masked clips": optax.chain(
        optax.masked(CLIP, {"a": True, "b": [True, False], "c": False}),
        optax.masked(CLIP, {"a": False, "b": [False, True], "c": True}),
    ),
    "clip": optax.clip(1.0),
    "clip, then norm": optax.chain(optax.clip(1.0), CLIP),
    "block rms": optax.chain(optax.clip_by_block_rms(1.0), optax.adamw(1e-3)),
    "block rms, then norm": optax.chain(optax.clip_by_block_rms(1.0), CLIP),
    "adaptive": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "factored rms": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "prodigy": optax.contrib.prodigy(),
    "dadapt_adamw": optax.contrib.dadapt_adamw(),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "multi_steps": optax.MultiSteps(optax.chain(CLIP, optax.adamw(1e-3)), every_k_schedule=2),
    "zero_nans, then norm": optax.chain(optax.zero_nans(), CLIP),
    "decay, then norm": optax.chain(optax.add_decayed_weights(0.1), CLIP),
    "centralize, then norm": optax.chain(optax.centralize(), CLIP),
    "noise, then norm": optax.chain(optax.add_noise(0.1, 0.1, 0), CLIP),
    "finite ones only": norms_of(lambda u, s: jnp.where(jnp.isfinite(u), u, 0)),
    "lax.select": norms_of(lambda u, s: lax.select(jnp.isfinite(u), u, jnp.zeros_like(u))),
    "without the last": norms_of(lambda u, s: u.ravel()[:-1]),
    "inverse": norms_of(lambda u, s: 1 / (1 + jnp.abs(u))),
    "exponential": norms_of(lambda u, s: jnp.exp(-jnp.abs(u))),
    "bounded": norms_of(lambda u, s: jnp.tanh(u)),
    "sign": norms_of(lambda u, s: jnp.sign(u)),
    "divided by the state": norms_of(lambda u, s: u / s),
    "times the state": norms_of(lambda u, s: u * (1 / s)),
    "in float16": norms_of(lambda u, s: (u.astype(jnp.float16) * 300).astype(jnp.float32)),
    "in bfloat16 by a large number": norms_of(lambda u, s: u.astype(jnp.bfloat16) * 1e38 * 1e10),
    "as integers": norms_of(lambda u, s: u.astype(jnp.int32).astype(jnp.float32)),
    "counted": looking_at(lambda u, s: sum(jnp.sum(leaf > 0) for leaf in jax.tree.leaves(u)) + 0.0),
    "maximum": looking_at(lambda u, s: sum(jnp.max(leaf) for leaf in jax.tree.leaves(u))),
    "one leaf hidden": looking_at(lambda u, s: norm([u["a"], u["b"][0], jnp.tanh(u["b"][1]), u["c"]])),
    "one leaf twice": looking_at(lambda u, s: norm([u["a"], u["a"], *u["b"]])),
}
MIXED = {"a": (3,), "b": [(), (2, 3)], "c": (1,)}


@pytest.mark.parametrize("name", MISLEADING)
def test_an_optimizer_that_does_not_tell_is_not_believed(name):
    """Gradients that are finite are never skipped and others always, whatever the optimizer computes."""
    tx = jmp.skip_nonfinite(MISLEADING[name])
    params = make_tree(MIXED)
    state = tx.init(params)
    check = jax.jit(lambda grads: tx.update(grads, state, params)[1])
    assert_exact(check, make_tree(MIXED, 0.25), [0.0, 1.0, -1e-30, 1e10, -1e30, 3e38])


def assert_exact(check, grads, values):
    """`check(grads)` finds each bad element, and no fault with `values` in all places or in one."""
    leaves = len(jax.tree.leaves(grads))
    for value in values:
        full = jax.tree.map(lambda leaf, value=value: jnp.full_like(leaf, value), grads)
        for good in (full, *(spoil(grads, place, value) for place in range(leaves))):
            state = check(good)
            assert state.leaf_finite.tolist() == [True] * leaves
            assert int(state.skipped_steps) == 0
    for place in range(leaves):
        for value in BAD:
            state = check(spoil(grads, place, value, where=1.0))
            assert state.leaf_finite.tolist() == [i != place for i in range(leaves)]
            assert int(state.skipped_steps) == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("shapes", [MIXED, (3,), ()], ids=["many", "one", "one scalar"])
def test_gradients_in_half_precision_are_not_judged_by_a_norm_that_overflows(dtype, shapes):
    grads = make_tree(shapes, 0.25, dtype)
    tx = jmp.skip_nonfinite(optax.chain(CLIP, optax.sgd(0.1)))
    state = tx.init(grads)
    check = jax.jit(lambda g: tx.update(g, state, grads)[1])
    assert_exact(check, grads, [0.0, 300.0, -65504.0, float(jnp.finfo(dtype).max)])


def test_integers_beside_gradients_are_left_alone_and_count_as_finite():
    grads = {"a": jnp.arange(3), "b": jnp.ones(2), "c": jnp.arange(2), "d": jnp.ones(())}
    tx = jmp.skip_nonfinite(optax.masked(CLIP, FLOATS))
    state = tx.init(grads)
    check = jax.jit(lambda g: tx.update(g, state, grads)[1])
    assert check(grads).leaf_finite.tolist() == [True] * 4
    for place in (1, 3):
        for value in BAD:
            assert check(spoil(grads, place, value)).leaf_finite.tolist() == [i != place for i in range(4)]


@pytest.mark.parametrize("inner", [CLIP, optax.sgd(0.1), optax.masked(CLIP, FLOATS)])
def test_complex_gradients_beside_others_are_checked(inner):
    grads = {"a": jnp.ones(2), "b": jnp.full(3, 1 + 1j), "c": jnp.ones(())}
    tx = jmp.skip_nonfinite(inner)
    state = tx.init(grads)
    check = jax.jit(lambda g: tx.update(g, state, grads)[1])
    assert_exact(check, grads, [0.0, 1e30])
    assert check(spoil(grads, 1, complex(0, np.inf))).leaf_finite.tolist() == [True, False, True]
    assert check(spoil(grads, 1, complex(np.nan, 0))).leaf_finite.tolist() == [True, False, True]


def test_parameters_that_are_not_finite_are_no_fault_of_the_gradients():
    tx = jmp.skip_nonfinite(optax.chain(optax.add_decayed_weights(0.1), CLIP))
    params = make_tree(MIXED, np.nan)
    _, state = jax.jit(tx.update)(make_tree(MIXED), tx.init(params), params)
    assert state.leaf_finite.tolist() == [True] * 4
    assert int(state.skipped_steps) == 0


@pytest.mark.parametrize(
    "inner",
    [norms_of(lambda u, s: u / s), looking_at(lambda u, s: norm(u) / norm(s))],
    ids=["norm of quotients", "quotient of norms"],
)
def test_a_state_that_is_divided_by_is_no_fault_of_the_gradients(inner):
    """0 / 0 is NaN, of gradients that are finite."""
    tx = jmp.skip_nonfinite(inner)
    grads = make_tree(MIXED, 0.0)
    state = tx.init(grads)
    assert np.isnan(jax.jit(tx.update)(grads, state, grads)[0]["a"]).all()
    check = jax.jit(lambda g: tx.update(g, state, grads)[1])
    assert_exact(check, make_tree(MIXED, 0.25), [0.0, 1.0, -1e-30, 1e18])


# Devices


def device_mesh():
    assert jax.device_count() >= 4
    return Mesh(np.asarray(jax.devices()[:4]), ("data",))


def test_an_inf_in_one_shard_is_in_the_sum_of_all():
    mesh = device_mesh()
    tx = jmp.with_loss_scale(INNERS["clip"])
    specs = {"a": P("data"), "b": P(None, "data"), "c": P()}
    place_all = lambda tree: {
        name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in tree.items()
    }
    params = place_all({name: jnp.ones((8, 4)) for name in specs})
    state = jax.jit(tx.init)(params)
    for bad in specs:
        grads = place_all({**params, bad: params[bad].at[5, 2].set(np.inf)})
        updates, after = jax.jit(tx.update)(grads, state, params)
        assert after.leaf_finite.tolist() == [name != bad for name in specs]
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    updates, after = jax.jit(tx.update)(params, state, params)
    assert after.leaf_finite.tolist() == [True] * 3
    assert all(np.all(leaf) for leaf in jax.tree.leaves(updates))


def test_the_devices_of_a_shard_map_agree_though_each_has_sums_of_its_own():
    tx = jmp.skip_nonfinite(optax.chain(CLIP, optax.sgd(1.0)), axis_name="data")

    def update(grads):
        updates, state = tx.update(grads, tx.init(grads))
        return updates, state.leaf_finite, state.skipped_steps

    update = jax.jit(
        jax.shard_map(update, mesh=device_mesh(), in_specs=P("data"), out_specs=(P("data"), P(), P()))
    )
    grads = {"a": jnp.ones(8), "b": jnp.ones((4, 3))}
    updates, flags, skipped = update(grads)
    # Each device clips two ones and three: a norm of the square root of five.
    np.testing.assert_allclose(updates["a"], -np.full(8, 5**-0.5, np.float32), rtol=4 * EPS)
    assert (flags.tolist(), int(skipped)) == ([True, True], 0)
    updates, flags, skipped = update({**grads, "b": grads["b"].at[2, 0].set(np.nan)})  # On device 2 alone.
    assert (flags.tolist(), int(skipped)) == ([True, False], 1)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


# find_known_sums itself


def known(function, *operands, scales=()):
    """What is found in `function` of gradients and scales, all of whose results are updates; its jaxpr."""
    jaxpr = jax.make_jaxpr(function)(*operands, *scales).jaxpr
    gradients, others = jaxpr.invars[: len(operands)], jaxpr.invars[len(operands) :]
    return find_known_sums(jaxpr, gradients, jaxpr.outvars, others), jaxpr


A, B = jnp.ones((2, 3)), jnp.ones(3)


def squares(x):
    return jnp.sum(lax.square(x))


TELLING = {
    "sum of squares": lambda a, b: squares(a) + squares(b),
    "sum of products": lambda a, b: jnp.sum(a * a) + jnp.sum(b * b),
    "sum of powers": lambda a, b: jnp.sum(lax.integer_pow(a, 2)) + jnp.sum(lax.integer_pow(b, 2)),
    "as optax does it": lambda a, b: optax.tree.norm((a, b)),
    "in another shape": lambda a, b: squares(a.reshape(6)) + squares(jnp.broadcast_to(b, (4, 3))),
    "from a scalar on": lambda a, b: jnp.float32(0.0) + squares(a) + squares(b),
    "of each part": lambda a, b: squares(b) + jnp.sum(jnp.sum(lax.square(a), 0)),
}


@pytest.mark.parametrize("name", TELLING)
def test_sums_are_found_and_no_more_is_computed_for_them_than_they_need(name):
    found, jaxpr = known(lambda a, b: (jnp.sin(a), TELLING[name](a, b), jnp.cos(b)), A, B)
    assert found is not None
    assert list(found.needed) == sorted(set(found.needed))
    needed = [jaxpr.eqns[place] for place in found.needed]
    assert not {"sin", "cos"} & {equation.primitive.name for equation in needed}
    # They can be run alone, and each sum is the one of its leaf.
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(eqns=needed, outvars=[*found.leaves, found.total]), ()))
    for a, b in [(1, 1), (np.inf, 1), (1, -np.inf), (np.nan, np.nan)]:
        finite = [bool(np.isfinite(value).all()) for value in run(A * a, B * b)]
        assert finite == [np.isfinite(a), np.isfinite(b), np.isfinite(a * b)]


HIDING = {
    "nothing": lambda a, b: (a, b),
    "one leaf": lambda a, b: squares(a),
    "no total": lambda a, b: (squares(a), squares(b)),
    "no sum of each": lambda a, b: squares(a + b),
    "sums": lambda a, b: jnp.sum(a) + jnp.sum(b),
    "cubes": lambda a, b: jnp.sum(lax.integer_pow(a, 3)) + jnp.sum(lax.integer_pow(b, 3)),
    "squares of squares": lambda a, b: squares(lax.square(a)) + squares(lax.square(b)),
    "multiples": lambda a, b: squares(a * 2.0) + squares(b * 2.0),
    "maximum": lambda a, b: squares(lax.max(a, 0.0)) + squares(lax.max(b, 0.0)),
    "minimum": lambda a, b: squares(lax.min(a, 1.0)) + squares(lax.min(b, 1.0)),
    "select": lambda a, b: squares(lax.select(a > 0, a, a * 2.0)) + squares(b),
    "slice": lambda a, b: squares(lax.slice(a, (0, 0), (1, 3))) + squares(b),
    "gather": lambda a, b: squares(a[jnp.arange(1)]) + squares(b),
    "inverse": lambda a, b: squares(1.0 / a) + squares(1.0 / b),
    "negative power": lambda a, b: jnp.sum(lax.integer_pow(a, -2)) + squares(b),
    "power of zero": lambda a, b: jnp.sum(lax.integer_pow(a, 0) * a) + squares(b),
    "exponential": lambda a, b: squares(lax.exp(a)) + squares(lax.exp(b)),
    "sign": lambda a, b: squares(lax.sign(a)) + squares(lax.sign(b)),
    "clamp": lambda a, b: squares(lax.clamp(-1.0, a, 1.0)) + squares(b),
    "tanh": lambda a, b: squares(lax.tanh(a)) + squares(lax.tanh(b)),
    "largest": lambda a, b: jnp.max(a * a) + jnp.max(b * b),
    "each by the other": lambda a, b: squares(a / b) + squares(b / a),
    "integers": lambda a, b: squares(a.astype(jnp.int32).astype(jnp.float32)) + squares(b),
    "half precision": lambda a, b: squares(a.astype(jnp.float16).astype(jnp.float32)) + squares(b),
    "brain precision": lambda a, b: squares(a.astype(jnp.bfloat16).astype(jnp.float32)) + squares(b),
    "a branch": lambda a, b: lax.cond(squares(a) > 0, squares, lambda b: 0.0, b) + 0.0 * squares(a),
}


@pytest.mark.parametrize("name", HIDING)
def test_nothing_is_found_where_a_sum_may_hide_or_make_an_inf(name):
    assert known(HIDING[name], A, B)[0] is None


def test_what_a_loss_scale_divides_is_found_and_what_another_variable_does_is_not():
    total = lambda a, b, s: squares(a / s) + squares(b / s)
    s = jnp.float32(2)
    assert known(total, A, B, scales=(s,))[0] is not None
    jaxpr = jax.make_jaxpr(total)(A, B, s).jaxpr
    assert find_known_sums(jaxpr, jaxpr.invars[:2], jaxpr.outvars, ()) is None
    constant = lambda a, b: squares(a / 2.0**-14) + squares(b / 2.0**-14)
    jaxpr = jax.make_jaxpr(constant)(A, B).jaxpr
    assert find_known_sums(jaxpr, jaxpr.invars, jaxpr.outvars, (2.0**-14,)) is not None
    assert find_known_sums(jaxpr, jaxpr.invars, jaxpr.outvars, (2.0**-13,)) is None


def test_a_sum_that_no_update_is_made_of_is_not_believed():
    """A norm that is only logged may overflow."""
    jaxpr = jax.make_jaxpr(lambda a, b: (a, b, squares(a) + squares(b)))(A, B).jaxpr
    assert find_known_sums(jaxpr, jaxpr.invars, jaxpr.outvars[:2]) is None
    assert find_known_sums(jaxpr, jaxpr.invars, jaxpr.outvars) is not None


def test_a_norm_that_is_only_logged_skips_no_finite_step():
    log = optax.GradientTransformation(lambda p: jnp.float32(0), lambda g, s, p=None: (g, optax.tree.norm(g)))
    grads = {"a": jnp.full(3, 1e20), "b": jnp.ones(2)}
    assert one_step(optax.chain(log, optax.adam(1e-3)), grads) == (True, True, [True, True])


def test_a_scale_below_one_is_the_same_whether_it_is_a_constant_or_not():
    """1e36 divided by 2**-14 is inf: the true gradient, which the clip looks at."""
    tx = jmp.skip_nonfinite(optax.chain(jmp.unscale(), CLIP, optax.sgd(0.1)))
    grads, scale = {"a": jnp.full(3, 1e36), "b": jnp.ones(2)}, jmp.StaticLossScale(2.0**-14)
    step = lambda g, s, scale: tx.update(g, s, loss_scale=scale)
    state = tx.init(grads)
    within = jax.jit(lambda g, s: step(g, s, scale))(grads, state)
    for updates, after in (step(grads, state, scale), jax.jit(step)(grads, state, scale), within):
        assert not jmp.grads_finite(after)
        assert not any(jnp.any(update != 0) for update in updates.values())


# What would fool a careless search


def one_step(inner, grads):
    """Whether the step was taken, whether it counts as taken, and which leaves were finite."""
    tx = jmp.skip_nonfinite(inner)
    _, state = tx.update(grads, tx.init(grads), grads)
    return int(state.skipped_steps) == 0, bool(jmp.grads_finite(state)), state.leaf_finite.tolist()


ZERO = jnp.float32(0)


def stateless(factor):
    """An optimizer that multiplies each gradient by a number made of all gradients."""
    return optax.stateless(lambda g, p: jax.tree.map(lambda x: x * factor(g), g))


def test_an_equation_without_results_is_no_sum():
    inner = optax.stateless(lambda g, p: (jax.debug.callback(lambda: None), g)[1])
    assert one_step(inner, {"a": jnp.ones(3)}) == (True, True, [True])


def test_without_floating_gradients_no_number_is_a_sum_of_them():
    inner = optax.GradientTransformation(
        lambda p: jnp.zeros(1), lambda g, s, p=None: (g, jnp.full(1, jnp.inf))
    )
    assert one_step(inner, {"a": jnp.ones(2, jnp.int32)}) == (True, True, [True])
    assert one_step(inner, {}) == (True, True, [])
    assert one_step(optax.chain(CLIP, optax.adamw(1e-3)), {}) == (True, True, [])


def test_a_norm_that_overflows_though_no_leaf_does_counts_as_skipped_everywhere():
    grads = {"a": jnp.full(1, 1.5e19), "b": jnp.full(1, 1.5e19)}
    assert one_step(CLIP, grads) == (False, False, [True, True])
    tx = jmp.skip_nonfinite(CLIP)
    _, state = tx.update(grads, tx.init(grads))
    with pytest.raises(FloatingPointError, match="the squares of the gradients add up to inf"):
        jmp.raise_if_stuck(state, 1)
    agreeing = jmp.skip_nonfinite(CLIP, axis_name="i")
    step = lambda g: agreeing.update(g, agreeing.init(g))[1].skipped_steps
    assert jax.vmap(step, axis_name="i")(jax.tree.map(lambda x: x[None], grads)).tolist() == [1]


def test_the_sums_of_the_leaves_are_those_of_which_the_total_is_made():
    def factor(grads):
        squares = [jnp.sum(x**2) for x in grads.values()]
        return sum(jnp.sum(x / 1e3) for x in grads.values()) + 0 * jnp.minimum(squares[0], squares[1])

    taken, counted, flags = one_step(stateless(factor), {"a": jnp.full(2, 1e25), "b": jnp.ones(2)})
    assert (taken, counted, flags) == (True, True, [True, True])


def test_what_has_no_elements_shows_nothing():
    grads = {"a": jnp.float32(np.nan), "b": jnp.ones(2)}
    factor = lambda g: jnp.broadcast_to(g["a"], (0,)).sum() + g["b"].sum()
    assert one_step(stateless(factor), grads) == (False, False, [False, True])


@pytest.mark.parametrize(
    "factor",
    [
        lambda g: jnp.sum(g["a"] / ZERO),
        lambda g: jnp.sum(g["a"] / 0.0),
        lambda g: jnp.sum(g["a"] + np.float32(np.inf)),
        lambda g: jnp.sum(g["a"] * 1e38),
    ],
    ids=["an array", "zero", "inf", "a large number"],
)
def test_an_inf_that_the_optimizer_makes_of_finite_gradients_is_none_of_theirs(factor):
    assert one_step(stateless(factor), {"a": jnp.full(1, 1e3)}) == (True, True, [True])
