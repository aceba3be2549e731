"""`clip_norm`: one pass over the gradients clips them, checks them and reports their norm."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from tests.support.jaxprs import equations
from tests.support.steps import bits

BAD = [np.nan, np.inf, -np.inf]
EPS = float(np.finfo(np.float32).eps)
SHAPES = {"dense": {"bias": (4,), "kernel": (3, 4)}, "gain": (), "shift": (1,), "table": (2, 1, 5)}
LEAVES = 5


def make_tree(value=0.5, dtype=jnp.float32):
    is_shape = lambda node: isinstance(node, tuple)
    return jax.tree.map(lambda shape: jnp.full(shape, value, dtype), SHAPES, is_leaf=is_shape)


def spoil(tree, index, value, where=0.0):
    """`tree` with `value` in its leaf number `index`, at the fraction `where` of its elements."""
    leaves, structure = jax.tree.flatten(tree)
    bad = np.array(leaves[index])
    bad.flat[min(int(where * bad.size), bad.size - 1)] = value
    return structure.unflatten([*leaves[:index], jnp.asarray(bad), *leaves[index + 1 :]])


def random_tree(seed, scale=1.0):
    numbers = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(scale * numbers.normal(size=leaf.shape), jnp.float32)
    return jax.tree.map(draw, make_tree())


INNERS = {"adamw": optax.adamw(1e-2), "momentum": optax.sgd(0.1, momentum=0.9), "plain": optax.sgd(1.0)}


@functools.cache
def stepped(name, clip_norm=1.0):
    tx = jmp.with_loss_scale(INNERS[name], clip_norm=clip_norm)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init(make_tree())


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", INNERS)
@hypothesis.given(seed=st.integers(0, 1000), exponent=st.integers(-6, 8))
@hypothesis.settings(max_examples=15)
def test_finite_gradients_are_clipped_as_by_optax(name, seed, exponent):
    params, grads = random_tree(seed + 1), random_tree(seed, 10.0**exponent)
    step, state = stepped(name)
    after, state = step(params, state, grads)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), INNERS[name])
    updates, inner_state = clipped.update(grads, clipped.init(params), params)
    ours = (after, state.inner_state)
    theirs = (optax.apply_updates(params, updates), inner_state[1])
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=16 * EPS, atol=16 * EPS)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(jmp.get_metrics(state)["grad_norm"], norm, rtol=16 * EPS)


@hypothesis.given(index=st.integers(0, LEAVES - 1), value=st.sampled_from(BAD), where=st.floats(0, 1))
@hypothesis.settings(max_examples=15)
def test_one_bad_element_skips_the_step_and_names_its_leaf(index, value, where):
    step, state = stepped("adamw")
    params = make_tree(0.25)
    after, state_after = step(params, state, spoil(make_tree(), index, value, where))
    assert state_after.leaf_finite.tolist() == [i != index for i in range(LEAVES)]
    assert not jmp.grads_finite(state_after)
    assert bits((after, state_after.inner_state)) == bits((params, state.inner_state))
    assert not np.isfinite(jmp.get_metrics(state_after)["grad_norm"])
    assert float(jmp.get_loss_scale(state_after).loss_scale) == 2.0**14


@pytest.mark.slow
def test_gradients_with_squares_beyond_float32_are_skipped_only_with_a_clip():
    params = make_tree()
    for size, finite in [(1e18, True), (1e25, False), (3e38, False)]:
        grads = spoil(make_tree(), 1, size)
        step, state = stepped("plain")
        after, state_after = step(params, state, grads)
        assert bool(jmp.grads_finite(state_after)) is finite
        assert state_after.leaf_finite.tolist() == [True, finite, True, True, True]
        assert (bits(after) == bits(params)) is not finite
        step, state = stepped("plain", None)
        assert jmp.grads_finite(step(params, state, grads)[1])


def test_a_norm_that_overflows_though_no_leaf_does_is_reported():
    step, state = stepped("plain")
    grads = spoil(spoil(make_tree(), 0, 1.4e19), 1, 1.4e19)
    _, state = step(make_tree(), state, grads)
    assert state.leaf_finite.all()
    assert not jmp.grads_finite(state)
    with pytest.raises(FloatingPointError, match="the norm of the gradients is inf"):
        jmp.raise_if_stuck(state, 1)


@pytest.mark.slow
def test_gradients_in_half_are_squared_in_float32():
    tx = jmp.skip_nonfinite(optax.sgd(1.0), clip_norm=1.0)
    grads = make_tree(float(jnp.finfo(jnp.float16).max) / 2, jnp.float16)
    updates, state = tx.update(grads, tx.init(grads), grads)
    assert jmp.grads_finite(state)
    for update in jax.tree.leaves(updates):
        assert update.dtype == jnp.float32
        np.testing.assert_allclose(update, -1 / 28**0.5, rtol=16 * EPS)


def test_complex_and_integer_leaves():
    grads = {"a": jnp.full(2, 3 + 4j), "b": jnp.arange(3), "c": jnp.zeros(2)}
    tx = jmp.skip_nonfinite(optax.identity(), clip_norm=1.0)
    updates, state = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(state.grad_norm, 50**0.5, rtol=EPS)
    np.testing.assert_allclose(updates["a"], grads["a"] / 50**0.5, rtol=4 * EPS)
    assert updates["b"].tolist() == [0, 1, 2]
    for value in (complex(0, np.inf), complex(np.nan, 0)):
        _, state = tx.update({**grads, "a": jnp.full(2, value)}, tx.init(grads), grads)
        assert state.leaf_finite.tolist() == [False, True, True]


@pytest.mark.cases(fast=2, slow=0)
@pytest.mark.parametrize(
    ("wrap", "made_by"),
    [
        (lambda steps: steps, jmp.with_loss_scale),
        (lambda steps: optax.chain(optax.identity(), steps.gradient_transformation()), jmp.with_loss_scale),
        (lambda steps: optax.masked(steps.gradient_transformation(), True), jmp.skip_nonfinite),
        (lambda steps: jmp.with_stochastic_rounding(jmp.with_half_state(steps)), jmp.with_loss_scale),
    ],
    ids=["alone", "in a chain", "masked", "in our wrappers"],
)
def test_a_clip_around_an_accumulation_is_an_error_with_the_line_that_clips_what_is_accumulated(
    wrap, made_by
):
    params = jnp.zeros(4)
    with pytest.raises(
        ValueError, match=r"around optax\.MultiSteps .*each micro-batch\. (?P<line>.*)"
    ) as error:
        made_by(wrap(optax.MultiSteps(optax.sgd(1.0), 2)), clip_norm=0.5).init(params)
    (line,) = re.findall(r"optax\.MultiSteps\(.*every_k_schedule=4\)", str(error.value))
    steps = eval(line.replace("=4", "=2").replace("adamw(3e-4)", "sgd(1.0)"))
    tx = made_by(wrap(steps))
    state, update = tx.init(params), jax.jit(tx.update)
    for size in (2.0, -1.75):
        updates, state = update(jnp.full(4, size), state, params)
        params = optax.apply_updates(params, updates)
    # The mean of the two is 0.125 in each of four elements, of norm 0.25, below the limit.
    np.testing.assert_allclose(params, -0.125, rtol=4 * EPS)


def test_the_gradients_are_read_once_for_the_norm_and_the_check():
    grads = make_tree()
    tx = jmp.with_loss_scale(optax.sgd(0.1), clip_norm=1.0)
    jaxpr = jax.make_jaxpr(tx.update)(grads, tx.init(grads), grads)
    checked = [e.invars[0].aval.shape for e in equations(jaxpr) if e.primitive.name == "is_finite"]
    assert sorted(checked) == [(), (LEAVES,)]
    reduced = [e.invars[0].aval.shape for e in equations(jaxpr) if e.primitive.name == "reduce_sum"]
    assert reduced == [*(leaf.shape for leaf in jax.tree.leaves(grads)), (LEAVES,)]


@pytest.mark.parametrize(
    ("clip_norm", "error"),
    [(0, ValueError), (-1.0, ValueError), (np.nan, ValueError), ("1", TypeError), (True, TypeError)],
)
def test_a_norm_is_a_number_above_0(clip_norm, error):
    for wrap in (jmp.with_loss_scale, jmp.skip_nonfinite):
        with pytest.raises(error, match="clip_norm should be a"):
            wrap(optax.sgd(1.0), clip_norm=clip_norm)


# Devices


def test_the_devices_of_a_shard_map_agree_though_each_has_a_norm_of_its_own():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    tx = jmp.skip_nonfinite(optax.sgd(0.1), clip_norm=1.0, axis_name="data")
    grads = jnp.ones((4, 2)).at[2, 1].set(np.nan)

    def update(grads):
        updates, state = tx.update(grads, tx.init(grads), grads)
        return updates, state.counts[None]

    sharded = jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    updates, counts = jax.jit(sharded)(grads)
    assert not np.any(updates)
    assert counts.tolist() == [[1, 1, 1]] * 4


@pytest.mark.parametrize("number", [np.nan, np.inf, 1.5e19])
def test_a_skipped_step_raises_neither_under_debug_nans_nor_under_debug_infs(number):
    """All its results are finite: the state holds the largest number in place of a norm that is not."""
    tx = jmp.with_loss_scale(optax.sgd(1.0), clip_norm=1.0)
    params = {"w": jnp.ones(1), "b": jnp.ones(1)}
    grads = jax.tree.map(lambda p: number * p, params)  # Of 1.5e19 the norm alone overflows.
    state, step = tx.init(params), jax.jit(tx.update)
    with jax.debug_nans(True), jax.debug_infs(True):
        updates, state = jax.block_until_ready(step(grads, state, params))
    assert (updates["w"] == 0).all()
    assert jmp.get_metrics(state)["grad_norm"] == jnp.inf
    with jax.debug_nans(True):
        assert jax.jit(jmp.get_metrics)(state)["skipped_steps"] == 1
    cause = "the norm of the gradients is inf" if number == 1.5e19 else "inf or NaN in the gradients"
    with pytest.raises(FloatingPointError, match=cause):
        jmp.raise_if_stuck(state, 1)
