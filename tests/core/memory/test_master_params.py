"""Float32 checkpoints of half parameters, resumed runs, and the containers of Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_lite as jmp
from tests.support.steps import bits, make_step

PARAMS = {"dense": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4)}, "norm": {"scale": jnp.ones(4)}}
O2 = jmp.get_policy("O2")


def optimizer():
    inner = jmp.with_half_state(optax.adamw(1e-2))
    return jmp.with_loss_scale(jmp.with_master_params(inner))


@pytest.fixture(scope="module")
def trained():
    """O2 after two steps: the step, the parameters, the state, the gradients."""
    params, tx = O2.cast_to_param(PARAMS), optimizer()
    step, opt_state = make_step(tx), tx.init(params)
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)), params)
    for _ in range(2):
        params, opt_state = step(params, opt_state, grads)
    return step, params, opt_state, grads


def test_the_masters_are_those_of_the_optimizer(trained):
    _, params, opt_state, _ = trained
    full = jmp.get_master_params(opt_state, params)
    assert bits(full["dense"]) == bits(opt_state.inner_state.masters["dense"])
    assert full["norm"]["scale"] is params["norm"]["scale"]
    assert bits(O2.cast_to_param(full)) == bits(params)


def test_to_float32_and_back_changes_no_bit(trained):
    _, params, opt_state, _ = trained
    checkpoint = jax.tree.map(np.asarray, jmp.get_master_params(opt_state, params))
    again = jmp.set_master_params(opt_state, params, checkpoint)
    assert bits(again) == bits((opt_state, params))
    assert jax.tree.structure(again) == jax.tree.structure((opt_state, params))


def test_a_float32_checkpoint_starts_a_run_in_half(trained):
    """The masters hold what the half parameters cannot."""
    step, *_, grads = trained
    params = O2.cast_to_param(jax.tree.map(jnp.zeros_like, PARAMS))
    opt_state, params = jmp.set_master_params(optimizer().init(params), params, PARAMS)
    assert bits(params) == bits(O2.cast_to_param(PARAMS))
    assert bits(jmp.get_master_params(opt_state, params)) == bits(PARAMS)
    programs = step._cache_size()
    step(params, opt_state, grads)
    assert step._cache_size() == programs  # The same shapes, dtypes and placement.


def test_masters_from_an_array_on_one_device_are_as_free_as_those_before(trained):
    """Orbax restores values so. A step would not combine an array on one device with others elsewhere."""
    _, params, opt_state, _ = trained
    on_one = jax.device_put(jmp.get_master_params(opt_state, params), jax.devices()[1])
    again = jmp.set_master_params(opt_state, params, on_one)
    assert not any(leaf.committed for leaf in jax.tree.leaves(again))
    assert bits(again) == bits((opt_state, params))


@pytest.mark.slow
def test_flax_serialization_and_a_train_state_keep_all(trained):
    from flax import serialization
    from flax.training.train_state import TrainState

    _, params, opt_state, grads = trained
    state = TrainState.create(apply_fn=None, params=O2.cast_to_param(PARAMS), tx=optimizer())
    saved = serialization.to_bytes(state.replace(params=params, opt_state=opt_state))
    restored = serialization.from_bytes(state, saved)
    assert bits((restored.params, restored.opt_state)) == bits((params, opt_state))
    assert bits(jmp.get_master_params(restored, restored.params)) == bits(
        jmp.get_master_params(opt_state, params)
    )
    stepped = state.apply_gradients(grads=grads)
    assert bits(O2.cast_to_param(jmp.get_master_params(stepped, stepped.params))) == bits(stepped.params)


def test_misuse_is_named(trained):
    _, params, opt_state, _ = trained
    with pytest.raises(ValueError, match="No optimizer wrapped in with_master_params was found"):
        jmp.get_master_params(optax.adam(1e-3).init(params), params)
    with pytest.raises(
        ValueError, match=r"master 'dense/kernel' of shape \(3, 4\), the parameters have none of"
    ):
        jmp.get_master_params(opt_state, {"other": params["norm"]})
    with pytest.raises(ValueError, match="two masters of the parameter 'dense/kernel'"):
        jmp.get_master_params((opt_state, opt_state), params)
    short = {"dense": params["dense"], "norm": {"scale": jnp.ones(3)}}
    with pytest.raises(
        ValueError, match=r"1 leaves differ .* 'norm/scale': \(3,\) in values, \(4,\) in params"
    ):
        jmp.set_master_params(opt_state, params, short)
    with pytest.raises(ValueError, match="'norm/scale': not there in values"):
        jmp.set_master_params(opt_state, params, {"dense": params["dense"]})


@pytest.mark.parametrize("number", [7e4, -7e4, np.nan])
def test_a_number_that_half_cannot_hold_is_named(number):
    params = {"body": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
    opt_state = jmp.with_master_params(optax.sgd(1.0)).init(params)
    with pytest.raises(ValueError, match=r"'body' has NaN or a number beyond 65504, the largest .* float16"):
        jmp.set_master_params(opt_state, params, {"body": jnp.array([1, number]), "norm": jnp.ones(2)})
    held = {"body": jnp.array([1e-30, 65519]), "norm": jnp.full(2, 7e4)}
    for put in (jmp.set_master_params, jax.jit(jmp.set_master_params)):
        _, new = put(opt_state, params, held)
        assert (new["body"].tolist(), new["norm"].tolist()) == ([0, 65504], [7e4] * 2)
