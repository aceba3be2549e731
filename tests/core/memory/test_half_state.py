"""Optimizer state in bfloat16, and half parameters that are rounded stochastically."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from tests.support.steps import bits, make_grads, make_params, make_step, spoil

BF16 = jnp.dtype("bfloat16")


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype.name, tree)


# with_half_state


def test_moments_rest_in_bfloat16_and_scalars_do_not():
    tx = jmp.with_half_state(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), "bf16")
    state = tx.init(make_params()).inner_state
    assert {leaf.dtype for leaf in jax.tree.leaves(state.hyperparams)} == {jnp.dtype("float32")}
    adam = state.inner_state[0]
    for moments in (adam.mu, adam.nu):
        assert dtypes(moments) == {
            "dense": {"kernel": "bfloat16", "bias": "bfloat16"},
            "gain": "float32",  # Of shape ().
        }


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        ("nu", {"nu/dense/bias", "nu/dense/kernel"}),
        (["bias"], {"mu/dense/bias", "nu/dense/bias"}),
        (("mu/**/bias", "nu/dense/kernel"), {"mu/dense/bias", "nu/dense/kernel"}),
        ((), set()),
    ],
)
def test_patterns_choose_what_stays_float32(patterns, kept):
    tx = jmp.with_half_state(optax.scale_by_adam(), keep_float32=patterns)
    params = {"dense": make_params()["dense"]}
    before = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(tx.update, params, before, params)
    for adam in (before.inner_state, after.inner_state):
        wide = {
            f"{name}/dense/{leaf}"
            for name in ("mu", "nu")
            for leaf, value in getattr(adam, name)["dense"].items()
            if value.dtype == jnp.float32
        }
        assert wide == kept


@pytest.mark.slow
def test_an_update_is_that_of_the_widened_state_which_is_then_rounded():
    params, tx = make_params(), jmp.with_half_state(optax.adam(1e-2), stochastic_rounding=False)
    plain, state = optax.adam(1e-2), tx.init(params)
    for t in range(2):
        wide = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == BF16 else leaf, state.inner_state
        )
        expected, expected_state = plain.update(make_grads(t), wide, params)
        updates, state = tx.update(make_grads(t), state, params)
        assert bits(updates) == bits(expected)
        assert bits(state.inner_state) == bits(
            jax.tree.map(lambda new, now: new.astype(now.dtype), expected_state, state.inner_state)
        )


def second_moments(steps=1500, **settings):
    """Adam's second moment of 512 parameters after a gradient of 1 and many of 0, and float32's."""
    tx = jmp.with_half_state(optax.scale_by_adam(), **settings)
    params = jnp.ones(512)

    @jax.jit
    def run(state):
        _, state = tx.update(jnp.ones(512), state, params)
        zeros = jnp.zeros(512)
        state = jax.lax.fori_loop(0, steps, lambda _, state: tx.update(zeros, state, params)[1], state)
        return state.inner_state.nu.astype(jnp.float32)

    return np.asarray(run(tx.init(params))), 1e-3 * 0.999**steps


def test_the_second_moment_decays_unless_rounding_to_nearest_is_asked_for():
    stuck, _ = second_moments(stochastic_rounding=False)
    np.testing.assert_allclose(stuck, 1e-3, rtol=2**-8)
    decayed, exact = second_moments()
    # A walk of 1,500 steps, each with a variance of at most 0.001 * 2**-8 of the number squared.
    deviation = np.sqrt(1500 * 0.001 * 2.0**-8 * 2 / 512)
    assert abs(decayed.mean() / exact - 1) < 5 * deviation
    assert decayed.std() > 0


@pytest.mark.slow
def test_moments_that_take_the_dtype_of_half_parameters_decay_too():
    """Adafactor rounds its moments to the dtype of the parameters, to nearest, also that of a scalar."""
    tx = jmp.with_half_state(
        optax.scale_by_factored_rms(decay_rate=0.999, decay_rate_fn=lambda _, rate: rate)
    )
    ones = {"vector": jnp.ones(512, jnp.bfloat16), "scalar": jnp.ones((), jnp.bfloat16)}
    zeros = jax.tree.map(jnp.zeros_like, ones)
    _, state = tx.update(ones, tx.init(ones), ones)
    decay = lambda state, _: (tx.update(zeros, state, ones)[1], None)
    state, _ = jax.jit(lambda state: jax.lax.scan(decay, state, length=1000))(state)
    moments = state.inner_state.v
    assert (moments["vector"].dtype, moments["scalar"].dtype) == (jnp.bfloat16, jnp.float32)
    for moment, rtol in ((moments["vector"], 0.02), (moments["scalar"], 1e-3)):
        np.testing.assert_allclose(moment.astype(jnp.float32).mean(), 1e-3 * 0.999**1000, rtol=rtol)


# Both together


def all_half(key=0):
    inner = jmp.with_half_state(optax.adamw(1e-3), key=key)
    return jmp.with_loss_scale(jmp.with_stochastic_rounding(inner, key=key))


@pytest.fixture(scope="module")
def all_half_run():
    """A run of bfloat16 alone: two steps, and a skipped one."""
    params = {"w": jnp.full((16, 8), 0.7, jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}
    tx = all_half()
    step, states = make_step(tx), [(params, tx.init(params))]
    bad = {"w": params["w"], "b": params["b"].at[0].set(jnp.nan)}
    for grads in (params, params, bad):
        states.append(step(*states[-1], grads))
    return step, states


def test_all_floating_arrays_are_bfloat16(all_half_run):
    for state in all_half_run[1]:
        arrays = [
            leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim
        ]
        assert len(arrays) == 6
        assert {leaf.dtype for leaf in arrays} == {BF16}
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    assert all_half_run[0]._cache_size() == 1


def test_a_skipped_step_leaves_parameters_moments_and_keys(all_half_run):
    _, (_, _, before, after) = all_half_run
    assert bits(after[0]) == bits(before[0])
    assert bits(after[1].inner_state) == bits(before[1].inner_state)
    assert int(jmp.get_metrics(after[1])["skipped_steps"]) == 1


def test_a_run_goes_on_as_if_the_skipped_step_had_not_been(all_half_run):
    step, (start, _, before, after) = all_half_run
    grads = start[0]
    with_skip, without = step(*after, grads), step(*before, grads)
    assert bits(with_skip[0]) == bits(without[0])
    assert bits(with_skip[1].inner_state) == bits(without[1].inner_state)


def test_keys_advance_and_two_functions_and_two_keys_have_bits_of_their_own(all_half_run):
    _, ((_, first), (_, second), *_) = all_half_run
    outer, inner = first.inner_state, first.inner_state.inner_state
    assert outer.key.word != inner.key.word
    assert second.inner_state.key.step == outer.key.step + 1
    assert second.inner_state.inner_state.key.step == inner.key.step + 1
    other = all_half(jax.random.key(1)).init(jnp.ones(2, jnp.bfloat16)).inner_state
    assert other.key.word != outer.key.word
    again = all_half(0).init(jnp.ones(2, jnp.bfloat16)).inner_state
    assert (again.key.word, again.key.step) == (outer.key.word, outer.key.step)


# with_stochastic_rounding


@pytest.mark.cases(fast=1, slow=0)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_parameters_learn_from_updates_below_half_a_unit(dtype):
    """400 updates of 2**-14 on 1,000 parameters of 1; to nearest they would stay 1."""
    tx = jmp.with_stochastic_rounding(optax.sgd(2.0**-14))
    params = jnp.ones(1000, dtype)

    @jax.jit
    def run(params, state):
        def step(_, carry):
            params, state = carry
            updates, state = tx.update(jnp.ones(1000), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, 400, step, (params, state))[0]

    final = np.asarray(run(params, tx.init(params))).astype(np.float32)
    gap = float(jnp.finfo(dtype).eps) / 2  # Below 1.
    deviation = np.sqrt(400 * 2.0**-14 * gap / 1000)
    assert abs(final.mean() - (1 - 400 * 2.0**-14)) < 5 * deviation
    assert set(np.unique((1 - final) / gap) % 1) == {0}


def test_float32_parameters_are_not_rounded_and_a_zero_update_changes_no_bit():
    params = {"half": jnp.asarray([-0.0, 0.3, 7], jnp.float16), "full": jnp.asarray([0.1, 2])}
    tx = jmp.with_stochastic_rounding(optax.sgd(1.0))
    grads = {"half": jnp.zeros(3), "full": jnp.asarray([0.25, 1])}
    new, _ = make_step(tx)(params, tx.init(params), grads)
    assert bits(new["half"]) == bits(params["half"])
    np.testing.assert_array_equal(new["full"], params["full"] - grads["full"])


def test_the_state_is_that_of_float32_parameters():
    params = {"w": jnp.ones(2, jnp.float16)}
    state = jmp.with_stochastic_rounding(optax.adam(1.0)).init(params)
    assert state.inner_state[0].mu["w"].dtype == jnp.float32


# Misuse


def test_float16_says_why_it_is_no_choice():
    with pytest.raises(
        ValueError, match=r"bfloat16 or float32\. Got float16\. Adam divides by the root of a mean"
    ):
        jmp.with_half_state(optax.adam(1e-3), "float16")
    with pytest.raises(ValueError, match=r"bfloat16 or float32\. Got float64"):
        jmp.with_half_state(optax.adam(1e-3), "float64")


def test_misuse_is_named():
    params = make_params()
    with pytest.raises(ValueError, match=r"'nus' of keep_float32 matches no array .*Nearest: .*nu"):
        jmp.with_half_state(optax.adam(1e-3), keep_float32="nus").init(params)
    for patterns in ([3], True, 3, None):
        with pytest.raises(TypeError, match=r"keep_float32 takes patterns such as .* Got"):
            jmp.with_half_state(optax.adam(1e-3), keep_float32=patterns)
    with pytest.raises(ValueError, match="Put with_half_state inside"):
        jmp.with_half_state(jmp.with_master_params(optax.adam(1e-3))).init(params)
    with pytest.raises(TypeError, match=r"key is one PRNG key, .* Got 'seed'"):
        jmp.with_half_state(optax.adam(1e-3), key="seed").init(params)
    for made_by in (jmp.with_half_state, jmp.with_stochastic_rounding):
        with pytest.raises(TypeError, match="wraps an optax transform such as"):
            made_by(3)
        tx = made_by(optax.adam(1e-3))
        with pytest.raises(TypeError, match=r"Got tuple\."):
            tx.update(params, optax.adam(1e-3).init(params), params)
    with pytest.raises(ValueError, match="depends on the parameters"):
        jmp.with_stochastic_rounding(optax.sgd(1.0)).update(params, tx.init(params))


def test_spoiled_gradients_and_tree_map_params():
    """The names of the placeholder of optax match no pattern, which is no error there."""
    tx = jmp.with_loss_scale(jmp.with_half_state(optax.adam(1e-3), keep_float32="nu/**/bias"))
    params = make_params()
    state = tx.init(params)
    mapped = optax.tree_map_params(tx, lambda leaf: leaf.dtype, state, transform_non_params=lambda _: None)
    assert mapped.inner_state.inner_state[0].nu["dense"]["bias"] == jnp.float32
    assert mapped.inner_state.inner_state[0].mu["dense"]["bias"] == BF16
    _, after = make_step(tx)(params, state, spoil(make_grads(0)))
    assert bits(after.inner_state) == bits(state.inner_state)
