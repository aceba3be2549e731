"""`raise_if_stuck` on runs that skip no step and do not learn, and the counts and limits that it reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from jmp_lite._scaling import stuck

PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.zeros(3)}
X = jnp.linspace(-1, 1, 20).reshape(5, 4)
LINE = "loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, ...)"


@jmp.autocast(dtype="float16")
def tiny_loss(params):
    """A loss whose gradients underflow in float16 without a scale."""
    return 2.0**-30 * jnp.mean(X @ params["w"]) + 0.0 * jnp.sum(params["b"])


def plain(opt_state):
    del opt_state
    return jax.value_and_grad(tiny_loss)


def scaled(opt_state):
    return jmp.value_and_grad(tiny_loss, jmp.get_loss_scale(opt_state))


def trained(tx, value_and_grad, steps=5, params=PARAMS):
    @jax.jit
    def step(params, opt_state):
        grads = value_and_grad(opt_state)(params)[1]
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for _ in range(steps):
        params, opt_state = step(params, opt_state)
    return opt_state


INNER = {
    "adam": optax.adam(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "clip and masters": jmp.with_master_params(optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", INNER)
def test_gradients_that_were_all_zero_since_value_and_grad_was_forgotten(name):
    tx = jmp.with_loss_scale(INNER[name])
    state = trained(tx, plain)
    jmp.raise_if_stuck(state, 6)  # Too early.
    with pytest.raises(FloatingPointError, match="gradients of all 5 steps were zero") as error:
        jmp.raise_if_stuck(state, 5)
    assert LINE in str(error.value)
    assert "stop_gradient" in str(error.value)
    jmp.raise_if_stuck(trained(tx, scaled), 5)


def test_each_member_of_a_mapped_state_is_checked():
    tx = jmp.with_loss_scale(optax.adam(1e-3), jmp.DynamicLossScale(2.0**38, period=1))
    states = jax.vmap(tx.init)(jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS))
    counts = jnp.array([[4, 1, 0], [4, 2, 0], [4, 0, 0]])
    moments = jax.tree.map(lambda m: m.at[jnp.array([0, 2])].set(1) if m.ndim > 1 else m, states.inner_state)
    states = dataclasses.replace(states, counts=counts, inner_state=moments)
    jmp.raise_if_stuck(states, 3)  # Member 1 has taken two steps.
    with pytest.raises(FloatingPointError, match=r"Member \[1\] of \[3\]: The gradients of all 2 steps"):
        jmp.raise_if_stuck(states, 2, max_skip_rate=1)
    grow = lambda leaf: leaf.at[2].set(2.0**42) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    grown = jax.tree.map(grow, states.loss_scale)
    with pytest.warns(UserWarning, match=r"Member \[2\] of \[3\]: The loss scale has grown"):
        jmp.raise_if_stuck(dataclasses.replace(states, loss_scale=grown), 3)


def test_the_moments_of_a_mapped_state_are_read_once_for_all_members(monkeypatch):
    read = {"flattened": 0, "fetched": 0}
    flatten, fetch = stuck.without_nnx_variables, jax.device_get

    def counted(name, function, tree):
        read[name] += 1
        return function(tree)

    monkeypatch.setattr(stuck, "without_nnx_variables", functools.partial(counted, "flattened", flatten))
    monkeypatch.setattr(jax, "device_get", functools.partial(counted, "fetched", fetch))
    tx = jmp.with_loss_scale(optax.scale_by_adam())
    states = jax.vmap(tx.init)(jax.tree.map(lambda p: jnp.stack([p] * 4), PARAMS))
    # The gradients of all members but the last one were not zero.
    moments = jax.tree.map(jnp.ones_like, states.inner_state)
    moments = moments._replace(mu=jax.tree.map(lambda moment: moment.at[-1].set(0), moments.mu))
    states = dataclasses.replace(states, counts=jnp.full((4, 3), jnp.array([9, 0, 0])), inner_state=moments)
    jmp.raise_if_stuck(jax.tree.map(lambda leaf: leaf[:-1], states), 9)
    assert read == {"flattened": 1, "fetched": 1}  # The smallest moment is enough.
    with pytest.raises(FloatingPointError, match=r"Member \[3\] of \[4\]: The gradients of all 9 steps"):
        jmp.raise_if_stuck(states, 9)
    assert read == {"flattened": 2, "fetched": 3}
    jmp.raise_if_stuck(states, 10)  # Too early, so nothing is read.
    assert read == {"flattened": 2, "fetched": 3}


def test_gradients_that_wait_in_an_accumulation_are_not_zero():
    tx = jmp.with_loss_scale(optax.MultiSteps(optax.adam(1e-3), 8))
    jmp.raise_if_stuck(trained(tx, scaled), 5)
    jmp.raise_if_stuck(trained(jmp.with_loss_scale(optax.sgd(1e-3)), plain), 5)  # It keeps no gradients.


def test_a_scale_that_grew_without_a_skip_is_named_with_both_causes():
    """In float16 a scaled gradient would have overflowed; in bfloat16 the scale has no use."""
    loss_scale = jmp.DynamicLossScale(2.0**38, period=1)
    tx = jmp.with_loss_scale(optax.sgd(1e-3), loss_scale)
    jmp.raise_if_stuck(trained(tx, plain, steps=1))
    with pytest.warns(UserWarning, match=r"has grown to 2\.19902e\+12 and no step was skipped") as warned:
        jmp.raise_if_stuck(trained(tx, plain, steps=3))
    said = str(warned[0].message)
    assert LINE in said
    assert "with_loss_scale(tx, jmp.NoOpLossScale())" in said
    assert warned[0].filename == __file__
    state = trained(tx, plain, steps=3)
    jmp.raise_if_stuck(dataclasses.replace(state, counts=jnp.array([4, 1, 0])))
    static = jmp.with_loss_scale(optax.sgd(1e-3), jmp.StaticLossScale(2.0**60))
    jmp.raise_if_stuck(trained(static, plain))


@pytest.mark.parametrize("steps", [1, 1001])
def test_a_scale_that_started_large_has_not_grown(steps):
    """As `profile_ranges` suggests one for gradients below 2**-24."""
    tx = jmp.with_loss_scale(optax.sgd(1e-3), jmp.DynamicLossScale(2.0**48))
    state = dataclasses.replace(tx.init(PARAMS), counts=jnp.array([steps, 0, 0]))
    jmp.raise_if_stuck(state)  # A warning would be an error.


def test_counts_end_at_the_largest_integer():
    tx = jmp.with_loss_scale(optax.sgd(1.0), jmp.StaticLossScale(1.0))
    end = 2**31 - 1
    state = dataclasses.replace(tx.init(PARAMS), counts=jnp.array([end, 60, 0]))
    _, state = tx.update(PARAMS, state, PARAMS)
    assert state.counts.tolist() == [end, 60, 0]
    jmp.raise_if_stuck(state)
    bad = jax.tree.map(lambda p: p * np.nan, PARAMS)
    _, state = tx.update(bad, dataclasses.replace(state, counts=jnp.array([end - 1, end, end])), PARAMS)
    assert state.counts.tolist() == [end, end, end]


def test_the_host_may_forbid_implicit_transfers():
    tx = jmp.with_loss_scale(optax.adam(1e-3), clip_norm=1.0)
    state = trained(tx, scaled)
    for saved in (state, jax.device_get(state)):
        with jax.transfer_guard("disallow"):
            numbers = jmp.get_metrics(saved)
            finite = jmp.grads_finite(saved)
            jmp.raise_if_stuck(saved, 1)
        assert all(isinstance(number, jax.Array) for number in numbers.values())
        assert bool(finite)
        assert numbers["skipped_steps"].dtype == jnp.int32


@pytest.mark.parametrize("limits", [{"max_consecutive_skips": "5"}, {"max_skip_rate": "0.1"}])
def test_limits_are_numbers(limits):
    state = jmp.with_loss_scale(optax.sgd(1.0)).init(PARAMS)
    with pytest.raises(TypeError, match=rf"{next(iter(limits))} should be a number\. Got '"):
        jmp.raise_if_stuck(state, **limits)


def test_a_scale_that_the_step_closes_over_is_named():
    """It never falls, so that every step is skipped, while that of the state falls to its minimum."""
    loss_scale = jmp.DynamicLossScale(2.0**30, min_loss_scale=2.0**20)
    tx = jmp.with_loss_scale(optax.sgd(1e-3), loss_scale)
    large = jmp.autocast(lambda params: 1e4 * jnp.mean((X @ params["w"] + params["b"]) ** 2), "float16")
    closed = lambda opt_state: jmp.value_and_grad(large, loss_scale)
    state = trained(tx, closed, steps=12)
    with pytest.raises(
        FloatingPointError, match=r"its minimum\. If the step closes over another scale"
    ) as error:
        jmp.raise_if_stuck(state, 12)
    assert LINE in str(error.value)
    with pytest.raises(FloatingPointError, match="skipped") as error:  # The scale may still fall.
        jmp.raise_if_stuck(trained(tx, closed, steps=4), 4)
    assert "closes over" not in str(error.value)
