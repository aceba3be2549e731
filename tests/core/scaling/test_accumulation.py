"""`migrate_state` in the middle of an accumulation of `optax.MultiSteps`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import serialization

import jmp_lite as jmp
from tests.support.steps import bits


def accumulated(tx, mini_steps):
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for _ in range(mini_steps):
        _, state = tx.update(params, state, params)
    return params, state


WITH = {
    "alone": lambda k: optax.MultiSteps(optax.sgd(1.0), k).gradient_transformation(),
    "outside": lambda k: jmp.with_loss_scale(optax.MultiSteps(optax.adam(1e-3), k)),
    "inside": lambda k: optax.MultiSteps(jmp.with_loss_scale(optax.adam(1e-3)), k).gradient_transformation(),
}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", WITH)
def test_an_accumulation_is_not_continued_with_fewer_micro_batches(name, saved):
    make = WITH[name]
    params, old = accumulated(make(8), 5)
    saved_state = serialization.to_state_dict(old) if saved else old
    for k in (2, 3, 5):
        with pytest.raises(ValueError, match=r"5 micro-batches have been accumulated.*set mini_step to 0"):
            jmp.migrate_state(make(k), params, saved_state)
    for k in (6, 8, 16):
        assert bits(jmp.migrate_state(make(k), params, saved_state)) == bits(old)
    params, old = accumulated(make(8), 8)
    jmp.migrate_state(make(2), params, old)


def test_an_accumulation_whose_optimizer_needs_more_arguments_is_carried_over():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(2), update)
    tx = optax.MultiSteps(inner, 3).gradient_transformation()
    params = {"w": jnp.ones(2)}
    _, state = tx.update(params, tx.init(params), params, value=1.0)
    assert bits(jmp.migrate_state(tx, params, state)) == bits(state)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("wrap", [jmp.with_loss_scale, lambda tx: optax.chain(optax.clip(9.0), tx)])
def test_a_sum_is_not_continued_from_what_may_be_a_mean(wrap):
    """No state says whether its gradients are a mean or a sum: 2 micro-batches of 1 would count as 1."""
    mean, total = (
        wrap(optax.MultiSteps(optax.sgd(1.0), 4, use_grad_mean=flag).gradient_transformation())
        for flag in (True, False)
    )
    for steps in (1, 3):
        params, old = accumulated(mean, steps)
        with pytest.raises(
            ValueError, match=rf"{steps} micro-batches .* use_grad_mean=False, .*set mini_step to 0"
        ):
            jmp.migrate_state(total, params, old)
        assert bits(jmp.migrate_state(mean, params, old)) == bits(old)
    params, old = accumulated(mean, 4)
    assert bits(jmp.migrate_state(total, params, old)) == bits(old)
